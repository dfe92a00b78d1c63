"""cdcpipe's core: PostgreSQL's logical replication stream as records on a pipe.

The path of the data: ``replication.connection`` → ``pgoutput.decode`` → ``pgoutput.transactions`` → ``plugins`` → ``pipe``.
The core imports neither click nor pyspark. Decoders and state machines do no I/O, and get the time as an argument.
"""

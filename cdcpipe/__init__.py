"""cdcpipe's core: PostgreSQL's logical replication stream as records on a pipe.

The way of the data: ``replication.connection`` → ``pgoutput.decode`` → ``pgoutput.transactions`` → ``plugins`` → ``pipe``.
The core knows neither click nor pyspark; decoders and state machines do no I/O and take time as an argument.
"""

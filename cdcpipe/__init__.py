"""cdcpipe's core: PostgreSQL's logical replication stream as records on a pipe.

The path of the data: ``libpq.walsender`` → ``streaming.receiver`` (with ``pgoutput.transactions`` and ``plugins``) →
``pipe.output``. ``pgoutput.decode`` reads one message.
The core imports neither click nor pyspark. Decoders and state machines do no I/O, and get the time as an argument.
"""

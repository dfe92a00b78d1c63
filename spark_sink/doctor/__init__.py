"""What would go wrong with a pipeline, found before it does: on this machine, in its directories and stores, in Spark's workers.

Each module asks for facts, and has functions without I/O that judge them. ``cdcpipe doctor`` judges the server (`client.doctor`).
"""

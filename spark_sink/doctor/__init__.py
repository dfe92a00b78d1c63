"""Finds problems of a pipeline before it runs: on this machine, in its directories and stores, in Spark's workers.

Each module has functions that collect facts, and functions without I/O that judge them. ``cdcpipe doctor`` judges the server
(`client.doctor`).
"""

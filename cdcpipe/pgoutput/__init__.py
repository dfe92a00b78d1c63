"""Reads the messages of pgoutput, PostgreSQL's built-in output plugin. No I/O, except for large transactions (held.py)."""

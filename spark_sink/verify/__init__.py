"""Compares replicas with PostgreSQL, as of one snapshot of the server."""

"""Compares replicas with PostgreSQL at one snapshot of the server."""

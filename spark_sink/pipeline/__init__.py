"""Runs the path from the staging log to the tables: query, micro-batches, replicas, names in the catalog."""

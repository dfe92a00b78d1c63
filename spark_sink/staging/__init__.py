"""The staging log: a directory that is its own index. Knows nothing of Spark."""

"""The staging log: segments, their indexes, and how far each reader is. Knows nothing of Spark."""

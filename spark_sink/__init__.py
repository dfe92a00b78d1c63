"""From the pipe to Spark tables: the launcher, the staging log, the data source, the tables."""

"""What a PostgreSQL table is in Spark: its names, types, keys and versions."""

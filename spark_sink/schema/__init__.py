"""Maps a PostgreSQL table to Spark: its names, types, keys and versions."""

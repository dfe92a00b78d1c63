"""Places, local or in an object store: durable and conditional writes, file locks, Parquet files."""

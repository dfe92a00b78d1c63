"""Places, local or in an object store: durable and conditional writes, file locks, clocks, Parquet files."""

"""Where everything is in a warehouse, how far each table is, and who may write."""

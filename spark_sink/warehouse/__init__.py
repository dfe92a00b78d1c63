"""A warehouse: the paths of its tables, how far each table is, and who may write to them."""

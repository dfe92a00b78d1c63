"""What is where in a warehouse, how far each table is, and who may write."""

"""A small Delta Lake client. It knows nothing of change data: it takes columns, files, keys, row numbers and marks."""

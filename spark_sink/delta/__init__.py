"""A small Delta Lake client. It knows nothing of change data: it takes versions, notes, keys and row numbers."""

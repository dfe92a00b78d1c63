"""Many values of a column, as text or in binary form -> an Arrow array, without Python per row. Needs numpy and pyarrow."""

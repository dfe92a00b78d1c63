"""Makes a table's current rows, its rows at an earlier time, or all versions of its rows, from its changelog."""

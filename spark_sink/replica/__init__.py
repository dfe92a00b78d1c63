"""Makes a table's current rows, or its rows at an earlier time, from its changelog."""

"""Turns many values of a column, as text or in binary form, into an Arrow array, without Python per row."""

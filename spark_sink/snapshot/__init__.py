"""Copies whole tables, at an exact position of the stream."""

"""Copies tables at an exact position of the stream."""

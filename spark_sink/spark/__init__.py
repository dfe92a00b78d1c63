"""Spark itself: sessions, what its workers need, values as SQL text."""

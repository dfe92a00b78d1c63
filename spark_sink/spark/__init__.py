"""Spark sessions, and names and values as SQL text."""

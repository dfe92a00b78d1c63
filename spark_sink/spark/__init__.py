"""Spark sessions, the JVM and what it prints, and names and values as SQL text."""

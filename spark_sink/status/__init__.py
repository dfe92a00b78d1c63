"""Finds out how far each stage is. Needs no Spark."""

"""Compacts tables, deletes files that are not part of them, and removes old changes."""

"""Compacts, vacuums and forgets."""

"""Changelog tables: every change once."""

"""Changelog tables, which have every change once: from segments to files, and commits of these."""

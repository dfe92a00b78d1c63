"""Writes names and strings as text of Spark's SQL."""

from __future__ import annotations

__all__ = ["literal", "quote"]


def quote(name: str) -> str:
    """Quote an identifier for Spark's SQL."""
    return "`" + name.replace("`", "``") + "`"


def literal(text: str) -> str:
    """Write a string as a literal of Spark's SQL."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"

"""Formats names and SQL for the text of findings."""

from __future__ import annotations

from cdcpipe.sql import quote_identifier, quote_literal

__all__ = ["listed", "set_globally", "table_name"]

_SHOWN = 5


def set_globally(setting: str, *values: object, restart: bool = False) -> str:
    """Return the SQL that changes a setting of the server. Several values form a list."""
    sql = f"ALTER SYSTEM SET {setting} = {', '.join(quote_literal(str(value)) for value in values)}"
    return f"{sql}; then restart the server" if restart else f"{sql}; SELECT pg_reload_conf()"


def table_name(schema: str, name: str) -> str:
    """Return a table's name, quoted as in SQL."""
    return f"{quote_identifier(schema)}.{quote_identifier(name)}"


def listed(names: list[str] | tuple[str, ...]) -> str:
    """Return names for people: the first five, and how many more."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more

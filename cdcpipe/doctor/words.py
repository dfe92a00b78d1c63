"""Formats names, states and SQL for the text of findings."""

from __future__ import annotations

from cdcpipe.replication.slots import Slot
from cdcpipe.sql import quote_literal

__all__ = ["listed", "lost", "set_globally"]

_SHOWN = 5


def set_globally(setting: str, *values: object, restart: bool = False) -> str:
    """Return the SQL that changes a setting of the server. Several values form a list."""
    sql = f"ALTER SYSTEM SET {setting} = {', '.join(quote_literal(str(value)) for value in values)}"
    return f"{sql}; then restart the server" if restart else f"{sql}; SELECT pg_reload_conf()"


def listed(names: list[str] | tuple[str, ...]) -> str:
    """Return names for people: the first five, and how many more."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def lost(slot: Slot) -> str:
    """Return that a slot is lost, with the server's reason if it is known."""
    return "is lost" if slot.invalidation_reason is None else f"is lost ({slot.invalidation_reason})"

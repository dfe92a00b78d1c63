"""Formats names, states and SQL for the text of findings."""

from __future__ import annotations

from typing import Final

from cdcpipe.replication.slots import Slot
from cdcpipe.sql import quote_literal

__all__ = ["EVENT_TRIGGERS_ON", "lost", "names_in", "set_globally"]

EVENT_TRIGGERS_ON: Final = (
    "ALTER SYSTEM RESET event_triggers; SELECT pg_reload_conf(), or ALTER DATABASE … RESET event_triggers; then cdcpipe ddl install"
)
"""What mends ``event_triggers = off``. The installation tells a stream's reader that DDL was not captured before."""


def set_globally(setting: str, *values: object, restart: bool = False) -> str:
    """Return the SQL that changes a setting of the server. Several values form a list."""
    sql = f"ALTER SYSTEM SET {setting} = {', '.join(quote_literal(str(value)) for value in values)}"
    return f"{sql}; then restart the server" if restart else f"{sql}; SELECT pg_reload_conf()"


def names_in(setting: str) -> list[str]:
    """Return the names in a list of a server's setting, such as ``a, "b"``."""
    return [name.strip().strip('"') for name in setting.split(",") if name.strip()]


def lost(slot: Slot) -> str:
    """Return that a slot is lost, with the server's reason if it is known."""
    return "is lost" if slot.invalidation_reason is None else f"is lost ({slot.invalidation_reason})"

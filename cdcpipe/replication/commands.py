"""Writes replication commands as text. Source: the manual, "Streaming Replication Protocol"."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from cdcpipe.lsn import format_lsn
from cdcpipe.sql import quote_identifier, quote_literal

__all__ = [
    "IDENTIFY_SYSTEM",
    "create_replication_slot",
    "publication_names",
    "start_replication",
]

IDENTIFY_SYSTEM = "IDENTIFY_SYSTEM"


def publication_names(names: Iterable[str]) -> str:
    """Return the value of pgoutput's ``publication_names``: quoted identifiers, because the server folds unquoted ones."""
    return ",".join(quote_identifier(name) for name in names)


def create_replication_slot(slot: str, plugin: str, *, is_temporary: bool) -> str:
    """Return the command that creates a logical slot and exports the snapshot at the slot's beginning.

    All servers since PostgreSQL 10 accept this form of the option.
    """
    temporary = " TEMPORARY" if is_temporary else ""
    return f"CREATE_REPLICATION_SLOT {quote_identifier(slot)}{temporary} LOGICAL {quote_identifier(plugin)} EXPORT_SNAPSHOT"


def start_replication(slot: str, start_lsn: int, options: Mapping[str, str | None]) -> str:
    """Return the command that starts the stream. An option with the value None is written without a value."""
    words: Sequence[str] = [
        quote_identifier(key) if value is None else f"{quote_identifier(key)} {quote_literal(value)}"
        for key, value in options.items()
    ]
    arguments = f" ({', '.join(words)})" if words else ""
    return f"START_REPLICATION SLOT {quote_identifier(slot)} LOGICAL {format_lsn(start_lsn)}{arguments}"

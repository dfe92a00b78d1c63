"""Writes replication commands as text. Source: the manual, "Streaming Replication Protocol"."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from cdcpipe.errors import InvalidArgumentsError
from cdcpipe.lsn import format_lsn
from cdcpipe.sql import quote_identifier, quote_literal

__all__ = [
    "IDENTIFY_SYSTEM",
    "create_replication_slot",
    "enable_failover",
    "parse_publication_names",
    "publication_names",
    "start_replication",
]

IDENTIFY_SYSTEM = "IDENTIFY_SYSTEM"


def publication_names(names: Iterable[str]) -> str:
    """Return the value of pgoutput's ``publication_names``: quoted identifiers, because the server folds unquoted ones."""
    return ",".join(quote_identifier(name) for name in names)


def create_replication_slot(slot: str, plugin: str, *, is_temporary: bool, failover: bool = False) -> str:
    """Return the command that creates a logical slot and exports the snapshot at the slot's beginning.

    All servers since PostgreSQL 10 accept this form of the option, without ``failover``. A temporary slot can't have ``failover``.
    """
    temporary = " TEMPORARY" if is_temporary else ""
    options = "(SNAPSHOT 'export', FAILOVER true)" if failover else "EXPORT_SNAPSHOT"
    return f"CREATE_REPLICATION_SLOT {quote_identifier(slot)}{temporary} LOGICAL {quote_identifier(plugin)} {options}"


def enable_failover(slot: str) -> str:
    """Return the command that gives a free slot the property ``failover`` (PostgreSQL 17 or newer)."""
    return f"ALTER_REPLICATION_SLOT {quote_identifier(slot)} (FAILOVER true)"


def start_replication(slot: str, start_lsn: int, options: Mapping[str, str | None]) -> str:
    """Return the command that starts the stream. An option with the value None is written without a value."""
    words: Sequence[str] = [
        quote_identifier(key) if value is None else f"{quote_identifier(key)} {quote_literal(value)}"
        for key, value in options.items()
    ]
    arguments = f" ({', '.join(words)})" if words else ""
    return f"START_REPLICATION SLOT {quote_identifier(slot)} LOGICAL {format_lsn(start_lsn)}{arguments}"


def parse_publication_names(value: str) -> list[str]:
    """Read a list of identifiers as the server does: folded to lower case unless quoted, a doubled quote stands for one."""
    names: list[str] = []
    pos = 0
    while True:
        while pos < len(value) and value[pos].isspace():
            pos += 1
        if value[pos : pos + 1] == '"':
            name = ""
            while True:
                end = value.find('"', pos + 1)
                if end < 0:
                    break
                name += value[pos + 1 : end]
                pos = end + 1
                if value[pos : pos + 1] != '"':
                    break
                name += '"'
            if end < 0 or not name:
                break
        else:
            end = pos
            while end < len(value) and value[end] != "," and not value[end].isspace():
                end += 1
            name, pos = value[pos:end].lower(), end
            if not name:
                break
        names.append(name)
        while pos < len(value) and value[pos].isspace():
            pos += 1
        if pos == len(value):
            return names
        if value[pos] != ",":
            break
        pos += 1
    msg = f"publication_names is not a list of identifiers: {value!r}"
    raise InvalidArgumentsError(msg, hint="name each with --publication, which quotes it")

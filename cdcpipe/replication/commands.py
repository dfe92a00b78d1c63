"""The replication commands as text, every name quoted by our own hand.

The walsender's grammar has no ``E'…'`` strings, so libpq's quoting, which writes them for backslashes, does not serve here:
a quote character is doubled and nothing else is special. Source: the manual, "Streaming Replication Protocol".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from cdcpipe.errors import InvalidArgumentsError
from cdcpipe.lsn import format_lsn

__all__ = [
    "IDENTIFY_SYSTEM",
    "create_replication_slot",
    "publication_names",
    "quote_identifier",
    "quote_literal",
    "start_replication",
]

IDENTIFY_SYSTEM = "IDENTIFY_SYSTEM"


def _refuse_nul(text: str) -> None:
    if "\0" in text:
        msg = f"a name or a value can't hold a NUL character: {text!r}"
        raise InvalidArgumentsError(msg)


def quote_identifier(name: str) -> str:
    """Return ``name`` as a quoted identifier."""
    _refuse_nul(name)
    return '"' + name.replace('"', '""') + '"'


def quote_literal(value: str) -> str:
    """Return ``value`` as a string literal (``standard_conforming_strings`` is on: backslashes are plain)."""
    _refuse_nul(value)
    return "'" + value.replace("'", "''") + "'"


def publication_names(names: Iterable[str]) -> str:
    """Return the value of pgoutput's ``publication_names``: a list of identifiers, which folds what is not quoted."""
    return ",".join(quote_identifier(name) for name in names)


def create_replication_slot(slot: str, plugin: str, *, is_temporary: bool) -> str:
    """Return the command that makes a logical slot and exports the snapshot of the database at the slot's beginning.

    This form of the option is that of all servers from 10 on.
    """
    temporary = " TEMPORARY" if is_temporary else ""
    return f"CREATE_REPLICATION_SLOT {quote_identifier(slot)}{temporary} LOGICAL {quote_identifier(plugin)} EXPORT_SNAPSHOT"


def start_replication(slot: str, start_lsn: int, options: Mapping[str, str | None]) -> str:
    """Return the command that starts the stream; an option whose value is None is given without one."""
    words: Sequence[str] = [
        quote_identifier(key) if value is None else f"{quote_identifier(key)} {quote_literal(value)}"
        for key, value in options.items()
    ]
    arguments = f" ({', '.join(words)})" if words else ""
    return f"START_REPLICATION SLOT {quote_identifier(slot)} LOGICAL {format_lsn(start_lsn)}{arguments}"

"""Reads and writes text as PostgreSQL does, for the plugins: option values, timestamps, quoted names and literals, values."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Final

from cdcpipe.errors import InvalidArgumentsError, ProtocolError
from cdcpipe.pgoutput.options import as_bool

__all__ = ["format_timestamp", "invalid_value", "match_value", "parse_bool", "quote_identifier", "quote_literal"]


def invalid_value(name: str, value: str) -> InvalidArgumentsError:
    """Return the error for an option's value."""
    return InvalidArgumentsError(f"could not parse value {value!r} of the output plugin's option {name!r}")


def parse_bool(name: str, value: str | None) -> bool:
    """Read a boolean as `as_bool` does. Raises InvalidArgumentsError for any other text."""
    found = as_bool(value)
    if found is None:
        raise invalid_value(name, value or "")
    return found


_EPOCH: Final = datetime(2000, 1, 1, tzinfo=UTC)


def format_timestamp(time_us: int) -> bytes:
    """Return the time as the server prints it in UTC, without trailing zeros of the second."""
    try:
        time = _EPOCH + timedelta(microseconds=time_us)
    except OverflowError:
        msg = f"a commit time is out of range: {time_us} microseconds since 2000"
        raise ProtocolError(msg) from None
    text = f"{time.year:04}-{time:%m-%d %H:%M:%S}"  # %Y has three digits before the year 1000
    if time.microsecond:
        text += f".{time.microsecond:06}".rstrip("0")
    return f"{text}+00".encode()


def quote_identifier(name: str, keywords: frozenset[str]) -> str:
    """Quote a name if necessary. ``keywords`` are the words that must be quoted when they are names."""
    is_plain = name.isascii() and name.replace("_", "a").isalnum() and name == name.lower() and not name[0].isdigit()
    if is_plain and name not in keywords:
        return name
    escaped = name.replace('"', '""')
    return f'"{escaped}"'


def quote_literal(text: str) -> str:
    """Return a string constant."""
    prefix = "E" if "\\" in text else ""
    escaped = text.replace("'", "''").replace("\\", "\\\\")
    return f"{prefix}'{escaped}'"


def match_value(pattern: re.Pattern[bytes], value: bytes) -> re.Match[bytes]:
    """Return the match of a value's whole text. Raises ValueError if the text is not of its type."""
    match = pattern.fullmatch(value)
    if match is None:
        msg = "the text does not have the form of its type"
        raise ValueError(msg)
    return match

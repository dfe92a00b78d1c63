"""Log sequence numbers: PostgreSQL's byte positions in the write-ahead log.

Compare them as integers, never as text: as text, ``0/9`` sorts after ``0/10``. The text form is for the pipe and for messages.
Source: the manual, "8.20. pg_lsn Type".
"""

from __future__ import annotations

import re
from typing import Self

__all__ = ["LSN", "format_lsn"]

_LSN_TEXT = re.compile(r"([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})", re.ASCII)


def format_lsn(lsn: int) -> str:
    """Return the text form that PostgreSQL and the pipe use: two hexadecimal numbers, ``16/B374D848``."""
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


class LSN(int):
    """A 64-bit WAL position that prints itself as PostgreSQL does."""

    __slots__ = ()

    def __new__(cls, value: int = 0) -> Self:
        """Raise ValueError if ``value`` does not fit in 64 bits."""
        if not 0 <= value <= 0xFFFFFFFFFFFFFFFF:
            msg = f"not an LSN, which has 64 bits: {value}"
            raise ValueError(msg)
        return super().__new__(cls, value)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the text form, with or without leading zeros, upper or lower case. Raises ValueError for anything else."""
        match = _LSN_TEXT.fullmatch(text)
        if match is None:
            msg = f"not an LSN (two hexadecimal numbers with a slash between them, like 16/B374D848): {text!r}"
            raise ValueError(msg)
        return cls(int(match[1], 16) << 32 | int(match[2], 16))

    def __str__(self) -> str:
        return format_lsn(self)

    def __repr__(self) -> str:
        return f"LSN({format_lsn(self)})"

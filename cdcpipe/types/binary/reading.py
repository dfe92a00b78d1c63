"""Reads the parts of a value in binary form: numbers, strings and lengths, each checked against the bytes that are there."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final, TypeAlias

from cdcpipe.errors import ProtocolError

__all__ = [
    "F4",
    "F8",
    "I2",
    "I4",
    "I8",
    "MAX_TEXT_BYTES",
    "U2",
    "U4",
    "U8",
    "Parts",
    "ToText",
    "check_end",
    "malformed",
    "take",
    "take_cstring",
    "take_nullable",
]


ToText: TypeAlias = Callable[[bytes], bytes]

MAX_TEXT_BYTES: Final = 0x3FFFFFFF
"""MaxAllocSize: the server has the same limit for a text."""

I2, I4, I8 = struct.Struct(">h"), struct.Struct(">i"), struct.Struct(">q")
U2, U4, U8 = struct.Struct(">H"), struct.Struct(">I"), struct.Struct(">Q")
F4, F8 = struct.Struct(">f"), struct.Struct(">d")


def malformed(problem: str) -> ProtocolError:
    """Return the error for bytes that a send function can't have written."""
    return ProtocolError(f"a malformed value in binary form: {problem}")


def check_end(data: bytes, pos: int) -> None:
    """Raise ProtocolError if the value does not end at ``pos``."""
    if pos != len(data):
        raise malformed(f"it should end after {pos} of {len(data)} bytes")


def take(data: bytes, pos: int, length: int) -> tuple[bytes, int]:
    """Return ``length`` bytes from ``pos`` on, and where they end."""
    end = pos + length
    if length < 0 or end > len(data):
        raise malformed(f"{length} bytes do not fit at byte {pos} of {len(data)}")
    return data[pos:end], end


def take_nullable(data: bytes, pos: int) -> tuple[bytes | None, int]:
    """Read a length and so many bytes; the length of NULL is -1."""
    (length,) = I4.unpack_from(data, pos)
    return (None, pos + 4) if length == -1 else take(data, pos + 4, length)


def take_cstring(data: bytes, pos: int) -> tuple[bytes, int]:
    """Return the bytes up to the next NUL, and the place behind it."""
    end = data.find(0, pos)
    if end < 0:
        raise malformed(f"a string at byte {pos} has no end")
    return data[pos:end], end + 1


class Parts:
    """Collects texts, and limits their size together: a few bytes can be a number with many digits."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self._room = MAX_TEXT_BYTES

    def add(self, text: bytes) -> None:
        """Add a text. Raises ProtocolError if all together are too long."""
        self._room -= len(text) + 1
        if self._room < 0:
            raise malformed(f"its text has more than {MAX_TEXT_BYTES} bytes")
        self.parts.append(text)

"""Turns the text of bytes, bits and points into JSON, as Debezium's connector writes them."""

from __future__ import annotations

import base64
import hashlib
import re
import struct
import uuid
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from cdcpipe.plugins.debezium.numbers import FLOAT
from cdcpipe.plugins.text import match_value

__all__ = ["BINARY", "ToJson", "bit", "bits", "point", "unhex", "uuid_of"]

ToJson: TypeAlias = Callable[[bytes], bytes]

BINARY: Final[Mapping[str, ToJson]] = {
    "bytes": base64.b64encode,
    "base64": base64.b64encode,
    "base64-url-safe": base64.urlsafe_b64encode,
    "hex": lambda data: data.hex().encode(),
}


def unhex(value: bytes) -> bytes:
    """Return the bytes of a bytea."""
    if not value.startswith(b"\\x"):
        msg = "bytea_output is not hex"
        raise ValueError(msg)
    return bytes.fromhex(value[2:].decode())


def bit(value: bytes) -> bytes:
    """Return a single bit as a boolean."""
    # An empty varbit is no boolean. Neither is a value of a column "bit" (quoted), which has no length.
    return {b"0": b"false", b"1": b"true"}.get(value) or b'"%b"' % bits(value)


def bits(value: bytes) -> bytes:
    """Return base64 of the bits in little-endian order, up to the last bit that is set."""
    number = int(value, 2) if value else 0
    return base64.b64encode(number.to_bytes((number.bit_length() + 7) // 8, "little"))


_POINT: Final = re.compile(rb"\(([^,()]+),([^,()]+)\)")


def point(value: bytes) -> bytes:
    """Return a point as an object with its coordinates and its WKB."""
    x, y = match_value(_POINT, value).groups()
    # OGC: byte order, kind, coordinates.
    wkb = base64.b64encode(struct.pack("<BIdd", 1, 1, float(x), float(y)))
    return b'{"x":%b,"y":%b,"wkb":"%b","srid":null}' % (FLOAT.render(x), FLOAT.render(y), wkb)


def uuid_of(name: bytes) -> bytes:
    """Return the UUID that java.util.UUID.nameUUIDFromBytes() makes of the name."""
    return str(uuid.UUID(bytes=hashlib.md5(name, usedforsecurity=False).digest(), version=3)).encode()

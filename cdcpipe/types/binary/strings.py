"""Texts, bytes, bits and uuids: turns their binary form into text."""

from __future__ import annotations

import struct

from cdcpipe.types.binary.reading import I4, malformed

__all__ = ["bit_text", "bytea_text", "char_text", "plain_text", "uuid_text", "versioned_text"]


def plain_text(data: bytes) -> bytes:
    """Textsend and the like: the text itself."""
    return data


def char_text(data: bytes) -> bytes:
    """charsend: one byte. A byte beyond ASCII is an escape."""
    (code,) = struct.unpack("B", data)
    return b"\\%03o" % code if code > 0x7F else data.rstrip(b"\0")


def bytea_text(data: bytes) -> bytes:
    """byteasend: the bytes themselves."""
    return b"\\x" + data.hex().encode()


def versioned_text(data: bytes) -> bytes:
    """jsonb_send, jsonpath_send: the version and the text."""
    if data[0] != 1:
        raise malformed(f"a format version is {data[0]}")
    return data[1:]


def uuid_text(data: bytes) -> bytes:
    """uuid_send: 16 bytes."""
    text = data.hex()
    if len(text) != 32:
        raise malformed(f"a uuid has 16 bytes, not {len(data)}")
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}".encode()


def bit_text(data: bytes) -> bytes:
    """bit_send: the number of bits; they come from the left."""
    (count,) = I4.unpack_from(data)
    size = (count + 7) // 8
    if count < 0 or len(data) != 4 + size:
        raise malformed(f"{count} bits are not {len(data) - 4} bytes")
    if not count:
        return b""
    bits = int.from_bytes(data[4:]) >> (8 * size - count)
    return f"{bits:0{count}b}".encode()

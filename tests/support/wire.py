"""Builds the messages of PostgreSQL's protocol that a walsender sends while it streams."""

import struct

__all__ = ["copy_data", "error_fields", "keepalive", "message", "wal_data"]


def message(kind: bytes, body: bytes = b"") -> bytes:
    return kind + struct.pack(">I", len(body) + 4) + body


def copy_data(content: bytes) -> bytes:
    return message(b"d", content)


def wal_data(lsn: int, record: bytes) -> bytes:
    return copy_data(b"w" + struct.pack(">QQq", lsn, lsn, 7) + record)


def keepalive(wal_end: int, *, reply_requested: bool = False) -> bytes:
    return copy_data(b"k" + struct.pack(">Qq?", wal_end, 7, reply_requested))


def error_fields(severity: str, sqlstate: str, text: str) -> bytes:
    return b"".join(code + value.encode() + b"\0" for code, value in ((b"V", severity), (b"C", sqlstate), (b"M", text))) + b"\0"

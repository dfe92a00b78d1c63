"""Identifiers that the server makes, such as WAL positions: turns their binary form into text."""

from __future__ import annotations

import struct

from cdcpipe.types.binary.reading import U8, malformed

__all__ = ["pg_lsn_text", "snapshot_text", "tid_text"]


def pg_lsn_text(data: bytes) -> bytes:
    """pg_lsn_send: 64 bits."""
    (lsn,) = U8.unpack(data)
    return b"%X/%X" % (lsn >> 32, lsn & 0xFFFFFFFF)


_TID = struct.Struct(">IH")  # block, number in it


def tid_text(data: bytes) -> bytes:
    """tidsend: block, number in it."""
    return b"(%d,%d)" % _TID.unpack(data)


_SNAPSHOT = struct.Struct(">iqq")  # number of transactions in progress, xmin, xmax


def snapshot_text(data: bytes) -> bytes:
    """pg_snapshot_send: number of transactions in progress, xmin, xmax; their ids."""
    count, xmin, xmax = _SNAPSHOT.unpack_from(data)
    if count < 0 or len(data) != _SNAPSHOT.size + 8 * count:
        raise malformed(f"{count} transaction ids do not fit")
    xids = struct.unpack_from(f">{count}q", data, _SNAPSHOT.size)
    return f"{xmin}:{xmax}:{','.join(map(str, xids))}".encode()

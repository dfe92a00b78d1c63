"""Reads and builds the messages inside CopyData of a replication stream: WALData and PrimaryKeepalive in, StandbyStatusUpdate out.

Source: the manual, "Streaming Replication Protocol", START_REPLICATION. Integers are big-endian; times are microseconds since
2000-01-01 UTC. The streaming loop parses WALData itself, because that is fastest.
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct

from cdcpipe.errors import ProtocolError
from cdcpipe.lsn import LSN
from cdcpipe.pgoutput.messages import UNIX_2000_US

__all__ = [
    "WAL_DATA",
    "WAL_DATA_HEADER_BYTES",
    "PrimaryKeepalive",
    "build_status_update",
    "parse_keepalive",
]

# WALData (XLogData before 2025): Byte1('w') Int64 walStart Int64 walEnd Int64 sendTime Byten
WAL_DATA = ord("w")
WAL_DATA_HEADER_BYTES = Struct(">cQQq").size
# Primary keepalive: Byte1('k') Int64 walEnd Int64 sendTime Byte1 replyRequested
_KEEPALIVE = Struct(">cQqB")
# Standby status update: Byte1('r') Int64 write Int64 flush Int64 apply Int64 sendTime Byte1 replyRequested
_STATUS_UPDATE = Struct(">cQQQqB")


@dataclass(slots=True)
class PrimaryKeepalive:
    """The server has sent everything up to ``wal_end``. With ``reply_requested`` it wants a status update at once."""

    wal_end: LSN
    reply_requested: bool


def parse_keepalive(data: bytes | memoryview) -> PrimaryKeepalive:
    """Read a CopyData message. Raises ProtocolError if it is not a keepalive (or a WALData message that is cut short)."""
    if len(data) != _KEEPALIVE.size or data[0] != ord("k"):
        kind = data[0] if len(data) else -1
        msg = f"unexpected message in the replication stream: kind {kind:#x}, {len(data)} bytes"
        raise ProtocolError(msg)
    _, wal_end, _, reply_requested = _KEEPALIVE.unpack(data)
    return PrimaryKeepalive(LSN(wal_end), reply_requested != 0)


def build_status_update(write_lsn: int, flush_lsn: int, *, unix_time_s: float, reply_requested: bool = False) -> bytes:
    """Return a StandbyStatusUpdate. With a ``flush_lsn`` of 0 ("no opinion") the server keeps its confirmed position."""
    send_time_us = round(unix_time_s * 1_000_000) - UNIX_2000_US
    return _STATUS_UPDATE.pack(b"r", write_lsn, flush_lsn, flush_lsn, send_time_us, reply_requested)

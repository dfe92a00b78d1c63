"""Decodes the bytes of one pgoutput message to a message object, for protocol versions 1 to 4. No state, no I/O.

The layout depends on two facts that are not in the bytes, so the caller passes them: ``in_stream`` (between Stream Start and Stream
Stop every change, Relation, Type and Message has an xid) and ``streaming_parallel`` (Stream Abort has an LSN and a time). For a
capture, whose options are not known, ``streaming_parallel`` is None: then the size of the message decides.

For any bytes the result is a message, or a `ProtocolError` that names the kind and the position, in time and memory proportional to
``len(data)``. Counts and lengths are checked against the available bytes before they are used. A message must end where the data
ends. Source: the manual, "Logical Replication Message Formats" (integers are big-endian, strings end with a NUL and come in
client_encoding, which is UTF8).
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

from cdcpipe.errors import ProtocolError
from cdcpipe.pgoutput.messages import (
    UNCHANGED_TOAST,
    Begin,
    BeginPrepare,
    Binary,
    Column,
    Commit,
    CommitPrepared,
    Delete,
    Insert,
    LogicalMessage,
    Message,
    Origin,
    Prepare,
    Relation,
    RollbackPrepared,
    Row,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
    Truncate,
    Type,
    Update,
    Value,
)

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["NAMES", "decode", "malformed"]

_U16 = struct.Struct(">H")
_U32 = struct.Struct(">I")
_U64 = struct.Struct(">Q")
_BEGIN = struct.Struct(">QqI")  # final LSN, commit time, xid
_COMMIT = struct.Struct(">BQQq")  # flags, commit LSN, end LSN, commit time
_COLUMN_TYPE = struct.Struct(">Ii")  # type OID, type modifier
_TRUNCATE = struct.Struct(">IB")  # number of relations, option bits
_MESSAGE = struct.Struct(">BQ")  # flags, LSN
_STREAM_START = struct.Struct(">IB")  # xid, first segment
_STREAM_COMMIT = struct.Struct(">IBQQq")  # xid, flags, commit LSN, end LSN, commit time
_STREAM_ABORT = struct.Struct(">II")  # xid, subxid
_STREAM_ABORT_PARALLEL = struct.Struct(">IIQq")  # xid, subxid, abort LSN, abort time
_BEGIN_PREPARE = struct.Struct(">QQqI")  # prepare LSN, end LSN, time, xid
_PREPARE = struct.Struct(">BQQqI")  # flags, two LSNs, time, xid
_ROLLBACK_PREPARED = struct.Struct(">BQQqqI")  # flags, prepare end LSN, rollback end LSN, two times, xid

_KEY, _OLD, _NEW = b"KON"
_NULL, _UNCHANGED, _TEXT, _BINARY = b"nutb"
_STREAM_ABORT_KIND = ord("A")

NAMES: Final = {
    "B": "Begin",
    "C": "Commit",
    "O": "Origin",
    "R": "Relation",
    "Y": "Type",
    "I": "Insert",
    "U": "Update",
    "D": "Delete",
    "T": "Truncate",
    "M": "Message",
    "S": "Stream Start",
    "E": "Stream Stop",
    "c": "Stream Commit",
    "A": "Stream Abort",
    "b": "Begin Prepare",
    "P": "Prepare",
    "K": "Commit Prepared",
    "r": "Rollback Prepared",
    "p": "Stream Prepare",
}
"""The manual's names for the kinds of messages."""


def malformed(data: bytes, pos: int, what: str) -> ProtocolError:
    """Return the error for ``data``, with kind, size and position. It shows no bytes of the message, which may belong to a row."""
    kind = chr(data[0]) if data else ""
    name = f"{kind!r} ({NAMES[kind]})" if kind in NAMES else "an unknown kind"
    return ProtocolError(f"malformed pgoutput message of {len(data)} bytes, {name}: {what} at byte {pos}")


def decode(data: bytes | memoryview, *, in_stream: bool = False, streaming_parallel: bool | None = False) -> Message:
    """Decode one message. Raises ProtocolError if the data is not exactly one message."""
    if not isinstance(data, bytes):
        data = bytes(data)
    if not data:
        raise malformed(data, 0, "no kind byte")
    kind = data[0]
    try:
        if kind in _CHANGE_READERS:
            if in_stream:
                message, pos = _CHANGE_READERS[kind](data, 5, _U32.unpack_from(data, 1)[0])
            else:
                message, pos = _CHANGE_READERS[kind](data, 1, None)
        elif kind in _READERS:
            message, pos = _READERS[kind](data)
        elif kind == _STREAM_ABORT_KIND:
            message, pos = _read_stream_abort(data, streaming_parallel)
        else:
            raise malformed(data, 0, f"no message has kind 0x{kind:02x}")
    except (struct.error, IndexError):
        # Only reads past the end raise these errors, because every position is non-negative.
        raise malformed(data, len(data), "it is cut short") from None
    if pos != len(data):
        raise malformed(data, pos, "it should end")
    return message


def _read_string(data: bytes, pos: int) -> tuple[str, int]:
    end = data.find(0, pos)
    if end < 0:
        raise malformed(data, pos, "a string has no end")
    try:
        return data[pos:end].decode(), end + 1
    except UnicodeDecodeError as ex:
        raise malformed(data, pos + ex.start, "a string is not UTF-8") from None


def _check_flags(data: bytes, pos: int, flags: int) -> None:
    if flags:
        raise malformed(data, pos, f"flags that must be 0 are {flags}")


def _read_row(data: bytes, pos: int) -> tuple[Row, int]:
    """Read TupleData: a count, then a kind for each column; two of the kinds are followed by a length and the bytes."""
    (count,) = _U16.unpack_from(data, pos)
    pos += 2
    size = len(data)
    values: list[Value] = []
    append = values.append
    length_at = _U32.unpack_from
    for _ in range(count):
        kind = data[pos]
        if kind == _TEXT or kind == _BINARY:  # noqa: SIM109 - faster than a look-up in a tuple
            start = pos + 5
            end = start + length_at(data, pos + 1)[0]
            if end > size:
                raise malformed(data, pos, "a value is longer than the message")
            append(data[start:end] if kind == _TEXT else Binary(data[start:end]))
            pos = end
        elif kind == _NULL:
            append(None)
            pos += 1
        elif kind == _UNCHANGED:
            append(UNCHANGED_TOAST)
            pos += 1
        else:
            raise malformed(data, pos, f"no column value has kind 0x{kind:02x}")
    return tuple(values), pos


# Changes and descriptions. Inside a stream block they begin with an xid; ``pos`` is the place after it.


def _read_relation(data: bytes, pos: int, xid: int | None) -> tuple[Message, int]:
    (relation_id,) = _U32.unpack_from(data, pos)
    namespace, pos = _read_string(data, pos + 4)
    name, pos = _read_string(data, pos)
    replica_identity = chr(data[pos])
    if replica_identity not in "dnfi":
        raise malformed(data, pos, f"no replica identity is 0x{data[pos]:02x}")
    (count,) = _U16.unpack_from(data, pos + 1)
    pos += 3
    columns = []
    for _ in range(count):
        flags = data[pos]
        column, pos = _read_string(data, pos + 1)
        columns.append(Column(flags, column, *_COLUMN_TYPE.unpack_from(data, pos)))
        pos += _COLUMN_TYPE.size
    return Relation(xid, relation_id, namespace or "pg_catalog", name, replica_identity, tuple(columns)), pos


def _read_type(data: bytes, pos: int, xid: int | None) -> tuple[Message, int]:
    (type_id,) = _U32.unpack_from(data, pos)
    namespace, pos = _read_string(data, pos + 4)
    name, pos = _read_string(data, pos)
    return Type(xid, type_id, namespace or "pg_catalog", name), pos


def _read_insert(data: bytes, pos: int, xid: int | None) -> tuple[Message, int]:
    (relation_id,) = _U32.unpack_from(data, pos)
    if data[pos + 4] != _NEW:
        raise malformed(data, pos + 4, "a new tuple should start")
    new, pos = _read_row(data, pos + 5)
    return Insert(xid, relation_id, new), pos


def _read_update(data: bytes, pos: int, xid: int | None) -> tuple[Message, int]:
    (relation_id,) = _U32.unpack_from(data, pos)
    pos += 4
    key = old = None
    if data[pos] == _KEY:
        key, pos = _read_row(data, pos + 1)
    elif data[pos] == _OLD:
        old, pos = _read_row(data, pos + 1)
    if data[pos] != _NEW:
        raise malformed(data, pos, "a new tuple should start")
    new, pos = _read_row(data, pos + 1)
    return Update(xid, relation_id, key, old, new), pos


def _read_delete(data: bytes, pos: int, xid: int | None) -> tuple[Message, int]:
    (relation_id,) = _U32.unpack_from(data, pos)
    kind = data[pos + 4]
    if kind not in (_KEY, _OLD):
        raise malformed(data, pos + 4, "a key or an old tuple should start")
    row, pos = _read_row(data, pos + 5)
    return (Delete(xid, relation_id, row, None) if kind == _KEY else Delete(xid, relation_id, None, row)), pos


def _read_truncate(data: bytes, pos: int, xid: int | None) -> tuple[Message, int]:
    count, flags = _TRUNCATE.unpack_from(data, pos)
    pos += _TRUNCATE.size
    end = pos + 4 * count
    if end > len(data):
        raise malformed(data, pos, f"{count} relations do not fit")
    return Truncate(xid, flags, struct.unpack_from(f">{count}I", data, pos)), end


def _read_message(data: bytes, pos: int, xid: int | None) -> tuple[Message, int]:
    flags, lsn = _MESSAGE.unpack_from(data, pos)
    prefix, pos = _read_string(data, pos + _MESSAGE.size)
    (length,) = _U32.unpack_from(data, pos)
    start = pos + 4
    if start + length > len(data):
        raise malformed(data, pos, "the content is longer than the message")
    return LogicalMessage(xid, flags, lsn, prefix, data[start : start + length]), start + length


# Messages that are never inside a stream block.


def _read_begin(data: bytes) -> tuple[Message, int]:
    return Begin(*_BEGIN.unpack_from(data, 1)), 1 + _BEGIN.size


def _read_commit(data: bytes) -> tuple[Message, int]:
    message = Commit(*_COMMIT.unpack_from(data, 1))
    _check_flags(data, 1, message.flags)
    return message, 1 + _COMMIT.size


def _read_origin(data: bytes) -> tuple[Message, int]:
    (lsn,) = _U64.unpack_from(data, 1)
    name, pos = _read_string(data, 9)
    return Origin(lsn, name), pos


def _read_stream_start(data: bytes) -> tuple[Message, int]:
    xid, first_segment = _STREAM_START.unpack_from(data, 1)
    if first_segment > 1:
        raise malformed(data, 5, f"a yes or no is {first_segment}")
    return StreamStart(xid, first_segment == 1), 1 + _STREAM_START.size


def _read_stream_stop(data: bytes) -> tuple[Message, int]:  # noqa: ARG001 - one signature for all in the table
    return StreamStop(), 1


def _read_stream_commit(data: bytes) -> tuple[Message, int]:
    message = StreamCommit(*_STREAM_COMMIT.unpack_from(data, 1))
    _check_flags(data, 5, message.flags)
    return message, 1 + _STREAM_COMMIT.size


def _read_stream_abort(data: bytes, streaming_parallel: bool | None) -> tuple[Message, int]:
    if streaming_parallel is None:
        streaming_parallel = len(data) > 1 + _STREAM_ABORT.size
    if streaming_parallel:
        return StreamAbort(*_STREAM_ABORT_PARALLEL.unpack_from(data, 1)), 1 + _STREAM_ABORT_PARALLEL.size
    xid, subxid = _STREAM_ABORT.unpack_from(data, 1)
    return StreamAbort(xid, subxid, None, None), 1 + _STREAM_ABORT.size


def _read_begin_prepare(data: bytes) -> tuple[Message, int]:
    prepare_lsn, end_lsn, prepare_time_us, xid = _BEGIN_PREPARE.unpack_from(data, 1)
    gid, pos = _read_string(data, 1 + _BEGIN_PREPARE.size)
    return BeginPrepare(prepare_lsn, end_lsn, prepare_time_us, xid, gid), pos


def _read_prepare(data: bytes) -> tuple[Message, int]:
    """Read a message of one of the three kinds with this layout."""
    flags, lsn, end_lsn, time_us, xid = _PREPARE.unpack_from(data, 1)
    _check_flags(data, 1, flags)
    gid, pos = _read_string(data, 1 + _PREPARE.size)
    return _PREPARE_CLASSES[data[0]](flags, lsn, end_lsn, time_us, xid, gid), pos


def _read_rollback_prepared(data: bytes) -> tuple[Message, int]:
    flags, prepare_end, rollback_end, prepare_time_us, rollback_time_us, xid = _ROLLBACK_PREPARED.unpack_from(data, 1)
    _check_flags(data, 1, flags)
    gid, pos = _read_string(data, 1 + _ROLLBACK_PREPARED.size)
    return RollbackPrepared(flags, prepare_end, rollback_end, prepare_time_us, rollback_time_us, xid, gid), pos


_PREPARE_CLASSES: Final[dict[int, type[Prepare | CommitPrepared | StreamPrepare]]] = {
    ord("P"): Prepare,
    ord("K"): CommitPrepared,
    ord("p"): StreamPrepare,
}

_CHANGE_READERS: Final[dict[int, Callable[[bytes, int, int | None], tuple[Message, int]]]] = {
    ord("R"): _read_relation,
    ord("Y"): _read_type,
    ord("I"): _read_insert,
    ord("U"): _read_update,
    ord("D"): _read_delete,
    ord("T"): _read_truncate,
    ord("M"): _read_message,
}

_READERS: Final[dict[int, Callable[[bytes], tuple[Message, int]]]] = {
    ord("B"): _read_begin,
    ord("C"): _read_commit,
    ord("O"): _read_origin,
    ord("S"): _read_stream_start,
    ord("E"): _read_stream_stop,
    ord("c"): _read_stream_commit,
    ord("b"): _read_begin_prepare,
    ord("P"): _read_prepare,
    ord("K"): _read_prepare,
    ord("r"): _read_rollback_prepared,
    ord("p"): _read_prepare,
}

"""The index of a sealed segment: where each record is, and to which transaction and relation it belongs. No pyspark.

`build` checks a segment and writes its index beside it. `load` reads the index, so that readers need not scan the segment. The
index is a cache: if it is missing, damaged, of another format, or does not fit the segment, `load` builds it again.

The ``.idx`` is an Arrow IPC file of one row with three columns, ``records``, ``transactions`` and ``messages``: lists of structs
with the fields of `SegmentIndex`. The schema's metadata has the format's version, the segment's name and its size. A checksum of
all this follows. It is needed because the file is not synced: after a power cut it may have pages of zeros, and with these, rows
would be missing in the tables. `load` compares it before Arrow reads the file, because Arrow may crash on a damaged one.

The ordinal numbers the changes of a transaction from 0. Insert, Update and Delete count 1; Truncate counts 1 for each of its
relations, in its order. Any other record has the ordinal of the next change, so that the ordinals are the same with and without
logical messages.

A logical message outside of transactions comes after the end of one transaction and before the commit of the next. Its LSN is the
end of its WAL record. No transaction ends there, so the LSN is its place in the order of the transactions' ends.

`build` checks that a segment has only known kinds of records; that Begin and Commit alternate and agree; that changes are inside of
transactions; that each relation is described before its first change; and that logical messages are at their place. Otherwise it
raises a StagingError that names the file and the byte.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import struct
import threading
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from cdcpipe.errors import ProtocolError
from spark_sink.files.local import private_opener
from spark_sink.files.system_hints import hint_of
from spark_sink.staging.log import SEGMENT_NAME, StagingError, anew
from spark_sink.staging.scan import scan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Array = NDArray[Any]

__all__ = ["NO_TRANSACTION", "SegmentIndex", "build", "corrupt", "load", "map_segment"]

FORMAT: Final = b"3"
_FORMAT_KEY, _NAME_KEY, _SIZE_KEY = b"cdcpipe.index_format", b"cdcpipe.segment_name", b"cdcpipe.segment_bytes"
_CHECKSUM: Final = struct.Struct("<I")
"""The CRC-32 of all bytes before it."""

NO_TRANSACTION: Final = -1
"""The transaction number of a record between transactions (Relation, Type, a message outside of transactions)."""

BEGIN, COMMIT, ORIGIN, RELATION, TYPE, INSERT, UPDATE, DELETE, TRUNCATE, MESSAGE = b"BCORYIUDTM"


def _kinds(kinds: bytes) -> Array:
    """Return an array that says for each byte whether it is one of ``kinds``."""
    found = np.zeros(256, np.bool_)
    found[list(kinds)] = True
    return found


_IS_KIND: Final = _kinds(b"BCORYIUDTM")
_IS_CHANGE: Final = _kinds(b"IUDT")
_HAS_RELATION: Final = _kinds(b"RIUD")
_SHORTEST: Final = {
    BEGIN: 21,
    COMMIT: 26,
    ORIGIN: 10,
    RELATION: 10,
    TYPE: 7,
    INSERT: 8,
    UPDATE: 8,
    DELETE: 8,
    TRUNCATE: 6,
    MESSAGE: 15,
}

_MAP_BYTES: Final = 64 << 10
"""A file from this size on is mapped, a smaller one is read: a task has thousands of small segments at a time, and the system
limits the maps of a process."""

_SCAN_BYTES: Final = 1 << 20
"""How much of a segment is scanned at a time. The scanner needs a multiple of this in memory."""

_MAX_LSN: Final = 0xFFFFFFFFFFFFFFFF
_HEADER = re.compile(rb"w [0-9A-Fa-f]{1,8}/[0-9A-Fa-f]{1,8} ([0-9]{1,10})\n")


@dataclass(frozen=True, slots=True)
class SegmentIndex:
    """Numpy arrays with one item for each record, then for each transaction, then for each logical message.

    ``size`` is the size of the segment in bytes.
    """

    size: int
    offset: Array
    """int64: where the record begins, after its header."""
    length: Array
    """int32"""
    kind: Array
    """uint8: the record's first byte."""
    relation_id: Array
    """uint32; for a Truncate the first of its relations, 0 for a record without a relation."""
    transaction: Array
    """int32: the index into the arrays below, or NO_TRANSACTION."""
    ordinal: Array
    """int32"""

    commit_lsn: Array
    """uint64"""
    end_lsn: Array
    """uint64, ascending"""
    xid: Array
    """uint32"""
    commit_time_us: Array
    """int64: microseconds since 2000-01-01 UTC."""
    origin: Array
    """object: str, or None for a transaction that began on this server."""

    message_lsn: Array
    """uint64: the end of the message's own WAL record, inside or outside of a transaction."""

    def messages(self) -> tuple[Array, Array]:
        """Return for each logical message its record number, and its place in the order of the transactions' ends (uint64)."""
        record = np.flatnonzero(self.kind == MESSAGE)
        transaction = self.transaction[record]
        is_inside = transaction != NO_TRANSACTION
        place = self.message_lsn.copy()
        place[is_inside] = self.end_lsn[transaction[is_inside]]
        return record, place


_RECORD_TYPE: Final = pa.struct(
    [
        ("offset", pa.int64()),
        ("length", pa.int32()),
        ("kind", pa.uint8()),
        ("relation_id", pa.uint32()),
        ("transaction", pa.int32()),
        ("ordinal", pa.int32()),
    ]
)
_TRANSACTION_TYPE: Final = pa.struct(
    [
        ("commit_lsn", pa.uint64()),
        ("end_lsn", pa.uint64()),
        ("xid", pa.uint32()),
        ("commit_time_us", pa.int64()),
        ("origin", pa.string()),
    ]
)
_MESSAGE_TYPE: Final = pa.struct([("message_lsn", pa.uint64())])

_COLUMNS: Final = {"records": _RECORD_TYPE, "transactions": _TRANSACTION_TYPE, "messages": _MESSAGE_TYPE}


def map_segment(path: Path) -> memoryview:
    """Return the bytes of a segment, as a memory map if it is large. No file stays open. Raises StagingError if it is missing."""
    try:
        return _bytes_of(path)
    except OSError as ex:
        raise _unreadable(path, ex) from ex


def _bytes_of(path: Path) -> memoryview:
    with open(path, "rb", buffering=0) as file:
        if os.fstat(file.fileno()).st_size < _MAP_BYTES:
            return memoryview(file.readall())
    with pa.memory_map(str(path)) as mapped:  # Python's mmap would keep the file open
        return memoryview(mapped.read_buffer()).cast("B")


def _unreadable(path: Path | str, error: OSError) -> StagingError:
    fitting = None if error.errno == errno.ENOENT else hint_of(error)
    hint = fitting or "a reader was behind the segments that were removed, or the disk is damaged"
    return StagingError(f"segment {path} cannot be read: {error.strerror or error}", hint=hint)


def build(path: Path | str, starts: Array | Sequence[int] | None = None, ends: Array | Sequence[int] | None = None) -> SegmentIndex:
    """Build the index of a sealed segment and write it beside the segment. Raises StagingError if the segment is corrupt.

    ``starts`` and ``ends`` are the record boundaries as `scan_records` returns them for the whole file, if the caller knows them.
    """
    path = Path(path)
    segment = map_segment(path)
    if starts is None or ends is None:
        start, end = _scan(path, segment)
    else:
        start, end = np.array(starts, np.int64), np.array(ends, np.int64)
    index = _Builder(path, segment, start, end).build()
    _write(path, index)
    return index


def load(path: Path | str) -> SegmentIndex:
    """Return the index of a sealed segment: read from the file beside it, or built if this file does not fit."""
    path = Path(path)
    try:
        size = path.stat().st_size
    except OSError as ex:
        raise _unreadable(path, ex) from ex
    index = _read(path, size)
    return build(path) if index is None else index


def _scan(path: Path, segment: memoryview) -> tuple[Array, Array]:
    """Find the record boundaries, one part of the segment at a time."""
    starts, ends = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    pos, step = 0, _SCAN_BYTES
    while pos < len(segment):
        piece = bytes(segment[pos : pos + step])
        try:
            found_starts, found_ends, length = scan(piece)
        except ProtocolError as ex:
            raise corrupt(path, pos + _bad_header(piece), ex.message) from ex
        if not len(found_starts):
            if pos + step >= len(segment):
                raise corrupt(path, pos, "the last record is cut short")
            step *= 2  # one record is larger than the part
            continue
        starts.append(found_starts + pos)
        ends.append(found_ends + pos)
        pos, step = pos + length, _SCAN_BYTES
    return np.concatenate(starts), np.concatenate(ends)


def _bad_header(piece: bytes) -> int:
    """Return where the first broken header begins."""
    pos = 0
    while match := _HEADER.match(piece, pos):
        pos = match.end() + int(match[1])
    return pos


def corrupt(path: Path, pos: int, problem: str) -> StagingError:
    """Return the error that says that a segment is corrupt at byte ``pos``."""
    msg = f"segment {path} is corrupt at byte {pos}: {problem}"
    return StagingError(msg, hint="restore the file from a copy of the staging directory")


class _Builder:
    """Checks a segment and builds its index. Every method works on all records at once."""

    def __init__(self, path: Path, segment: memoryview, start: Array, end: Array) -> None:
        self._path = path
        self._segment = segment
        self._bytes = np.frombuffer(segment, np.uint8)
        self._offset = start
        self._length = end - start
        count = len(start)
        whole = len(end) == count and (count == 0 or (end[-1] == len(segment) and (start[1:] > end[:-1]).all()))
        if not whole or (count == 0 and len(segment)):
            raise corrupt(path, 0, "the given record boundaries belong to another segment")
        self._require(self._length > 0, np.arange(count), "a record without bytes")
        self._kind = self._bytes[start]

    def _require(self, fine: Array, record: Array, problem: str) -> None:
        if not fine.all():
            raise corrupt(self._path, int(self._offset[record[np.argmin(fine)]]), problem)

    def _integers(self, record: Array, pos: int, dtype: str) -> Array:
        """Return the big-endian integers at byte ``pos`` of the given records."""
        size = np.dtype(dtype).itemsize
        view = np.ndarray(max(len(self._segment) - size + 1, 0), dtype, self._segment, strides=(1,))
        found: Array = view[self._offset[record] + pos].astype(np.dtype(dtype).newbyteorder("="))
        return found

    def build(self) -> SegmentIndex:
        kind, everything = self._kind, np.arange(len(self._kind))
        self._require(_IS_KIND[kind], everything, "a record of an unknown kind")
        shortest = np.zeros(256, np.int64)
        shortest[list(_SHORTEST)] = list(_SHORTEST.values())
        self._require(self._length >= shortest[kind], everything, "a record is too short")

        begin, commit = np.flatnonzero(kind == BEGIN), np.flatnonzero(kind == COMMIT)
        transaction = self._transactions(begin, commit)
        relation_id, weight = self._relations()
        return SegmentIndex(
            size=len(self._segment),
            offset=self._offset,
            length=self._length.astype(np.int32),
            kind=kind,
            relation_id=relation_id,
            transaction=transaction,
            ordinal=self._ordinals(transaction, begin, weight),
            commit_lsn=self._integers(commit, 2, ">u8"),
            end_lsn=self._integers(commit, 10, ">u8"),
            xid=self._integers(begin, 17, ">u4"),
            commit_time_us=self._integers(commit, 18, ">i8"),
            origin=self._origins(transaction, len(begin)),
            message_lsn=self._messages(transaction, commit),
        )

    def _transactions(self, begin: Array, commit: Array) -> Array:
        """Check Begin and Commit records, and return the transaction number of each record."""
        edges = np.sort(np.concatenate([begin, commit]))
        self._require(self._kind[edges] == np.resize([BEGIN, COMMIT], len(edges)), edges, "Begin and Commit do not alternate")
        if len(begin) > len(commit):
            raise corrupt(self._path, int(self._offset[begin[-1]]), "the last transaction has no Commit")
        same = self._integers(begin, 1, ">u8") == self._integers(commit, 2, ">u8")
        self._require(same, commit, "the commit LSN differs from the one in Begin")
        end_lsn = self._integers(commit, 10, ">u8")
        self._require(end_lsn[1:] > end_lsn[:-1], commit[1:], "the transactions are not in commit order")

        begun = np.cumsum(self._kind == BEGIN)
        ended = np.cumsum(self._kind == COMMIT) - (self._kind == COMMIT)  # a Commit belongs to its transaction
        transaction = np.where(begun > ended, begun - 1, NO_TRANSACTION).astype(np.int32)
        inside = np.flatnonzero(_IS_CHANGE[self._kind] | (self._kind == ORIGIN))
        self._require(transaction[inside] != NO_TRANSACTION, inside, "a change outside of any transaction")
        return transaction

    def _relations(self) -> tuple[Array, Array]:
        """Return each record's relation and its number of changes. Check that relations are described before they are used."""
        kind = self._kind
        relation_id, weight = np.zeros(len(kind), np.uint32), _IS_CHANGE[kind].astype(np.int64)
        record = np.flatnonzero(_HAS_RELATION[kind])
        relation_id[record] = self._integers(record, 1, ">u4")

        truncate = np.flatnonzero(kind == TRUNCATE)
        count = self._integers(truncate, 1, ">u4").astype(np.int64)
        self._require(self._length[truncate] == 6 + 4 * count, truncate, "a Truncate of the wrong length")
        self._require(count > 0, truncate, "a Truncate without relations")
        relation_id[truncate] = self._integers(truncate, 6, ">u4")
        weight[truncate] = count

        # For each relation, find the first record that describes it and the first that uses it. A Truncate uses several.
        number = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        place = np.repeat(self._offset[truncate], count) + 6 + 4 * number
        truncated = np.ndarray(max(len(self._segment) - 3, 0), ">u4", self._segment, strides=(1,))[place]
        use = np.flatnonzero(weight.astype(np.bool_) & (kind != TRUNCATE))
        use = use[np.append(True, relation_id[use[1:]] != relation_id[use[:-1]])[: len(use)]]  # where the relation changes
        used_ids = np.concatenate([relation_id[use], truncated.astype(np.uint32)])
        used_at = np.concatenate([use, np.repeat(truncate, count)])
        order = np.argsort(used_at, kind="stable")
        used, first = np.unique(used_ids[order], return_index=True)
        first_use = used_at[order][first]
        description = np.flatnonzero(kind == RELATION)
        described, first = np.unique(relation_id[description], return_index=True)
        slot = np.searchsorted(described, used)
        known = np.zeros(len(used), np.bool_)
        has_slot = slot < len(described)
        found = slot[has_slot]
        known[has_slot] = (described[found] == used[has_slot]) & (description[first[found]] < first_use[has_slot])
        self._require(known, first_use, "a change of a relation that is not described before it")
        return relation_id, weight

    def _ordinals(self, transaction: Array, begin: Array, weight: Array) -> Array:
        before = np.cumsum(weight) - weight
        ordinal = before - np.where(transaction == NO_TRANSACTION, before, before[begin][transaction]) if len(begin) else before
        if len(ordinal) and ordinal.max() > np.iinfo(np.int32).max:
            msg = f"segment {self._path}: a transaction has more than {np.iinfo(np.int32).max} changes"
            raise StagingError(msg, hint=f"divide such transactions on the server; {anew(self._path.parents[1])}")
        return ordinal.astype(np.int32)

    def _messages(self, transaction: Array, commit: Array) -> Array:
        """Return the LSNs of the logical messages. Check that messages outside of transactions are at the place of their LSN."""
        record = np.flatnonzero(self._kind == MESSAGE)
        lsn = self._integers(record, 2, ">u8")
        is_outside = transaction[record] == NO_TRANSACTION
        is_transactional = (self._bytes[self._offset[record] + 1] & 1).astype(np.bool_)
        self._require(is_outside != is_transactional, record, "a logical message on the wrong side of a Begin or Commit")
        record, outside_lsn = record[is_outside], lsn[is_outside]
        following = np.searchsorted(commit, record)
        match = SEGMENT_NAME.fullmatch(self._path.name)
        first, last = (int(match[1], 16), int(match[2], 16)) if match is not None else (0, _MAX_LSN)
        low = np.concatenate([np.array([first], np.uint64), self._integers(commit, 10, ">u8")])
        high = np.concatenate([self._integers(commit, 2, ">u8"), np.array([last], np.uint64)])
        fits = (low[following] < outside_lsn) & (outside_lsn <= high[following])
        fits[1:] &= outside_lsn[1:] > outside_lsn[:-1]
        self._require(fits, record, "a logical message at another place than in the WAL")
        return lsn

    def _origins(self, transaction: Array, count: int) -> Array:
        record = np.flatnonzero(self._kind == ORIGIN)
        origins = np.full(count, None, object)
        if not len(record):
            return origins
        from cdcpipe.types.arrow.buffers import gather  # imports pandas, which a launcher does not need otherwise

        names = gather(self._segment, self._offset[record] + 9, self._length[record] - 10)  # without the closing NUL
        try:
            origins[transaction[record]] = names.cast(pa.string()).to_pylist()
        except pa.ArrowInvalid:
            raise corrupt(self._path, int(self._offset[record[0]]), "an origin's name is not UTF-8") from None
        return origins


def _metadata(segment: Path, size: int) -> dict[bytes, bytes]:
    return {_FORMAT_KEY: FORMAT, _NAME_KEY: segment.name.encode(), _SIZE_KEY: b"%d" % size}


def _write(segment: Path, index: SegmentIndex) -> None:
    """Write the index file atomically. It is not synced, because it can be built again."""

    def column(fields: pa.StructType) -> pa.ListArray:
        values = pa.StructArray.from_arrays(
            [_arrow(getattr(index, field.name), field.type) for field in fields], fields=list(fields)
        )
        return pa.ListArray.from_arrays(_arrow(np.array([0, len(values)], np.int32), pa.int32()), values)

    columns = {name: column(fields) for name, fields in _COLUMNS.items()}
    batch = pa.record_batch(columns).replace_schema_metadata(_metadata(segment, index.size))
    path = segment.with_suffix(".idx")
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        with open(temporary, "x+b", opener=private_opener) as sink:
            with pa.ipc.new_file(sink, batch.schema) as writer:
                writer.write_batch(batch)
            sink.flush()
            with mmap.mmap(sink.fileno(), 0, access=mmap.ACCESS_READ) as written:
                checksum = zlib.crc32(written)
            sink.write(_CHECKSUM.pack(checksum))
        temporary.replace(path)
    except OSError:
        # A reader may have no right to write here. Then the next reader builds the index again.
        with suppress(OSError):
            temporary.unlink()


def _arrow(array: Array, arrow_type: pa.DataType) -> pa.Array:
    """Return an Arrow array over numpy's memory. `pyarrow.array` would import pandas, to see whether its argument is from there."""
    if array.dtype != object:
        return pa.Array.from_buffers(arrow_type, len(array), [None, pa.py_buffer(np.ascontiguousarray(array))])
    is_empty = all(item is None for item in array)
    return pa.nulls(len(array), arrow_type) if is_empty else pa.array(array, arrow_type)


def _read(segment: Path, size: int) -> SegmentIndex | None:
    """Read the index file; None if it is missing, damaged, or does not fit the segment, whose size is ``size`` bytes.

    Does not cast, because that imports pyarrow.compute, and readers that only count changes do not need it.
    """
    try:
        data = pa.py_buffer(_bytes_of(segment.with_suffix(".idx")))
        end = data.size - _CHECKSUM.size
        if end <= 0 or _CHECKSUM.unpack_from(data, end)[0] != zlib.crc32(data[:end]):
            return None
        batch = pa.ipc.open_file(data[:end]).get_batch(0)
        if batch.schema.metadata != _metadata(segment, size):
            return None
        arrays: dict[str, Array] = {}
        for name, fields in _COLUMNS.items():
            values = batch.column(name).values
            for field in fields:
                array = values.field(field.name)
                if array.type != field.type:
                    return None
                found = array.to_numpy(zero_copy_only=False)
                # Arrow's objects of a small file take several times its bytes. Arrays of their own let go of them.
                arrays[field.name] = found.copy() if data.size < _MAP_BYTES else found
    except (OSError, pa.ArrowException, LookupError, ValueError):
        return None
    return SegmentIndex(size=size, **arrays)

"""Finds the values of each column in many Insert, Update and Delete records of one relation, without Python per row.

The records stay in their buffer. The caller gives the begin and the length of each record, in their order in the buffer.
`decode_changes` reads all rows at once, column by column, with numpy, and returns where each value's bytes are (`Values`).
`cdcpipe.types.arrow.readers.to_arrow` makes an Arrow array of one column's values.

Every count and length is checked against the available bytes before it is used. Malformed bytes raise `ProtocolError`.
Source: the manual, "Logical Replication Message Formats", TupleData.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from cdcpipe.errors import ProtocolError
from cdcpipe.types.arrow.buffers import MAX_SPAN_BYTES, view
from cdcpipe.types.arrow.values import BINARY, NULL, TEXT, UNCHANGED, Values

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from cdcpipe.pgoutput.messages import Relation

    Bytes = bytes | memoryview
    Int64s = NDArray[np.int64]
    UInt8s = NDArray[np.uint8]
    Mask = NDArray[np.bool_]

__all__ = ["Changes", "decode_changes"]

INSERT, UPDATE, DELETE = b"IUD"
_KEY, _OLD, _NEW = b"KON"

_MARKER_POS = 5  # after the kind and the relation id


@dataclass(slots=True)
class Changes:
    """Changes of one relation, in the order of the caller's records.

    ``columns`` is the row after the change: the new tuple; for a delete the sent part of the old tuple. An unchanged TOAST value is
    taken from the old tuple if that has it (a whole row, or a key, which may be TOASTed, too). ``old`` is the old tuple; None if no
    row has one. In a row whose ``old_kind`` is K it has only the key's columns.
    """

    kind: UInt8s
    old_kind: UInt8s
    columns: list[Values]
    old: list[Values] | None


def decode_changes(buffer: Bytes, offset: Int64s, length: Int64s, relation: Relation) -> Changes:
    """Find every value of the records at ``offset``: Inserts, Updates and Deletes of ``relation``, in order.

    Raises ProtocolError for malformed records.
    """
    reader = _TupleReader(buffer, relation)
    end = offset + length
    if len(offset):
        in_order = offset[0] >= 0 and (length >= 0).all() and (offset[1:] >= end[:-1]).all() and end[-1] <= len(buffer)
        if not in_order or end[-1] - offset[0] > MAX_SPAN_BYTES:
            msg = "the records' places do not fit the buffer: is the index another segment's?"
            raise ProtocolError(msg)
    reader.require(length > _MARKER_POS, offset, "it is too short")
    reader.require(reader.uint32_at(offset + 1) == relation.relation_id, offset, "it is of another relation")
    kind = reader.bytes_at(offset)
    marker = reader.bytes_at(offset + _MARKER_POS)
    is_delete = kind == DELETE
    has_old = (marker == _KEY) | (marker == _OLD)
    reader.require(
        (has_old & (is_delete | (kind == UPDATE))) | ((marker == _NEW) & ((kind == INSERT) | (kind == UPDATE))),
        offset,
        "it does not begin with a tuple that its kind has",
    )
    pos = offset + (_MARKER_POS + 1)

    old: list[Values] | None = None
    if has_old.any():
        rows = np.flatnonzero(has_old)
        found, pos[rows] = reader.read_tuple(pos[rows], end[rows])
        old = [_spread(values, rows, offset) for values in found]
        rows = rows[~is_delete[rows]]
        reader.require(pos[rows] < end[rows], pos[rows], "it ends before the new tuple")
        reader.require(reader.bytes_at(pos[rows]) == _NEW, pos[rows], "there is no new tuple after the old one")
        pos[rows] += 1
    if is_delete.any():
        rows = np.flatnonzero(~is_delete)
        found, pos[rows] = reader.read_tuple(pos[rows], end[rows])
        columns = [_spread(values, rows, offset) for values in found]
    else:
        columns, pos = reader.read_tuple(pos, end)
    reader.require(pos == end, pos, "bytes follow its last tuple")

    old_kind = np.where(has_old, marker, 0).astype(np.uint8)
    if old is not None:
        for after, before in zip(columns, old, strict=True):
            _fill_in(after, before, is_delete)
    return Changes(kind, old_kind, columns, old)


def _fill_in(after: Values, before: Values, is_delete: Mask) -> None:
    """Give a delete's row its old values, and replace unchanged TOAST values by those of the old tuple."""
    known = is_delete | (after.unchanged & before.sent)
    for mine, theirs in ((after.kind, before.kind), (after.start, before.start), (after.length, before.length)):
        np.copyto(mine, theirs, where=known)


def _spread(values: Values, rows: Int64s, offset: Int64s) -> Values:
    """Spread values of some rows over all rows. The other rows get the place of their record, so that starts stay in order."""
    kind, length, start = np.zeros(len(offset), np.uint8), np.zeros(len(offset), np.int64), offset.copy()
    kind[rows], length[rows], start[rows] = values.kind, values.length, values.start
    return replace(values, kind=kind, start=start, length=length)


class _TupleReader:
    """Reads the same column of many tuples at a time."""

    def __init__(self, buffer: Bytes, relation: Relation) -> None:
        self._buffer = buffer
        self._relation = relation
        self._table = f"{relation.namespace}.{relation.name}"
        self._bytes = np.frombuffer(buffer, np.uint8)
        self._uint16 = view(buffer, ">u2")
        self._uint32 = view(buffer, ">u4")

    def bytes_at(self, pos: Int64s) -> UInt8s:
        return self._bytes[pos]

    def uint32_at(self, pos: Int64s) -> Int64s:
        return self._uint32[pos].astype(np.int64)

    def require(self, fine: Mask, pos: Int64s, problem: str) -> None:
        """Raise ProtocolError for the first row for which ``fine`` is False."""
        if not fine.all():
            self._fail(int(pos[np.argmin(fine)]), problem)

    def _fail(self, pos: int, problem: str) -> None:
        msg = f"a malformed record of table {self._table!r} at byte {pos}: {problem}"
        raise ProtocolError(msg)

    def read_tuple(self, pos: Int64s, end: Int64s) -> tuple[list[Values], Int64s]:
        """Read the TupleData that begins at ``pos`` in each row. Returns its columns, and where it ends."""
        columns = self._relation.columns
        self.require(pos + 2 <= end, pos, "it ends before the number of columns")
        self.require(self._uint16[pos] == len(columns), pos, f"its number of columns is not {len(columns)}")
        pos = pos + 2
        result = []
        for column in columns:
            self.require(pos < end, pos, f"it ends before column {column.name!r}")
            kind = self._bytes[pos]
            sent = kind == TEXT
            if sent.all():
                self.require(pos + 5 <= end, pos, f"it ends before the length of column {column.name!r}")
                length = self._uint32[pos + 1].astype(np.int64)
                start = pos + 5
            else:
                sent |= kind == BINARY
                fine = sent | (kind == NULL) | (kind == UNCHANGED)
                self.require(fine, pos, f"column {column.name!r} is of no known kind")
                self.require(~sent | (pos + 5 <= end), pos, f"it ends before the length of column {column.name!r}")
                length = np.zeros(len(pos), np.int64)
                length[sent] = self._uint32[pos[sent] + 1]
                start = pos + np.where(sent, 5, 1)
            pos = start + length
            self.require(pos <= end, start, f"it ends inside column {column.name!r}")
            result.append(Values(self._table, column.name, column.type_id, self._buffer, kind, start, length))
        return result, pos

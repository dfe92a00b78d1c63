"""One column of many rows before it is read: where each value's bytes are in a buffer, and in which form they are.

NULL, a value that was not sent, and an unchanged TOAST value are all null in Arrow; `Values.kind` tells them apart.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from cdcpipe.errors import CdcpipeError, InvalidArgumentsError, ProtocolError
from cdcpipe.types.arrow.buffers import MAX_SPAN_BYTES, gather, put, view
from cdcpipe.types.binary.decoder import UnknownTypeError, name_column, to_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Int64s = NDArray[np.int64]
    UInt8s = NDArray[np.uint8]
    Mask = NDArray[np.bool_]

__all__ = ["BINARY", "NULL", "TEXT", "UNCHANGED", "Values"]

NULL, UNCHANGED, TEXT, BINARY = b"nutb"
"""How a value was sent, as in pgoutput's TupleData."""


@dataclass(slots=True)
class Values:
    """One column, not read yet: where each row's bytes are, and its kind, n, u, t or b; 0 where the record has no such tuple."""

    table: str
    name: str
    type_id: int
    buffer: bytes | memoryview
    kind: UInt8s
    start: Int64s
    length: Int64s

    @property
    def unchanged(self) -> Mask:
        """The rows whose value is an unchanged TOAST value, that is, was not sent."""
        return np.equal(self.kind, UNCHANGED)

    @property
    def sent(self) -> Mask:
        """The rows that have a value."""
        return np.equal(self.kind, TEXT) | np.equal(self.kind, BINARY)

    @property
    def binary_rows(self) -> Int64s:
        """The numbers of the rows whose value is in binary form."""
        return np.flatnonzero(self.kind == BINARY)

    def rows(self, rows: Int64s) -> Values:
        """Return some rows of the column."""
        return replace(self, kind=self.kind[rows], start=self.start[rows], length=self.length[rows])

    def text(self) -> pa.StringArray:
        """Return the texts; ProtocolError if one is not UTF-8, or malformed, UnknownTypeError for a type that is not built in."""
        return self.text_with(self.binary_rows)

    def text_with(self, rows: Int64s) -> pa.StringArray:
        """Return the texts that were sent, and those of the values in binary form in some rows; in others these are null."""
        if not len(rows):
            return self.utf8(self._bytes(), self.start)
        made = self.utf8(pa.array(self._made_text(rows), pa.binary()), self.start[rows])
        return made if len(rows) == len(self.kind) else put(self.utf8(self._bytes(), self.start), rows, made)

    def _made_text(self, rows: Int64s) -> list[bytes]:
        """Return the texts of values in binary form, one by one."""
        texts = []
        room = MAX_SPAN_BYTES
        for start, length in zip(self.start[rows].tolist(), self.length[rows].tolist(), strict=True):
            try:
                text = to_text(self.type_id, bytes(self.buffer[start : start + length]))
            except (ProtocolError, UnknownTypeError, InvalidArgumentsError) as ex:
                name_column(ex, self.table, self.name)
                raise
            texts.append(text)
            room -= len(text)
            if room < 0:
                msg = f"the values of column {self.name!r} of table {self.table!r} have more than 2 GiB of text"
                raise CdcpipeError(msg, hint="decode fewer records at once")
        return texts

    def utf8(self, array: pa.BinaryArray, start: Int64s) -> pa.StringArray:
        """Return the bytes, of values that begin there, as text; ProtocolError if one is not UTF-8."""
        try:
            return array.cast(pa.string())
        except pa.ArrowInvalid as ex:
            msg = f"a value of column {self.name!r}, at byte {_first_not_utf8(array, start)}, is not UTF-8"
            hint = (
                'a database with the encoding SQL_ASCII, and before PostgreSQL 15 a column of type "char", may hold bytes that are'
                " no text: correct the value, or leave the column out"
            )
            raise ProtocolError(msg, hint=hint) from ex

    def numbers(self, layout: str) -> tuple[NDArray[Any], Mask]:
        """Return values of a fixed size as numbers; False for those of another size, whose number means nothing."""
        size = np.dtype(layout).itemsize
        fine = self.length == size
        return view(self.buffer, layout)[self.start if fine.all() else np.where(fine, self.start, 0)], fine

    def _bytes(self) -> pa.BinaryArray:
        sent = self.kind == TEXT
        return gather(self.buffer, self.start, self.length, None if sent.all() else sent)


def _first_not_utf8(array: pa.BinaryArray, start: Int64s) -> int:
    for row, value in enumerate(array.to_pylist()):
        try:
            (value or b"").decode()
        except UnicodeDecodeError:
            return int(start[row])
    return -1  # Arrow and Python do not agree: there is no place to name

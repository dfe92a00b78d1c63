"""Builds records of one table, decodes them in columns, and has the Arrow type of each PostgreSQL type."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from cdcpipe.pgoutput.columnar import Changes, decode_changes
from cdcpipe.pgoutput.messages import Column, Insert, Relation
from cdcpipe.types.arrow.readers import to_arrow
from cdcpipe.types.arrow.values import Values
from cdcpipe.types.table import ARRAYS

if TYPE_CHECKING:
    from collections.abc import Sequence


RELATION_ID = 16385
NATURAL = {
    16: pa.bool_(),
    17: pa.binary(),
    20: pa.int64(),
    21: pa.int16(),
    23: pa.int32(),
    26: pa.int64(),
    700: pa.float32(),
    701: pa.float64(),
    1082: pa.date32(),
    1114: pa.timestamp("us"),
    1184: pa.timestamp("us", "UTC"),
    1700: pa.decimal128(20, 6),
}


NATURAL |= {type_id: pa.list_(pa.field("element", NATURAL.get(element, pa.string()))) for type_id, element in ARRAYS.items()}
"""The Arrow type of each PostgreSQL type that is not mapped to a string."""


def relation(column_count: int, *type_ids: int) -> Relation:
    """Return a relation whose last columns have these types. The other columns are texts."""
    types = [25] * (column_count - len(type_ids)) + list(type_ids)
    columns = tuple(Column(int(number == 0), f"c{number}", type_id, -1) for number, type_id in enumerate(types))
    return Relation(None, RELATION_ID, "public", "t", "d", columns)


def insert(*row: object) -> Insert:
    return Insert(None, RELATION_ID, row)  # rows of the cases


def lay_out(records: Sequence[bytes], gap: bytes = b"w 0/0 5\n") -> tuple[bytes, np.ndarray, np.ndarray]:
    """Put records into a buffer, with other bytes before, between and after them."""
    buffer, offsets = bytearray(gap), []
    for record in records:
        offsets.append(len(buffer))
        buffer += record + gap
    return bytes(buffer), np.array(offsets, np.int64), np.array([len(r) for r in records], np.int64)


def decode_all(records: Sequence[bytes], column_count: int) -> Changes:
    return decode_changes(*lay_out(records), relation(column_count))


def assert_same(mine: Values, theirs: Values, arrow_type: pa.DataType) -> None:
    ours, expected = to_arrow(mine, arrow_type), to_arrow(theirs, arrow_type)
    ours.array.validate(full=True)
    assert ours.array.type == expected.array.type == arrow_type
    if pa.types.is_floating(arrow_type.value_type if pa.types.is_list(arrow_type) else arrow_type):
        # equals() won't do: it treats NaN as different from NaN, and -0.0 as equal to 0.0.
        assert repr(ours.array.to_pylist()) == repr(expected.array.to_pylist())
    else:
        assert ours.array.equals(expected.array)
    assert ours.exact_rows.tolist() == expected.exact_rows.tolist()
    assert ours.exact.equals(expected.exact)
    assert mine.text().equals(theirs.text())

"""Columnar decoding gives the same values as row-wise decoding of the same bytes."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdcpipe.errors import CdcpipeError, ProtocolError
from cdcpipe.pgoutput.columnar import decode_changes
from cdcpipe.pgoutput.decode import decode
from cdcpipe.pgoutput.messages import UNCHANGED_TOAST, Binary, Delete, Insert, Truncate, Update
from cdcpipe.types.arrow.buffers import gather
from cdcpipe.types.arrow.readers import to_arrow
from cdcpipe.types.arrow.values import Values
from cdcpipe.types.binary.decoder import UnknownTypeError, to_text
from support.binary_values import is_built_in
from support.columns import NATURAL, RELATION_ID, decode_all, insert, lay_out, relation
from support.pgoutput_build import build

if TYPE_CHECKING:
    from collections.abc import Sequence


def rows_of(columns: list[Values], count: int) -> list[list[object]]:
    """Return the values as `decode` does. None if the record has no such tuple."""
    texts = [values.text().to_pylist() for values in columns]
    unchanged = [values.unchanged for values in columns]
    return [
        [
            UNCHANGED_TOAST if unchanged[c][row] else None if (text := texts[c][row]) is None else text.encode()
            for c in range(len(columns))
        ]
        for row in range(count)
    ]


def expected(message: Insert | Update | Delete) -> tuple[int, list[object] | None, list[object] | None]:
    """Return the kind of the old tuple, the row after the change, and the old tuple, from row-wise decoding."""
    for name in ("key", "old", "new"):
        row = getattr(message, name, None)
        if row is not None:
            setattr(message, name, tuple(bytes(value) if isinstance(value, Binary) else value for value in row))
    match message:
        case Insert(_, _, new):
            return 0, list(new), None
        case Update(_, _, None, None, new):
            return 0, list(new), None
        case Update(_, _, key, old, new):
            before = list(old if key is None else key)  # one of them is there
            filled = [o if n is UNCHANGED_TOAST and o is not None else n for n, o in zip(new, before, strict=True)]
            return ord("O" if key is None else "K"), filled, before
        case Delete(_, _, key, old):
            row = list(old if key is None else key)  # one of them is there
            return (ord("O") if key is None else ord("K")), row, row


def assert_equal_to_rowwise(records: Sequence[bytes], column_count: int) -> None:
    changes = decode_all(records, column_count)
    count = len(records)
    assert changes.kind.tobytes() == b"".join(record[:1] for record in records)
    after = rows_of(changes.columns, count)
    before = None if changes.old is None else rows_of(changes.old, count)
    for row, record in enumerate(records):
        message = decode(record)
        assert isinstance(message, Insert | Update | Delete)
        old_kind, new, old = expected(message)
        assert changes.old_kind[row] == old_kind
        assert after[row] == new
        if before is None:
            assert old is None
        else:
            assert before[row] == (old or [None] * column_count)


TEXT = st.text(max_size=20).map(str.encode)
VALUE = st.one_of(st.none(), st.just(UNCHANGED_TOAST), TEXT, TEXT.map(Binary), st.just(b""))


@st.composite
def changes_of(draw: st.DrawFn) -> tuple[int, list[bytes]]:
    column_count = draw(st.integers(0, 4))
    row = st.tuples(*[VALUE] * column_count)
    change = st.one_of(
        st.builds(Insert, st.none(), st.just(RELATION_ID), row),
        st.builds(Update, st.none(), st.just(RELATION_ID), st.none() | row, st.none(), row),
        st.builds(Update, st.none(), st.just(RELATION_ID), st.none(), row, row),
        st.builds(Delete, st.none(), st.just(RELATION_ID), row, st.none()),
        st.builds(Delete, st.none(), st.just(RELATION_ID), st.none(), row),
    )
    return column_count, [build(message) for message in draw(st.lists(change, max_size=12))]


@given(changes_of())
def test_columns_equal_rows(case: tuple[int, list[bytes]]) -> None:
    assert_equal_to_rowwise(case[1], case[0])


@settings(max_examples=200)
@given(changes_of(), st.data())
def test_damaged_records_fail_as_they_do_row_wise(case: tuple[int, list[bytes]], data: st.DataObject) -> None:
    column_count, records = case
    if not records:
        return
    which = data.draw(st.integers(0, len(records) - 1))
    record = bytearray(records[which])
    if data.draw(st.booleans()):
        place = data.draw(st.integers(0, len(record) - 1))
        record[place] = data.draw(st.one_of(st.sampled_from(b"IUDKONnutb\x00\x01\xff"), st.integers(0, 255)))
    elif data.draw(st.booleans()):
        del record[data.draw(st.integers(0, len(record) - 1)) :]
    else:
        record += data.draw(st.binary(min_size=1, max_size=3))
    records[which] = bytes(record)

    try:
        message = decode(bytes(record))
    except ProtocolError:
        fine = False
    else:
        fine = isinstance(message, Insert | Update | Delete) and message.relation_id == RELATION_ID
        if fine:
            rows = [r for r in (getattr(message, name, None) for name in ("key", "old", "new")) if r is not None]
            fine = all(len(row) == column_count for row in rows)
    if not fine:
        with pytest.raises(CdcpipeError):
            decode_all(records, column_count)
        return
    try:
        assert_equal_to_rowwise(records, column_count)
    except ProtocolError as ex:
        assert "is not UTF-8" in ex.message  # noqa: PT017 - decode does not look at the text


def test_no_record_at_all() -> None:
    changes = decode_all([], 2)
    assert changes.old is None
    assert [len(to_arrow(values, pa.int32()).array) for values in changes.columns] == [0, 0]


GOOD = build(insert(b"1", b"abc"))


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        (GOOD[:5], "too short"),
        (GOOD[:6], "before the number of columns"),
        (GOOD[:7], "before the number of columns"),
        (GOOD[:8], "before column 'c0'"),
        (GOOD[:10], "before the length of column 'c0'"),
        (GOOD[:12], "before the length of column 'c0'"),
        (GOOD[:13], "inside column 'c0'"),
        (GOOD[:14], "before column 'c1'"),
        (GOOD[:-1], "inside column 'c1'"),
        (GOOD + b"x", "bytes follow its last tuple"),
        (GOOD.replace(b"\0\0\0\x03", b"\xff\xff\xff\xff"), "inside column 'c1'"),
        (GOOD.replace(b"\0\0\0\x03", b"\x7f\xff\xff\xff"), "inside column 'c1'"),
        (GOOD.replace(b"\0\x02t", b"\0\x03t"), "number of columns is not 2"),
        (GOOD.replace(b"t\0\0\0\x03", b"x\0\0\0\x03"), "column 'c1' is of no known kind"),
        (b"I" + struct.pack(">I", 9) + GOOD[5:], "of another relation"),
        (GOOD[:5] + b"K" + GOOD[6:], "does not begin with a tuple that its kind has"),
        (b"D" + GOOD[1:], "does not begin with a tuple that its kind has"),
        (b"U" + GOOD[1:5] + b"K" + GOOD[6:], "before the new tuple"),
        (b"U" + GOOD[1:5] + b"K" + GOOD[6:] + b"O" + GOOD[6:], "no new tuple after the old one"),
        (build(Truncate(None, 0, (RELATION_ID,))), "of another relation"),
    ],
)
def test_malformed_records_are_named_by_place(record: bytes, problem: str) -> None:
    buffer, offset, length = lay_out([GOOD, record])
    with pytest.raises(ProtocolError, match=problem) as caught:
        decode_changes(buffer, offset, length, relation(2))
    assert "'public.t'" in caught.value.message
    assert offset[1] <= int(caught.value.message.split(" at byte ")[1].split(":")[0]) <= len(buffer)


@pytest.mark.parametrize(
    ("type_id", "value", "error", "problem"),
    [
        (16400, b"\0", UnknownTypeError, "OID 16400 is not built in"),
        (790, b"\0" * 8, UnknownTypeError, "lc_monetary"),
        (23, b"\0" * 3, ProtocolError, "3 bytes are too few or too many"),
        (16, b"\2", ProtocolError, "neither true nor false"),
        (1082, struct.pack(">i", 2**31 - 2), ProtocolError, "no date is so far away"),
        (1114, struct.pack(">q", -(2**63) + 1), ProtocolError, "no timestamp is so far away"),
        (1700, struct.pack(">HhHHH", 1, 0, 0, 0, 10_000), ProtocolError, "no numeric has such a sign, scale or digit"),
        (1700, b"\0", ProtocolError, "1 bytes are too few or too many"),
        (1700, struct.pack(">HhHH", 1, 0, 0, 0), ProtocolError, "too few or too many"),
        (2950, b"\0" * 17, ProtocolError, "a uuid has 16 bytes, not 17"),
        (3802, b"\2{}", ProtocolError, "a format version is 2"),
        (3802, b"", ProtocolError, "0 bytes are too few or too many"),
    ],
)
@pytest.mark.parametrize("natural", [True, False])
def test_a_binary_value_that_cannot_be_read_is_named(
    type_id: int, value: bytes, error: type[Exception], problem: str, natural: bool
) -> None:
    arrow_type = NATURAL.get(type_id, pa.string()) if natural else pa.string()
    records = [build(insert(b"1", None)), build(insert(b"1", Binary(value)))]
    values = decode_changes(*lay_out(records), relation(2, type_id)).columns[1]
    with pytest.raises(error, match=r"column 'c1' of table 'public\.t' came in binary form: .*" + problem):
        to_arrow(values, arrow_type)


def test_binary_text_that_is_not_utf8_is_an_error() -> None:
    for type_id, value in ((25, b"\xe9"), (3802, b"\x01\xe9"), (1009, struct.pack(">iiIiii", 1, 0, 25, 1, 1, 1) + b"\xe9")):
        records = [build(insert(Binary(value[:-1] + b"e"), b"x")), build(insert(Binary(value), b"x"))]
        values = decode_changes(*lay_out(records), relation(2, type_id, 25)).columns[0]
        with pytest.raises(ProtocolError, match=f"column 'c0', at byte {values.start[1]}, is not UTF-8"):
            to_arrow(values, pa.string())


@pytest.mark.parametrize("shift", [-1, 1, 1000])
def test_places_that_do_not_fit_are_refused(shift: int) -> None:
    buffer, offset, length = lay_out([GOOD, GOOD])
    with pytest.raises(ProtocolError):
        decode_changes(buffer, offset + shift, length, relation(2))
    with pytest.raises(ProtocolError, match="do not fit the buffer"):
        decode_changes(buffer, offset[::-1], length, relation(2))


def test_text_that_is_not_utf8_is_an_error() -> None:
    changes = decode_all([GOOD, build(insert(b"\xe9", b"b"))], 2)
    place = changes.columns[0].start[1]
    for arrow_type in (pa.string(), pa.int32()):
        with pytest.raises(ProtocolError, match=f"column 'c0', at byte {place}, is not UTF-8"):
            to_arrow(changes.columns[0], arrow_type)
    assert to_arrow(changes.columns[1], pa.string()).array.to_pylist() == ["abc", "b"]


@given(st.lists(st.tuples(st.binary(max_size=9), st.binary(max_size=9), st.booleans())))
def test_gather(parts: list[tuple[bytes, bytes, bool]]) -> None:
    buffer, start = b"", []
    for gap, value, _ in parts:
        start.append(len(buffer) + len(gap))
        buffer += gap + value
    length = np.array([len(value) for _, value, _ in parts], np.int64)
    valid = np.array([v for _, _, v in parts], np.bool_)
    starts = np.array(start, np.int64)
    assert gather(buffer, starts, length).to_pylist() == [value for _, value, _ in parts]
    assert gather(buffer, starts, length, valid).to_pylist() == [value if v else None for _, value, v in parts]


@settings(max_examples=250)
@given(
    st.sampled_from(sorted(filter(is_built_in, {*NATURAL, 25, 2950, 3802, 3614}))),
    st.lists(st.binary(max_size=24), max_size=4),
)
def test_any_bytes_give_values_or_an_error(type_id: int, values: list[bytes]) -> None:
    columns = decode_changes(*lay_out([build(insert(b"id", Binary(value))) for value in values]), relation(2, type_id)).columns
    fine = True
    for value in values:
        try:
            to_text(type_id, value).decode()
        except (ProtocolError, UnicodeDecodeError):
            fine = False
    if fine:
        to_arrow(columns[1], NATURAL.get(type_id, pa.string()))
    else:
        with pytest.raises(ProtocolError):
            to_arrow(columns[1], NATURAL.get(type_id, pa.string()))

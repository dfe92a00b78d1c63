"""Columnar decoding says what row-wise decoding says, of the same bytes; casts are exact or do not happen."""

from __future__ import annotations

import struct
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pgoutput_build import build

from cdcpipe.errors import CdcpipeError, ProtocolError
from cdcpipe.pgoutput.columnar import Changes, Values, decode_changes, gather
from cdcpipe.pgoutput.decode import decode
from cdcpipe.pgoutput.messages import UNCHANGED_TOAST, Binary, Column, Delete, Insert, Relation, Truncate, Update

if TYPE_CHECKING:
    from collections.abc import Sequence


RELATION_ID = 16385


def relation(column_count: int) -> Relation:
    columns = tuple(Column(int(number == 0), f"c{number}", 25, -1) for number in range(column_count))
    return Relation(None, RELATION_ID, "public", "t", "d", columns)


def insert(*row: object) -> Insert:
    return Insert(None, RELATION_ID, row)  # type: ignore[arg-type] # rows of the cases


def lay_out(records: Sequence[bytes], gap: bytes = b"w 0/0 5\n") -> tuple[bytes, np.ndarray, np.ndarray]:
    """Put records into a buffer with something before, between and after."""
    buffer, offsets = bytearray(gap), []
    for record in records:
        offsets.append(len(buffer))
        buffer += record + gap
    return bytes(buffer), np.array(offsets, np.int64), np.array([len(r) for r in records], np.int64)


def decode_all(records: Sequence[bytes], column_count: int) -> Changes:
    return decode_changes(*lay_out(records), relation(column_count))


def rows_of(columns: list[Values], count: int) -> list[list[object]]:
    """What `decode` would call the values; None also where the record has no such tuple."""
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
    """The kind of old tuple, the row after the change and the old tuple, from row-wise decoding."""
    match message:
        case Insert(_, _, new):
            return 0, list(new), None
        case Update(_, _, key, None, new):
            return (ord("K") if key is not None else 0), list(new), None if key is None else list(key)
        case Update(_, _, _, old, new):
            assert old is not None
            filled = [o if n is UNCHANGED_TOAST else n for n, o in zip(new, old, strict=True)]
            return ord("O"), filled, list(old)
        case Delete(_, _, key, old):
            row = list(old if key is None else key)  # type: ignore[arg-type] # one of them is there
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


VALUE = st.one_of(st.none(), st.just(UNCHANGED_TOAST), st.text(max_size=20).map(str.encode), st.just(b""))


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


@settings(max_examples=400)
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
            fine = fine and not any(isinstance(value, Binary) for row in rows for value in row)
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
    assert [len(values.to_arrow(pa.int32()).array) for values in changes.columns] == [0, 0]


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


def test_a_binary_value_is_refused_by_name() -> None:
    with pytest.raises(CdcpipeError, match=r"column 'c1' of table 'public\.t' came in binary form"):
        decode_all([GOOD, build(insert(b"1", Binary(b"\0")))], 2)


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
            changes.columns[0].to_arrow(arrow_type)
    assert changes.columns[1].to_arrow(pa.string()).array.to_pylist() == ["abc", "b"]


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


# Casts

DECIMAL, NTZ, TZ = pa.decimal128(10, 2), pa.timestamp("us"), pa.timestamp("us", "UTC")


def convert(texts: Sequence[str | None], arrow_type: pa.DataType) -> tuple[list[object], dict[int, str]]:
    """The values, and by row the texts that did not fit."""
    values = decode_all([build(insert(None if t is None else t.encode())) for t in texts], 1).columns[0]
    converted = values.to_arrow(arrow_type)
    converted.array.validate(full=True)
    assert converted.array.type == arrow_type
    return converted.array.to_pylist(), dict(zip(converted.exact_rows.tolist(), converted.exact.to_pylist(), strict=True))


@pytest.mark.parametrize(
    ("arrow_type", "text", "value"),
    [
        (pa.bool_(), "t", True),
        (pa.bool_(), "f", False),
        (pa.int16(), "-32768", -32768),
        (pa.int32(), "2147483647", 2**31 - 1),
        (pa.int64(), "-9223372036854775808", -(2**63)),
        (pa.int64(), "4294967295", 2**32 - 1),
        (pa.float32(), "3.4028235e+38", 3.4028234663852886e38),
        (pa.float32(), "1e-45", 1.401298464324817e-45),
        (pa.float64(), "0.30000000000000004", 0.30000000000000004),
        (pa.float64(), "5e-324", 5e-324),
        (pa.float64(), "1.7976931348623157e+308", 1.7976931348623157e308),
        (pa.float64(), "Infinity", float("inf")),
        (pa.float64(), "-Infinity", float("-inf")),
        (DECIMAL, "0.00", Decimal("0.00")),
        (DECIMAL, "-99999999.99", Decimal("-99999999.99")),
        (DECIMAL, "1.5", Decimal("1.50")),
        (pa.decimal128(38, 38), "-0." + "9" * 38, Decimal("-0." + "9" * 38)),
        (pa.decimal128(38, 0), "9" * 38, Decimal("9" * 38)),
        (pa.decimal128(38, 10), "-" + "9" * 28 + "." + "9" * 10, Decimal("-" + "9" * 28 + "." + "9" * 10)),
        (pa.date32(), "0001-01-01", date(1, 1, 1)),
        (pa.date32(), "9999-12-31", date(9999, 12, 31)),
        (NTZ, "2024-02-29 23:59:59.5", datetime(2024, 2, 29, 23, 59, 59, 500000)),
        (NTZ, "1969-12-31 23:59:59.999999", datetime(1969, 12, 31, 23, 59, 59, 999999)),
        (NTZ, "0001-01-01 00:00:00.000001", datetime(1, 1, 1, 0, 0, 0, 1)),
        (NTZ, "9999-12-31 23:59:59.999999", datetime(9999, 12, 31, 23, 59, 59, 999999)),
        (TZ, "2024-02-29 01:02:03.123456+00", datetime(2024, 2, 29, 1, 2, 3, 123456, UTC)),
        (TZ, "2024-02-29 01:02:03+05:30", datetime(2024, 2, 28, 19, 32, 3, 0, UTC)),
        (TZ, "2024-02-29 01:02:03.1-07", datetime(2024, 2, 29, 8, 2, 3, 100000, UTC)),
        (pa.binary(), r"\x", b""),
        (pa.binary(), r"\x00ff5c78", b"\0\xff\\x"),
        (pa.string(), "", ""),
        (pa.string(), "é\n\x01😀  ", "é\n\x01😀  "),
    ],
)
def test_values_that_fit(arrow_type: pa.DataType, text: str, value: object) -> None:
    assert convert([text], arrow_type) == ([value], {})
    assert convert([None, text, None, text], arrow_type) == ([None, value, None, value], {})


@pytest.mark.parametrize(
    ("arrow_type", "good", "texts"),
    [
        (pa.bool_(), "t", ["true", "T", "", "1"]),
        (pa.int16(), "7", ["32768", "-32769", "", "1.0", "x", " 1"]),
        (pa.int32(), "7", ["2147483648", "1e3"]),
        (pa.int64(), "7", ["9223372036854775808", "NaN"]),
        (pa.float64(), "7", ["", "1,5", "0x10", "1 "]),
        (DECIMAL, "7.00", ["NaN", "Infinity", "-Infinity", "0.001", "100000000.00", "", "1e50", "9" * 39]),
        (pa.decimal128(38, 0), "7", ["9" * 39, "-" + "9" * 39, "1" + "0" * 99, "9" * 38 + ".5"]),
        (pa.decimal128(38, 18), "7", ["9" * 21 + "." + "9" * 18, "1" + "0" * 20 + "." + "0" * 18, "0." + "0" * 40 + "1"]),
        (pa.date32(), "2024-02-29", ["infinity", "-infinity", "0044-03-15 BC", "10000-01-01", "5874897-12-31", "0000-01-01"]),
        (
            NTZ,
            "2024-02-29 00:00:00",
            ["infinity", "-infinity", "0044-03-15 01:02:03 BC", "10000-01-01 00:00:00", "294276-12-31 23:59:59.999999",
             "2024-01-01 24:00:00", "2024-01-01 00:00:00+00", "0000-12-31 00:00:00"],
        ),
        (
            TZ,
            "2024-02-29 00:00:00+00",
            ["infinity", "-infinity", "0044-03-15 01:02:03+00 BC", "10000-01-01 00:00:00+00", "1900-01-01 00:00:00-07:52:58",
             "0001-01-01 00:00:00+14", "9999-12-31 23:59:59.999999-14", "2024-01-01 00:00:00"],
        ),
        (pa.binary(), r"\x61", ["", "a", r"\x6", r"\x6g", r"\x 61", r"\\x61", r"\001", "x61"]),
    ],
)  # fmt: skip
def test_values_that_do_not_fit_are_null_and_exact(arrow_type: pa.DataType, good: str, texts: list[str]) -> None:
    value = convert([good], arrow_type)[0][0]
    for text in texts:
        assert convert([text], arrow_type) == ([None], {0: text})
        assert convert([good, None, text, good], arrow_type) == ([value, None, None, value], {2: text})
    mixed = [text for bad in texts for text in (bad, good)]
    assert convert(mixed, arrow_type) == ([None, value] * len(texts), {2 * n: text for n, text in enumerate(texts)})


def test_nan_is_a_float() -> None:
    values, exact = convert(["NaN", "1"], pa.float64())
    assert str(values[0]) == "nan"
    assert exact == {}


def server_date(value: date) -> str:
    return f"{value.year:04d}-{value.month:02d}-{value.day:02d}"


def server_timestamp(value: datetime) -> str:
    text = f"{server_date(value)} {value.hour:02d}:{value.minute:02d}:{value.second:02d}"
    return text + f".{value.microsecond:06d}".rstrip("0") if value.microsecond else text


def server_zone(minutes: int) -> str:
    sign, minutes = "-" if minutes < 0 else "+", abs(minutes)
    return f"{sign}{minutes // 60:02d}" + (f":{minutes % 60:02d}" if minutes % 60 else "")


@given(st.lists(st.none() | st.integers(-(2**63), 2**63 - 1)))
def test_any_integer(numbers: list[int | None]) -> None:
    assert convert([None if n is None else str(n) for n in numbers], pa.int64()) == (numbers, {})


@given(st.lists(st.floats(allow_nan=False)))
def test_any_float(numbers: list[float]) -> None:
    texts = [repr(n).replace("inf", "Infinity") for n in numbers]
    assert convert(texts, pa.float64()) == (numbers, {})


@given(st.integers(1, 38).flatmap(lambda p: st.tuples(st.just(p), st.integers(0, p))), st.data())
def test_any_decimal(modifier: tuple[int, int], data: st.DataObject) -> None:
    precision, scale = modifier
    limit = 10**precision - 1
    numbers = [Decimal((int(n < 0), tuple(map(int, str(abs(n)))), -scale)) for n in data.draw(st.lists(st.integers(-limit, limit)))]
    assert convert([f"{n:f}" for n in numbers], pa.decimal128(precision, scale)) == (numbers, {})


@given(st.lists(st.decimals(allow_nan=True, allow_infinity=True, min_value=None, max_value=None)))
def test_a_decimal_that_is_converted_is_right(numbers: list[Decimal]) -> None:
    texts = [f"{n:f}" for n in numbers if abs(n.adjusted() if n.is_finite() else 0) < 200]
    values, exact = convert(texts, pa.decimal128(20, 6))
    for row, text in enumerate(texts):
        if row in exact:
            assert (values[row], exact[row]) == (None, text)
        else:
            assert values[row] == Decimal(text)


@given(st.lists(st.dates()))
def test_any_date(dates: list[date]) -> None:
    assert convert([server_date(d) for d in dates], pa.date32()) == (dates, {})


@given(st.lists(st.datetimes()))
def test_any_timestamp(times: list[datetime]) -> None:
    assert convert([server_timestamp(t) for t in times], NTZ) == (times, {})


@given(st.lists(st.tuples(st.datetimes(datetime(2, 1, 1), datetime(9998, 1, 1)), st.integers(-15 * 60, 15 * 60))))
def test_any_timestamp_with_zone(times: list[tuple[datetime, int]]) -> None:
    texts = [server_timestamp(t) + server_zone(minutes) for t, minutes in times]
    instants = [(t - timedelta(minutes=minutes)).replace(tzinfo=UTC) for t, minutes in times]
    assert convert(texts, TZ) == (instants, {})


@given(st.lists(st.none() | st.binary()))
@example([b"\\x", None, b""])
def test_any_bytes(values: list[bytes | None]) -> None:
    assert convert([None if v is None else "\\x" + v.hex() for v in values], pa.binary()) == (values, {})


def test_many_values_that_do_not_fit_cost_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A column full of infinity is sorted out by its looks, not value by value."""
    from cdcpipe.pgoutput import columnar

    calls = []
    cast_some = columnar._cast_some

    def counted(text: pa.StringArray, arrow_type: pa.DataType) -> pa.Array:
        calls.append(len(text))
        return cast_some(text, arrow_type)

    monkeypatch.setattr(columnar, "_cast_some", counted)
    count = 5000
    values, exact = convert(["infinity", "2024-01-01"] * count, pa.date32())
    assert (values, len(exact)) == ([None, date(2024, 1, 1)] * count, count)
    assert len(calls) == 1

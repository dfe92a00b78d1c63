"""Casts of columns from text to Arrow's types: a value is exact, or it stays a text."""

from __future__ import annotations

import struct
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cdcpipe.errors import ProtocolError
from cdcpipe.pgoutput.columnar import decode_changes
from cdcpipe.pgoutput.messages import Binary
from cdcpipe.types.arrow import casts
from cdcpipe.types.arrow.readers import to_arrow
from cdcpipe.types.binary.decoder import to_text
from support.columns import NATURAL, assert_same, decode_all, insert, lay_out, relation
from support.pgoutput_build import build

if TYPE_CHECKING:
    from collections.abc import Sequence


# Casts

DECIMAL, NTZ, TZ = pa.decimal128(10, 2), pa.timestamp("us"), pa.timestamp("us", "UTC")


def convert(texts: Sequence[str | None], arrow_type: pa.DataType) -> tuple[list[object], dict[int, str]]:
    """Return the values and, by row, the texts that did not fit."""
    values = decode_all([build(insert(None if t is None else t.encode())) for t in texts], 1).columns[0]
    converted = to_arrow(values, arrow_type)
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
        (pa.decimal128(20, 6), "0." + "0" * 60, Decimal(0)),
        (pa.decimal128(20, 6), "-1.5" + "0" * 60, Decimal("-1.5")),
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
        # Scales from which Arrow, by itself, makes 0.
        (pa.decimal128(20, 6), "7", ["0." + "0" * 44 + "1", "-0." + "0" * 31 + "6" * 34, "0." + "0" * 90 + "1"]),
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


def list_of(element: pa.DataType) -> pa.ListType:
    return pa.list_(pa.field("element", element))


@pytest.mark.parametrize(
    ("element", "text", "value"),
    [
        (pa.int32(), "{}", []),
        (pa.int32(), "{1}", [1]),
        (pa.int32(), "{1,NULL,-3}", [1, None, -3]),
        (pa.string(), '{a,NULL,"NULL","","a b","{,}"}', ["a", None, "NULL", "", "a b", "{,}"]),
        (pa.string(), r'{"q\"\\","\\","\\\"",é}', ['q"\\', "\\", '\\"', "é"]),
        (pa.binary(), r'{"\\x00ff"}', [b"\0\xff"]),
        (NTZ, '{"2024-02-29 00:00:00.5",NULL}', [datetime(2024, 2, 29, 0, 0, 0, 500000), None]),
        (DECIMAL, "{1.5,-0.01}", [Decimal("1.50"), Decimal("-0.01")]),
    ],
)
def test_lists(element: pa.DataType, text: str, value: list[object]) -> None:
    assert convert([text], list_of(element)) == ([value], {})
    assert convert([None, text, None, "{}", text], list_of(element)) == ([None, value, None, [], value], {})


@pytest.mark.parametrize(
    "text",
    ["{{1,2},{3,4}}", "[0:1]={1,2}", "[2:2]={1}", "{1,2147483648}", "{infinity}", "", "{", "}", "{1", "{1,}", "{,1}", "{1,,2}",
     '{"}', '{"1}', '{1"}', '{1"2"}', '{"1"2"3"}', r"{\1}", "{1}{2}", "{}}", "x{1}", "{1}x", r'{"1\"}', '"'],
)  # fmt: skip
def test_a_text_that_is_no_list_is_null_with_its_exact_text(text: str) -> None:
    """The rows beside it are not affected."""
    for element, good, value in ((pa.int32(), "{7,NULL}", [7, None]), (pa.int16(), '{"7"}', [7])):
        assert convert([text], list_of(element)) == ([None], {0: text})
        assert convert([good, text, None, text, good], list_of(element)) == ([value, None, None, None, value], {1: text, 3: text})


@given(st.lists(st.none() | st.lists(st.none() | st.text(st.sampled_from('a"\\{}, é\nNULL'), max_size=6), max_size=4)))
def test_any_list_of_texts(rows: list[list[str | None] | None]) -> None:
    """binary.py gives the texts, and other tests compare these with the server's."""
    values = [None if row is None else array_send(25, [None if text is None else text.encode() for text in row]) for row in rows]
    assert convert([v and to_text(1009, v).decode() for v in values], list_of(pa.string())) == (rows, {})
    compare_forms(1009, [list_of(pa.string()), pa.string()], forms(1009, values))


def array_send(element_id: int, elements: Sequence[bytes | None], *dimension: int) -> bytes:
    """Return a list in binary form or, with another ``dimension``, length or lower bound, another array."""
    parts = [struct.pack(">i", -1) if element is None else struct.pack(">i", len(element)) + element for element in elements]
    if not elements:
        return struct.pack(">iiI", 0, 0, element_id)
    return struct.pack(">iiIii", 1, int(None in elements), element_id, *(dimension or (len(elements), 1))) + b"".join(parts)


def test_lists_in_binary_form() -> None:
    one = struct.pack(">i", 1)
    two_dimensions = struct.pack(">iiIiiii", 2, 0, 23, 1, 1, 2, 1) + 2 * (struct.pack(">i", 4) + one)
    long = array_send(23, [one] * 3000)
    values = [array_send(23, [one, None, one]), None, array_send(23, []), two_dimensions, array_send(23, [one], 1, 0), long,
              array_send(23, [None])]  # fmt: skip
    compare_forms(1007, [list_of(pa.int32()), pa.string()], forms(1007, values))
    dates = [array_send(1082, [one, struct.pack(">i", 2**31 - 1)]), array_send(1082, [one])]
    compare_forms(1182, [list_of(pa.date32())], forms(1182, dates))
    for broken in (b"", values[0][:-1], values[0] + b"x", array_send(25, [one]), array_send(23, [one], 2, 1), one * 3, one * 5):
        columns = decode_changes(*lay_out([build(insert(b"id", Binary(broken or b"")))]), relation(2, 1007)).columns
        with pytest.raises(ProtocolError, match=r"column 'c1' of table 'public\.t' came in binary form"):
            to_arrow(columns[1], list_of(pa.int32()))


def test_many_values_that_do_not_fit_cost_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A column full of infinity is sorted by the form of its texts, and not value by value."""
    calls = []
    cast_some = casts._cast_some

    def counted(text: pa.StringArray, arrow_type: pa.DataType) -> pa.Array:
        calls.append(len(text))
        return cast_some(text, arrow_type)

    monkeypatch.setattr(casts, "_cast_some", counted)
    count = 5000
    values, exact = convert(["infinity", "2024-01-01"] * count, pa.date32())
    assert (values, len(exact)) == ([None, date(2024, 1, 1)] * count, count)
    assert len(calls) == 1


# Values in binary form: equal to what their text gives


def compare_forms(type_id: int, arrow_types: Sequence[pa.DataType], pairs: Sequence[tuple[bytes, bytes] | None]) -> None:
    """Compare columns of text, of bytes, and of both. ``pairs`` has both forms of each value; None is NULL."""
    all_text = [None if pair is None else pair[0] for pair in pairs]
    all_binary = [None if pair is None else Binary(pair[1]) for pair in pairs]
    mixed = [(one, other)[row % 2] for row, (one, other) in enumerate(zip(all_text, all_binary, strict=True))]
    columns = [
        decode_changes(*lay_out([build(insert(b"id", value)) for value in values]), relation(2, type_id)).columns[1]
        for values in (all_text, all_binary, mixed, mixed[1:])
    ]
    for arrow_type in arrow_types:
        assert_same(columns[1], columns[0], arrow_type)
        assert_same(columns[2], columns[0], arrow_type)
        if len(pairs) > 1:
            rest = decode_changes(*lay_out([build(insert(b"id", value)) for value in all_text[1:]]), relation(2, type_id)).columns[
                1
            ]
            assert_same(columns[3], rest, arrow_type)


def forms(type_id: int, values: Sequence[bytes | None]) -> list[tuple[bytes, bytes] | None]:
    """Return both forms of values in binary form. test_binary.py compares the texts with the server's."""
    return [None if value is None else (to_text(type_id, value), value) for value in values]


@given(st.lists(st.none() | st.integers(-(2**31), 2**31 - 1)))
@example([-2451545, 2147483493 - 2451545, -730120, -730119, -730118, 2921939, 2921940, 2**31 - 1, -(2**31)])
def test_any_binary_date(days: list[int | None]) -> None:
    days = [day for day in days if day is None or -2451545 <= day < 2145031949 or day in (2**31 - 1, -(2**31))]
    compare_forms(1082, [pa.date32()], forms(1082, [None if day is None else struct.pack(">i", day) for day in days]))


@settings(max_examples=50)
@given(st.lists(st.none() | st.integers(-70_000_000_000_000_000, 300_000_000_000_000_000) | st.sampled_from([2**63 - 1, -(2**63)])))
@example([-211813488000000000, 9223371331199999999, -63082281600000000, -63082281600000001, 252455615999999999, 252455616000000000])
def test_any_binary_timestamp(times: list[int | None]) -> None:
    values = [None if time is None else struct.pack(">q", time) for time in times]
    compare_forms(1114, [NTZ], forms(1114, values))
    compare_forms(1184, [TZ, pa.timestamp("us", "Europe/Berlin")], forms(1184, values))


@settings(max_examples=50)
@given(st.lists(st.none() | st.binary(min_size=8, max_size=8)))
@example(
    [struct.pack(">d", n) for n in (0.0, -0.0, float("inf"), 1e23)] + [b"\xff\xf8" + b"\0" * 6, b"\x7f\xf0" + b"\0" * 5 + b"\1"]
)
def test_any_binary_number(values: list[bytes | None]) -> None:
    compare_forms(701, [pa.float64()], forms(701, values))
    compare_forms(20, [pa.int64(), pa.int32()], forms(20, values))
    halves = [None if value is None else value[:4] for value in values]
    compare_forms(700, [pa.float32(), pa.float64()], forms(700, halves))
    compare_forms(23, [pa.int32()], forms(23, halves))
    compare_forms(26, [pa.int64()], forms(26, halves))
    compare_forms(21, [pa.int16()], forms(21, [None if value is None else value[:2] for value in values]))
    compare_forms(16, [pa.bool_()], forms(16, [None if value is None else bytes([value[0] & 1]) for value in values]))
    compare_forms(17, [pa.binary(), pa.string()], forms(17, values))
    compare_forms(2950, [pa.string()], forms(2950, [None if value is None else value * 2 for value in values]))


def numeric(number: Decimal) -> bytes:
    """Return what numeric_send() gives."""
    if not number.is_finite():
        return struct.pack(">HhHH", 0, 0, 0xC000 if number.is_nan() else 0xF000 if number < 0 else 0xD000, 0)
    scale = max(0, -int(number.as_tuple().exponent))
    whole, _, fraction = f"{number.copy_abs():f}".partition(".")
    whole, fraction = whole.rjust(-(-len(whole) // 4) * 4, "0"), fraction.ljust(-(-len(fraction) // 4) * 4, "0")
    digits = [int((whole + fraction)[place : place + 4]) for place in range(0, len(whole + fraction), 4)]
    weight = len(whole) // 4 - 1
    while digits and not digits[0]:
        del digits[0]
        weight -= 1
    while digits and not digits[-1]:
        del digits[-1]
    sign = 0x4000 if number < 0 else 0
    return struct.pack(f">HhHH{len(digits)}H", len(digits), weight if digits else 0, sign, scale, *digits)


@given(
    st.integers(1, 38).flatmap(lambda p: st.tuples(st.just(p), st.integers(0, p))),
    st.lists(st.none() | st.decimals(-(10**40), 10**40, places=3) | st.decimals(allow_nan=True) | st.decimals(-1000, 1000)),
    st.data(),
)
def test_any_binary_numeric(modifier: tuple[int, int], numbers: list[Decimal | None], data: st.DataObject) -> None:
    precision, scale = modifier
    limit = 10**precision - 1
    fitting = [Decimal((int(n < 0), tuple(map(int, str(abs(n)))), -scale)) for n in data.draw(st.lists(st.integers(-limit, limit)))]
    sane = [n for n in numbers if n is None or not n.is_finite() or abs(n.adjusted()) < 60 < 100 > -int(n.as_tuple().exponent)]
    values = data.draw(st.permutations([*sane, *fitting]))
    pairs = forms(1700, [None if number is None else numeric(number) for number in values])
    for number, pair in zip(values, pairs, strict=True):
        if number is not None and pair is not None and number.is_finite():
            assert Decimal(pair[0].decode()) == number
    compare_forms(1700, [pa.decimal128(precision, scale), pa.string()], pairs)


def test_common_types_are_read_without_python_per_value(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = {
        16: b"\1", 17: b"\0\xff", 20: b"\0" * 8, 21: b"\0\1", 23: b"\0" * 4, 25: b"x", 26: b"\xff" * 4, 700: b"\0" * 4,
        701: b"\0" * 8, 1043: b"x", 1082: b"\0" * 4, 1114: b"\0" * 8, 1184: b"\0" * 8, 1700: numeric(Decimal("-12.345")),
        2950: b"\0" * 16, 3802: b"\1{}",
    }  # fmt: skip
    expected = {type_id: to_text(type_id, value) for type_id, value in cases.items()}

    def refuse(type_id: int, data: bytes) -> bytes:
        raise AssertionError(type_id)

    monkeypatch.setattr("cdcpipe.types.arrow.values.to_text", refuse)
    for type_id, value in cases.items():
        records = [build(insert(b"id", each)) for each in (Binary(value), None, expected[type_id], Binary(value))]
        values = decode_changes(*lay_out(records), relation(2, type_id)).columns[1]
        found = to_arrow(values, NATURAL.get(type_id, pa.string())).array.to_pylist()
        assert found == [found[2], None, found[2], found[2]]
        assert found[2] is not None

r"""A value in binary form -> its text: what a type's send function wrote -> what its output function prints.

The text is that of a session with the settings that cdcpipe pins: client_encoding UTF8, DateStyle ISO, TimeZone UTC,
IntervalStyle postgres, bytea_output hex, extra_float_digits 1 or more. `to_text` knows the built-in types. A `Types` made
with a ``find`` function also knows what that tells it: enums, domains, arrays, ranges and composites of users' types
(`Shape`), and functions for types whose text is not in their bytes (money, regclass and the like).

Pure: no I/O, no catalog, no state but the functions found. Whatever the bytes, the answer is a text, a `ProtocolError` or,
for a type that is not known, an `UnknownTypeError`; counts and lengths are compared with what is there before they are
believed, nesting is limited, and a text ends at the size at which the server gives up as well. Errors hold no values.

Where the server's versions differ, the newer one is followed: a ``"char"`` beyond ASCII is an escape (``\351``), as since
PostgreSQL 16; the largest and the smallest interval are ``infinity`` and ``-infinity``, as since 17.
Source: the types' send and output functions, src/backend/utils/adt/*.c.
"""

from __future__ import annotations

import enum
import struct
from collections import deque
from collections.abc import Callable, Mapping
from datetime import date
from fractions import Fraction
from math import inf, nextafter, ulp
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from cdcpipe.errors import CdcpipeError, InvalidArgumentsError, ProtocolError
from cdcpipe.pgoutput.messages import Binary

if TYPE_CHECKING:
    from cdcpipe.pgoutput.messages import Relation, Row, Value

__all__ = [
    "ARRAYS",
    "REG_TYPES",
    "Find",
    "Kind",
    "Shape",
    "ToText",
    "Types",
    "UnknownTypeError",
    "name_column",
    "row_to_text",
    "to_text",
]

ToText: TypeAlias = Callable[[bytes], bytes]


class Kind(enum.Enum):
    """How a type is made of others."""

    ARRAY = "array"
    VECTOR = "vector"
    """int2vector, oidvector: arrays with a text of their own."""
    COMPOSITE = "composite"
    DOMAIN = "domain"
    ENUM = "enum"
    MULTIRANGE = "multirange"
    RANGE = "range"


class Shape(NamedTuple):
    """``of``: the element's, base, range's or subtype's id; 0 where there is none. ``delimiter``: between an array's elements."""

    kind: Kind
    of: int = 0
    delimiter: bytes = b","


Find: TypeAlias = Callable[[int], Shape | ToText | None]
"""Tells about a type that is not built in, or whose text is not in its bytes; None if it does not know it either."""


class UnknownTypeError(CdcpipeError):
    """Nothing here knows how values of a type look as text."""

    def __init__(self, type_id: int, problem: str) -> None:
        super().__init__(problem, hint="leave the option 'binary' out, and its values come as text")
        self.type_id = type_id


class Types:
    """The functions of types, by id; those that are not built in as ``find`` says."""

    def __init__(self, find: Find | None = None) -> None:
        self._find = find
        self._functions: dict[int, ToText] = dict(_SCALARS)
        self._depth = 0

    def forget(self) -> None:
        """Ask again for what was found."""
        self._functions = dict(_SCALARS)

    def to_text(self, type_id: int, data: bytes) -> bytes:
        """Return a value's text; raise ProtocolError for malformed bytes, UnknownTypeError for a type that is not known."""
        function = self._functions.get(type_id) or self._function(type_id)
        try:
            return function(data)
        except (struct.error, IndexError):
            # Only reads past the end, and fixed sizes that do not fit, raise these.
            raise _malformed(f"{len(data)} bytes are too few or too many") from None
        finally:
            self._depth = 0

    def row_to_text(self, relation: Relation, row: Row) -> Row:
        """Return the row with text in place of binary values; the errors name table and column."""
        if Binary not in map(type, row):
            return row
        values: list[Value] = []
        for column, value in zip(relation.columns, row, strict=True):
            if isinstance(value, Binary):
                try:
                    # As plain bytes: a Binary equals none, and what is returned as it is would still be one.
                    value = self.to_text(column.type_id, bytes(value))
                except (ProtocolError, UnknownTypeError, InvalidArgumentsError) as ex:
                    name_column(ex, f"{relation.namespace}.{relation.name}", column.name)
                    raise
            values.append(value)
        return tuple(values)

    def _function(self, type_id: int) -> ToText:
        function = self._functions.get(type_id)
        if function is None:
            found: Shape | ToText | None = _SHAPES.get(type_id)
            if found is None and self._find is not None:
                found = self._find(type_id)
            if found is None:
                raise UnknownTypeError(type_id, _NO_TEXT.get(type_id, f"the type with OID {type_id} is not built in"))
            function = self._functions[type_id] = self._made_of(found) if isinstance(found, Shape) else found
        return function

    def _made_of(self, shape: Shape) -> ToText:
        match shape.kind:
            case Kind.ENUM:
                return _text
            case Kind.COMPOSITE:
                return self._record
            case Kind.DOMAIN:
                return self._function(shape.of)
            case Kind.RANGE:
                return _range_of(self._function(shape.of))
            case Kind.MULTIRANGE:
                return _multirange_of(self._function(shape.of))
            case Kind.VECTOR:
                return _vector_of(shape.of, self._function(shape.of))
            case Kind.ARRAY:
                return _array_of(shape.of, self._function(shape.of), shape.delimiter)

    def _record(self, data: bytes) -> bytes:
        """record_send: the number of fields; for each its type, length (-1: NULL) and bytes."""
        # Here alone the bytes say of which types they are, so here alone they could nest without end. Each level
        # doubles the quotes within, so nobody gets far with types that nest deep.
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise _malformed(f"composite types nest more than {_MAX_DEPTH} deep")
        (count,) = _I4.unpack_from(data)
        if not 0 <= count * 8 <= len(data) - 4:
            raise _malformed(f"{count} fields do not fit")
        pos = 4
        fields = _Parts()
        for _ in range(count):
            (type_id,) = _U4.unpack_from(data, pos)
            value, pos = _nullable(data, pos + 4)
            fields.add(b"" if value is None else _record_field(self._function(type_id)(value)))
        _check_end(data, pos)
        self._depth -= 1
        return b"(%b)" % b",".join(fields.parts)


def to_text(type_id: int, data: bytes) -> bytes:
    """Return the text of a built-in type's value; raise ProtocolError for malformed bytes, UnknownTypeError for other types."""
    return _BUILT_IN.to_text(type_id, data)


def row_to_text(relation: Relation, row: Row) -> Row:
    """Return the row with text in place of binary values of built-in types."""
    return _BUILT_IN.row_to_text(relation, row)


def name_column(ex: CdcpipeError, table: str, column: str) -> None:
    """Let an error of a value's conversion name its column."""
    ex.message = f"column {column!r} of table {table!r} came in binary form: {ex.message}"
    ex.args = (ex.message,)


_MAX_DEPTH: Final = 16
_MAX_TEXT_BYTES: Final = 0x3FFFFFFF
"""MaxAllocSize: the server cannot make a larger text either."""

_I2, _I4, _I8 = struct.Struct(">h"), struct.Struct(">i"), struct.Struct(">q")
_U2, _U4, _U8 = struct.Struct(">H"), struct.Struct(">I"), struct.Struct(">Q")
_F4, _F8 = struct.Struct(">f"), struct.Struct(">d")


def _malformed(problem: str) -> ProtocolError:
    return ProtocolError(f"a malformed value in binary form: {problem}")


def _check_end(data: bytes, pos: int) -> None:
    if pos != len(data):
        raise _malformed(f"it should end after {pos} of {len(data)} bytes")


def _slice(data: bytes, pos: int, length: int) -> tuple[bytes, int]:
    end = pos + length
    if length < 0 or end > len(data):
        raise _malformed(f"{length} bytes do not fit at byte {pos} of {len(data)}")
    return data[pos:end], end


def _nullable(data: bytes, pos: int) -> tuple[bytes | None, int]:
    """Read a length and so many bytes; the length of NULL is -1."""
    (length,) = _I4.unpack_from(data, pos)
    return (None, pos + 4) if length == -1 else _slice(data, pos + 4, length)


def _cstring(data: bytes, pos: int) -> tuple[bytes, int]:
    end = data.find(0, pos)
    if end < 0:
        raise _malformed(f"a string at byte {pos} has no end")
    return data[pos:end], end + 1


class _Parts:
    """Texts, as long as they are not too long together: a few bytes can be a number of many digits."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self._room = _MAX_TEXT_BYTES

    def add(self, text: bytes) -> None:
        self._room -= len(text) + 1
        if self._room < 0:
            raise _malformed(f"its text has more than {_MAX_TEXT_BYTES} bytes")
        self.parts.append(text)


# Numbers


def _number(layout: struct.Struct) -> ToText:
    def text(data: bytes) -> bytes:
        return b"%d" % layout.unpack(data)[0]

    return text


def _bool(data: bytes) -> bytes:
    if data == b"\1":
        return b"t"
    if data == b"\0":
        return b"f"
    raise _malformed("it is neither true nor false")


_NUMERIC = struct.Struct(">HhHH")  # number of digits, weight of the first one, sign, display scale
_NUMERIC_SIGNS: Final = {0x0000: "", 0x4000: "-"}
_NUMERIC_SPECIAL: Final = {0xC000: b"NaN", 0xD000: b"Infinity", 0xF000: b"-Infinity"}
_MAX_SCALE: Final = 0x3FFF


def _numeric(data: bytes) -> bytes:
    """numeric_send: digits of base 10000; the first one counts 10000 ** weight."""
    count, weight, sign, scale = _NUMERIC.unpack_from(data)
    digits = struct.unpack_from(f">{count}H", data, 8)
    _check_end(data, 8 + 2 * count)
    if sign in _NUMERIC_SPECIAL:
        return _NUMERIC_SPECIAL[sign]
    if sign not in _NUMERIC_SIGNS or scale > _MAX_SCALE or (digits and max(digits) > 9999):
        raise _malformed("no numeric has such a sign, scale or digit")
    text = "".join([f"{digit:04}" for digit in digits])
    point = 4 * (weight + 1)
    if point > 0:
        whole, fraction = text[:point].ljust(point, "0").lstrip("0"), text[point:]
    else:
        whole, fraction = "", "0" * min(-point, scale) + text
    result = _NUMERIC_SIGNS[sign] + (whole or "0")
    return f"{result}.{fraction[:scale].ljust(scale, '0')}".encode() if scale else result.encode()


_MIN_NORMAL_FLOAT4: Final = 2.0**-126
_LAST_EXACT_INTEGER: Final = 2.0**53


def _float8(data: bytes) -> bytes:
    return _float8_text(_F8.unpack(data)[0])


def _float8_text(number: float) -> bytes:
    """Return the shortest decimal number that reads back as this one.

    Unlike Python, the server does not rely on the reader's rounding half to even: a decimal halfway to the next number
    is out of the question. Such a number has no more than 17 digits only from 2 ** 53 on and below 1e41.
    """
    magnitude = abs(number)
    if 1e15 <= magnitude < 1e41:
        text = repr(magnitude)
        if magnitude >= _LAST_EXACT_INTEGER:
            down, up = magnitude - nextafter(magnitude, 0.0), ulp(magnitude)
            distance = 2 * (Fraction(text) - Fraction(magnitude))
            if distance in (up, -down):
                exact = Fraction(magnitude)
                digits, exponent = _shortest(exact, exact - Fraction(down) / 2, exact + Fraction(up) / 2)
                return _decimal(number < 0, digits, exponent, 15)
        mantissa, _, power = text.partition("e")
        digits = mantissa.replace(".", "")
        exponent = int(power) if power else len(mantissa.partition(".")[0]) - 1
        return _decimal(number < 0, digits, exponent, 15)
    if number != number:
        return b"NaN"
    if magnitude == inf:
        return b"Infinity" if number > 0 else b"-Infinity"
    return repr(number).removesuffix(".0").encode()


def _float4(data: bytes) -> bytes:
    (number,) = _F4.unpack(data)
    if number == 0 or number - number != 0:  # NaN and the infinities, too
        return _float8_text(number)
    magnitude = abs(number)
    (bits,) = _U4.unpack(_F4.pack(magnitude))
    below = _F4.unpack(_U4.pack(bits - 1))[0]
    above = 2 * magnitude - below if bits == _LARGEST_FLOAT4 else _F4.unpack(_U4.pack(bits + 1))[0]
    low, high = (below + magnitude) / 2, (magnitude + above) / 2
    if magnitude >= _MIN_NORMAL_FLOAT4 and bits & 0x7FFFFF:
        # Six digits always survive, so if six do, they are the shortest when their zeros are gone.
        for precision in (5, 6, 7, 8):
            text = f"{magnitude:.{precision}e}"
            value = float(text)
            if value in (low, high):
                break  # It may be rounded to there; in all other cases the comparison is exact.
            if low < value < high:
                mantissa, _, power = text.partition("e")
                return _decimal(number < 0, mantissa.replace(".", ""), int(power), 6)
    digits, exponent = _shortest(Fraction(magnitude), Fraction(low), Fraction(high))
    return _decimal(number < 0, digits, exponent, 6)


_LARGEST_FLOAT4: Final = 0x7F7FFFFF


def _shortest(number: Fraction, low: Fraction, high: Fraction) -> tuple[str, int]:
    """Return the digits of the shortest decimal between ``low`` and ``high``, of several the nearest, and the first one's power."""
    exponent = len(str(int(number))) - 1 if number >= 1 else -len(str(int(1 / number)))
    if Fraction(10) ** exponent > number:
        exponent -= 1
    elif Fraction(10) ** (exponent + 1) <= number:
        exponent += 1
    count = 0
    while True:
        count += 1
        unit = Fraction(10) ** (exponent - count + 1)
        floor = number // unit
        inside = [digits for digits in (floor, floor + 1) if low < digits * unit < high]
        if inside:
            best = min(inside, key=lambda digits: (abs(digits * unit - number), digits % 2))
            return str(best), exponent + len(str(best)) - count


def _decimal(is_negative: bool, digits: str, exponent: int, limit: int) -> bytes:
    """Write digits, of which the first counts 10 ** exponent, without that power if it is from -4 to below the limit."""
    digits = digits.rstrip("0") or "0"
    if -4 <= exponent < 0:
        text = "0." + "0" * (-exponent - 1) + digits
    elif 0 <= exponent < limit:
        whole, fraction = digits[: exponent + 1].ljust(exponent + 1, "0"), digits[exponent + 1 :]
        text = f"{whole}.{fraction}" if fraction else whole
    else:
        text = digits[0] + ("." + digits[1:] if len(digits) > 1 else "") + f"e{exponent:+03d}"
    return (f"-{text}" if is_negative else text).encode()


# Text and bytes


def _text(data: bytes) -> bytes:
    return data


def _char(data: bytes) -> bytes:
    (code,) = struct.unpack("B", data)
    return b"\\%03o" % code if code > 0x7F else data.rstrip(b"\0")


def _bytea(data: bytes) -> bytes:
    return b"\\x" + data.hex().encode()


def _versioned_text(data: bytes) -> bytes:
    """jsonb_send, jsonpath_send: the version and the text."""
    if data[0] != 1:
        raise _malformed(f"a format version is {data[0]}")
    return data[1:]


def _uuid(data: bytes) -> bytes:
    text = data.hex()
    if len(text) != 32:
        raise _malformed(f"a uuid has 16 bytes, not {len(data)}")
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}".encode()


def _bit(data: bytes) -> bytes:
    """bit_send: the number of bits; they come from the left."""
    (count,) = _I4.unpack_from(data)
    size = (count + 7) // 8
    if count < 0 or len(data) != 4 + size:
        raise _malformed(f"{count} bits are not {len(data) - 4} bytes")
    if not count:
        return b""
    bits = int.from_bytes(data[4:]) >> (8 * size - count)
    return f"{bits:0{count}b}".encode()


def _pairs_of_hex(size: int) -> ToText:
    """macaddr, macaddr8."""

    def text(data: bytes) -> bytes:
        if len(data) != size:
            raise _malformed(f"an address has {size} bytes, not {len(data)}")
        return data.hex(":").encode()

    return text


_INET = struct.Struct("4B")  # address family, bits of the netmask, whether it is a cidr, bytes of the address
_FAMILIES: Final = {2: 4, 3: 16}


def _inet(data: bytes) -> bytes:
    family, bits, is_cidr, size = _INET.unpack_from(data)
    if _FAMILIES.get(family) != size or len(data) != 4 + size or bits > 8 * size or is_cidr > 1:
        raise _malformed("no network address has such a family or size")
    address = data[4:]
    text = ".".join(map(str, address)) if size == 4 else _ipv6(address)
    return f"{text}/{bits}".encode() if is_cidr or bits != 8 * size else text.encode()


def _ipv6(address: bytes) -> str:
    """Write :: for the first of the longest runs of zero words, and the last words as an IPv4 address where one is embedded."""
    words = struct.unpack(">8H", address)
    best, length = 0, 1
    for begin in range(8):
        run = 0
        while begin + run < 8 and not words[begin + run]:
            run += 1
        if run > length:
            best, length = begin, run
    if length < 2:
        return ":".join(f"{word:x}" for word in words)
    if best == 0 and (length == 6 or (length == 5 and words[5] == 0xFFFF)):
        return f"::{'ffff:' if length == 5 else ''}{'.'.join(map(str, address[12:]))}"
    before, after = words[:best], words[best + length :]
    return ":".join(f"{word:x}" for word in before) + "::" + ":".join(f"{word:x}" for word in after)


# Dates and times

_DAY_US: Final = 86_400_000_000
_2000_ORDINAL: Final = date(2000, 1, 1).toordinal()
_MAX_ORDINAL: Final = date.max.toordinal()
_FIRST_DAY, _END_DAY = -2_451_545, 2_147_483_494 - 2_451_545  # Julian day 0; JULIAN_MAX
_FIRST_US, _END_US = -211_813_488_000_000_000, 9_223_371_331_200_000_000
_INFINITIES: Final = {-(2**31): b"-infinity", 2**31 - 1: b"infinity"}
_INFINITIES_US: Final = {-(2**63): b"-infinity", 2**63 - 1: b"infinity"}
_INTERVAL = struct.Struct(">qii")  # microseconds, days, months
_INTERVAL_INFINITIES: Final = {
    (-(2**63), -(2**31), -(2**31)): b"-infinity",
    (2**63 - 1, 2**31 - 1, 2**31 - 1): b"infinity",
}
_TIMETZ = struct.Struct(">qi")  # microseconds, seconds west of Greenwich
_ZONE_LIMIT_S: Final = 16 * 3600


def _date(data: bytes) -> bytes:
    (days,) = _I4.unpack(data)
    if days in _INFINITIES:
        return _INFINITIES[days]
    if not _FIRST_DAY <= days < _END_DAY:
        raise _malformed("no date is so far away")
    text, is_bc = _date_text(days)
    return f"{text} BC".encode() if is_bc else text.encode()


def _date_text(days: int) -> tuple[str, bool]:
    """Return the date so many days after 2000-01-01, and whether its year is one before Christ."""
    ordinal = days + _2000_ORDINAL
    if 0 < ordinal <= _MAX_ORDINAL:
        return date.fromordinal(ordinal).isoformat(), False
    # Years that begin in March, in eras of 400 years, which are all alike.
    era, day = divmod(ordinal + 305, 146_097)
    year = (day - day // 1460 + day // 36_524 - day // 146_096) // 365
    day -= 365 * year + year // 4 - year // 100
    month = (5 * day + 2) // 153
    day -= (153 * month + 2) // 5 - 1
    year += 400 * era + (month >= 10)
    month += 3 if month < 10 else -9
    return f"{year if year > 0 else 1 - year:04}-{month:02}-{day:02}", year <= 0


def _time_text(time_us: int) -> str:
    seconds, fraction = divmod(time_us, 1_000_000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    text = f"{hours:02}:{minutes:02}:{seconds:02}"
    return f"{text}.{fraction:06}".rstrip("0") if fraction else text


def _time(data: bytes) -> bytes:
    (time_us,) = _I8.unpack(data)
    _check_time(time_us)
    return _time_text(time_us).encode()


def _check_time(time_us: int) -> None:
    if not 0 <= time_us <= _DAY_US:  # 24:00 is one
        raise _malformed("no time of day is so far away")


def _timetz(data: bytes) -> bytes:
    time_us, west_s = _TIMETZ.unpack(data)
    _check_time(time_us)
    if abs(west_s) >= _ZONE_LIMIT_S:
        raise _malformed("no time zone is so far away")
    minutes, seconds = divmod(abs(west_s), 60)
    hours, minutes = divmod(minutes, 60)
    zone = f"{hours:02}" + (f":{minutes:02}" if minutes or seconds else "") + (f":{seconds:02}" if seconds else "")
    return f"{_time_text(time_us)}{'-' if west_s > 0 else '+'}{zone}".encode()


def _timestamp_with(zone: str) -> ToText:
    def text(data: bytes) -> bytes:
        (time_us,) = _I8.unpack(data)
        if time_us in _INFINITIES_US:
            return _INFINITIES_US[time_us]
        if not _FIRST_US <= time_us < _END_US:
            raise _malformed("no timestamp is so far away")
        days, rest_us = divmod(time_us, _DAY_US)
        day, is_bc = _date_text(days)
        return f"{day} {_time_text(rest_us)}{zone}{' BC' if is_bc else ''}".encode()

    return text


def _interval(data: bytes) -> bytes:
    parts = _INTERVAL.unpack(data)
    if parts in _INTERVAL_INFINITIES:
        return _INTERVAL_INFINITIES[parts]
    time_us, days, months = parts
    years, months = divmod(abs(months), 12) if months >= 0 else (-number for number in divmod(-months, 12))
    texts = []
    was_negative = False
    for number, unit in ((years, "year"), (months, "mon"), (days, "day")):
        if number:
            # The sign of each decides about a plus before the next one only.
            plus = "+" if was_negative and number > 0 else ""
            texts.append(f"{plus}{number} {unit}{'' if number == 1 else 's'}")
            was_negative = number < 0
    if time_us or not texts:
        sign = "-" if time_us < 0 else "+" if was_negative else ""
        texts.append(sign + _time_text(abs(time_us)))
    return " ".join(texts).encode()


# Identifiers of the server's


def _pg_lsn(data: bytes) -> bytes:
    (lsn,) = _U8.unpack(data)
    return b"%X/%X" % (lsn >> 32, lsn & 0xFFFFFFFF)


_TID = struct.Struct(">IH")  # block, number in it


def _tid(data: bytes) -> bytes:
    return b"(%d,%d)" % _TID.unpack(data)


_SNAPSHOT = struct.Struct(">iqq")  # number of transactions in progress, xmin, xmax


def _snapshot(data: bytes) -> bytes:
    count, xmin, xmax = _SNAPSHOT.unpack_from(data)
    if count < 0 or len(data) != _SNAPSHOT.size + 8 * count:
        raise _malformed(f"{count} transaction ids do not fit")
    xids = struct.unpack_from(f">{count}q", data, _SNAPSHOT.size)
    return f"{xmin}:{xmax}:{','.join(map(str, xids))}".encode()


# Geometry


def _floats(data: bytes, count: int, pos: int = 0) -> list[bytes]:
    if count < 0 or len(data) != pos + 8 * count:
        raise _malformed(f"{count} coordinates are not {len(data) - pos} bytes")
    return [_float8_text(number) for number in struct.unpack_from(f">{count}d", data, pos)]


def _points(data: bytes, count: int, pos: int = 0) -> bytes:
    numbers = _floats(data, 2 * count, pos)
    return b",".join([b"(%b,%b)" % pair for pair in zip(numbers[::2], numbers[1::2], strict=True)])


def _lseg(data: bytes) -> bytes:
    return b"[%b]" % _points(data, 2)


def _line(data: bytes) -> bytes:
    return b"{%b}" % b",".join(_floats(data, 3))


def _circle(data: bytes) -> bytes:
    return b"<(%b,%b),%b>" % tuple(_floats(data, 3))


def _polygon(data: bytes) -> bytes:
    return b"(%b)" % _points(data, _I4.unpack_from(data)[0], 4)


def _path(data: bytes) -> bytes:
    (count,) = _I4.unpack_from(data, 1)
    return (b"(%b)" if data[0] else b"[%b]") % _points(data, count, 5)


# Text search


def _quoted_lexeme(lexeme: bytes) -> bytes:
    return b"'%b'" % lexeme.replace(b"\\", b"\\\\").replace(b"'", b"''")


_WEIGHTS: Final = (b"", b"C", b"B", b"A")


def _tsvector(data: bytes) -> bytes:
    """tsvectorsend: the number of lexemes; for each its text and positions, the upper two bits of which are the weight."""
    (count,) = _I4.unpack_from(data)
    if not 0 <= count * 3 <= len(data) - 4:
        raise _malformed(f"{count} lexemes do not fit")
    pos = 4
    lexemes = []
    for _ in range(count):
        lexeme, pos = _cstring(data, pos)
        (positions,) = _U2.unpack_from(data, pos)
        places = struct.unpack_from(f">{positions}H", data, pos + 2)
        pos += 2 + 2 * positions
        text = b",".join([b"%d%b" % (place & 0x3FFF, _WEIGHTS[place >> 14]) for place in places])
        lexemes.append(_quoted_lexeme(lexeme) + (b":" + text if text else b""))
    _check_end(data, pos)
    return b" ".join(lexemes)


_OPERAND, _OPERATOR = 1, 2
_NOT, _AND, _OR, _PHRASE = 1, 2, 3, 4
_PRIORITIES: Final = {_NOT: 4, _AND: 2, _OR: 1, _PHRASE: 3}


class _Query(NamedTuple):
    """A part of a tsquery; the operand's operator is 0."""

    text: deque[bytes]
    operator: int

    def as_part_of(self, operator: int, *, is_right: bool = False) -> deque[bytes]:
        """Put it into parentheses if they are needed there."""
        if self.operator and (
            _PRIORITIES[self.operator] < _PRIORITIES[operator] or (is_right and operator == self.operator == _PHRASE)
        ):
            self.text.appendleft(b"( ")
            self.text.append(b" )")
        return self.text


def _tsquery(data: bytes) -> bytes:
    """tsquerysend: the number of items; they come as operator, right operand, left operand."""
    (count,) = _I4.unpack_from(data)
    if not 0 <= count * 2 <= len(data) - 4:
        raise _malformed(f"{count} items do not fit")
    pos = 4
    items: list[tuple[int, bytes]] = []
    for _ in range(count):
        if data[pos] == _OPERAND:
            weight, is_prefix = data[pos + 1], data[pos + 2]
            lexeme, pos = _cstring(data, pos + 3)
            flags = b"*" * bool(is_prefix) + bytes(b"DCBA"[bit] for bit in (3, 2, 1, 0) if weight >> bit & 1)
            items.append((0, _quoted_lexeme(lexeme) + (b":" + flags if weight or is_prefix else b"")))
        elif data[pos] == _OPERATOR and data[pos + 1] in _PRIORITIES:
            operator = data[pos + 1]
            pos += 2
            text = {_NOT: b"!", _AND: b" & ", _OR: b" | ", _PHRASE: b" <-> "}[operator]
            if operator == _PHRASE:
                (distance,) = _U2.unpack_from(data, pos)
                pos += 2
                text = text if distance == 1 else b" <%d> " % distance
            items.append((operator, text))
        else:
            raise _malformed(f"no tsquery has such an item as at byte {pos}")
    _check_end(data, pos)
    # Backwards, the operands come before their operator, the left one first. No recursion: a query may be one long chain.
    stack: list[_Query] = []
    for operator, text in reversed(items):
        if not operator:
            stack.append(_Query(deque([text]), 0))
            continue
        if len(stack) < (1 if operator == _NOT else 2):
            raise _malformed("a tsquery's operator has no operand")
        right = stack.pop().as_part_of(operator, is_right=operator != _NOT)
        if operator == _NOT:
            right.appendleft(text)
            stack.append(_Query(right, operator))
            continue
        left = stack.pop().as_part_of(operator)
        # The shorter one is moved, so that a chain of either kind is not moved again and again.
        if len(left) < len(right):
            right.appendleft(text)
            right.extendleft(reversed(left))
            stack.append(_Query(right, operator))
        else:
            left.append(text)
            left.extend(right)
            stack.append(_Query(left, operator))
    if len(stack) > 1:
        raise _malformed("a tsquery has more than one root")
    return b"".join(stack[0].text) if stack else b""


# What is made of other types

_SPACE: Final = b" \t\n\v\f\r"
_NO_QUOTES: Final = bytes(range(256))


def _finder(special: bytes) -> Callable[[bytes], bool]:
    """Return a function that says whether a text has any of these characters; translate() deletes them in C."""

    def has_special(text: bytes) -> bool:
        return len(text.translate(_NO_QUOTES, special)) != len(text)

    return has_special


_record_needs_quotes: Final = _finder(b'"\\(),' + _SPACE)
_range_needs_quotes: Final = _finder(b'"\\()[],' + _SPACE)


def _doubled(text: bytes) -> bytes:
    return b'"%b"' % text.replace(b"\\", b"\\\\").replace(b'"', b'""')


def _record_field(text: bytes) -> bytes:
    return _doubled(text) if not text or _record_needs_quotes(text) else text


def _range_bound(text: bytes) -> bytes:
    return _doubled(text) if not text or _range_needs_quotes(text) else text


_ARRAY = struct.Struct(">iiI")  # number of dimensions, whether there are NULLs, type of the elements
_DIMENSION = struct.Struct(">ii")  # length, lower bound
_MAX_DIMENSIONS: Final = 6


def _array_elements(data: bytes, element_id: int, function: ToText) -> tuple[list[tuple[int, int]], list[bytes | None]]:
    """array_send: the dimensions; for each element its length (-1: NULL) and bytes."""
    dimensions, _, type_id = _ARRAY.unpack_from(data)
    if not 0 <= dimensions <= _MAX_DIMENSIONS or type_id != element_id:
        raise _malformed("no such array has so many dimensions or such elements")
    shape = [_DIMENSION.unpack_from(data, _ARRAY.size + 8 * dimension) for dimension in range(dimensions)]
    pos = _ARRAY.size + 8 * dimensions
    count = 1 if dimensions else 0
    for length, lower in shape:
        count *= length
        if length < 0 or 4 * count > len(data) - pos or lower + length >= 2**31:
            raise _malformed(f"an array's elements do not fit into {len(data)} bytes")
    room = _Parts()
    elements: list[bytes | None] = []
    for _ in range(count):
        value, pos = _nullable(data, pos)
        text = None if value is None else function(value)
        room.add(text or b"")
        elements.append(text)
    _check_end(data, pos)
    return shape, elements


def _array_of(element_id: int, function: ToText, delimiter: bytes) -> ToText:
    needs_quotes = _finder(b'"\\{}' + delimiter + _SPACE)

    def element_text(element: bytes | None) -> bytes:
        if element is None:
            return b"NULL"
        if element and not needs_quotes(element) and element.upper() != b"NULL":
            return element
        return b'"%b"' % element.replace(b"\\", b"\\\\").replace(b'"', b'\\"')

    def text(data: bytes) -> bytes:
        shape, elements = _array_elements(data, element_id, function)
        if not elements:
            return b"{}"
        texts = [element_text(element) for element in elements]
        for length, _ in reversed(shape):
            texts = [b"{%b}" % delimiter.join(texts[begin : begin + length]) for begin in range(0, len(texts), length)]
        if all(lower == 1 for _, lower in shape):
            return texts[0]
        return b"".join(b"[%d:%d]" % (lower, lower + length - 1) for length, lower in shape) + b"=" + texts[0]

    return text


def _vector_of(element_id: int, function: ToText) -> ToText:
    def text(data: bytes) -> bytes:
        shape, elements = _array_elements(data, element_id, function)
        if len(shape) > 1 or None in elements:
            raise _malformed("a vector has one dimension and no NULL")
        return b" ".join([element or b"" for element in elements])

    return text


_EMPTY, _LOWER_INCLUSIVE, _UPPER_INCLUSIVE, _LOWER_INFINITE, _UPPER_INFINITE = 1, 2, 4, 8, 16


def _range_of(function: ToText) -> ToText:
    def text(data: bytes) -> bytes:
        """range_send: flags; the bounds that there are, each with its length."""
        flags = data[0]
        if flags > 31:
            raise _malformed("no range has such flags")
        pos = 1
        bounds = []
        for infinite in (_LOWER_INFINITE, _UPPER_INFINITE):
            bound = b""
            if not flags & (infinite | _EMPTY):
                value, pos = _slice(data, pos + 4, *_I4.unpack_from(data, pos))
                bound = _range_bound(function(value))
            bounds.append(bound)
        _check_end(data, pos)
        if flags & _EMPTY:
            return b"empty"
        opening = b"[" if flags & _LOWER_INCLUSIVE else b"("
        return opening + b",".join(bounds) + (b"]" if flags & _UPPER_INCLUSIVE else b")")

    return text


def _multirange_of(range_text: ToText) -> ToText:
    def text(data: bytes) -> bytes:
        """multirange_send: the number of ranges; each with its length."""
        (count,) = _I4.unpack_from(data)
        if not 0 <= count * 5 <= len(data) - 4:
            raise _malformed(f"{count} ranges do not fit")
        pos = 4
        ranges = _Parts()
        for _ in range(count):
            value, pos = _slice(data, pos + 4, *_I4.unpack_from(data, pos))
            ranges.add(range_text(value))
        _check_end(data, pos)
        return b"{%b}" % b",".join(ranges.parts)

    return text


# pg_type.dat, by OID.

_SCALARS: Final[Mapping[int, ToText]] = {
    16: _bool,
    17: _bytea,
    18: _char,
    20: _number(_I8),  # int8
    21: _number(_I2),  # int2
    23: _number(_I4),  # int4
    **dict.fromkeys((26, 28, 29), _number(_U4)),  # oid, xid, cid
    # name, text, json, xml, pg_node_tree, unknown, bpchar, varchar, refcursor, cstring
    **dict.fromkeys((19, 25, 114, 142, 194, 705, 1042, 1043, 1790, 2275), _text),
    27: _tid,
    600: lambda data: _points(data, 1),  # point
    601: _lseg,
    602: _path,
    603: lambda data: _points(data, 2),  # box
    604: _polygon,
    628: _line,
    **dict.fromkeys((650, 869), _inet),  # cidr, inet
    700: _float4,
    701: _float8,
    718: _circle,
    774: _pairs_of_hex(8),  # macaddr8
    829: _pairs_of_hex(6),  # macaddr
    1082: _date,
    1083: _time,
    1114: _timestamp_with(""),
    1184: _timestamp_with("+00"),
    1186: _interval,
    1266: _timetz,
    **dict.fromkeys((1560, 1562), _bit),  # bit, varbit
    1700: _numeric,
    2950: _uuid,
    **dict.fromkeys((2970, 5038), _snapshot),  # txid_snapshot, pg_snapshot
    3220: _pg_lsn,
    3614: _tsvector,
    3615: _tsquery,
    **dict.fromkeys((3802, 4072), _versioned_text),  # jsonb, jsonpath
    5017: _bytea,  # pg_mcv_list
    5069: _number(_U8),  # xid8
}

_RANGES: Final = {3904: 23, 3906: 1700, 3908: 1114, 3910: 1184, 3912: 1082, 3926: 20}
_MULTIRANGES: Final = {4451: 3904, 4532: 3906, 4533: 3908, 4534: 3910, 4535: 3912, 4536: 3926}
# fmt: off
ARRAYS: Final[Mapping[int, int]] = {
    143: 142, 199: 114, 271: 5069, 629: 628, 651: 650, 719: 718, 775: 774, 791: 790, 1000: 16, 1001: 17, 1002: 18, 1003: 19,
    1005: 21, 1006: 22, 1007: 23, 1008: 24, 1009: 25, 1010: 27, 1011: 28, 1012: 29, 1013: 30, 1014: 1042, 1015: 1043, 1016: 20,
    1017: 600, 1018: 601, 1019: 602, 1021: 700, 1022: 701, 1027: 604, 1028: 26, 1034: 1033, 1040: 829, 1041: 869,
    1115: 1114, 1182: 1082, 1183: 1083, 1185: 1184, 1187: 1186, 1231: 1700, 1263: 2275, 1270: 1266, 1561: 1560, 1563: 1562,
    2201: 1790, 2207: 2202, 2208: 2203, 2209: 2204, 2210: 2205, 2211: 2206, 2287: 2249, 2949: 2970, 2951: 2950, 3221: 3220,
    3643: 3614, 3644: 3642, 3645: 3615, 3735: 3734, 3770: 3769, 3807: 3802, 3905: 3904, 3907: 3906, 3909: 3908, 3911: 3910,
    3913: 3912, 3927: 3926, 4073: 4072, 4090: 4089, 4097: 4096, 4192: 4191, 5039: 5038, 6150: 4451, 6151: 4532, 6152: 4533,
    6153: 4534, 6155: 4535, 6157: 4536,
}
# fmt: on
"""The elements' type of each built-in array type but box[], whose delimiter is not a comma."""

_SHAPES: Final[Mapping[int, Shape]] = {
    22: Shape(Kind.VECTOR, 21),  # int2vector
    30: Shape(Kind.VECTOR, 26),  # oidvector
    2249: Shape(Kind.COMPOSITE),  # record
    **{type_id: Shape(Kind.RANGE, subtype) for type_id, subtype in _RANGES.items()},
    **{type_id: Shape(Kind.MULTIRANGE, range_id) for type_id, range_id in _MULTIRANGES.items()},
    **{type_id: Shape(Kind.ARRAY, element) for type_id, element in ARRAYS.items()},
    1020: Shape(Kind.ARRAY, 603, b";"),  # a box has commas of its own
}

REG_TYPES: Final[Mapping[int, str]] = {
    24: "regproc",
    2202: "regprocedure",
    2203: "regoper",
    2204: "regoperator",
    2205: "regclass",
    2206: "regtype",
    3734: "regconfig",
    3769: "regdictionary",
    4089: "regnamespace",
    4096: "regrole",
    4191: "regcollation",
}
"""Names of the server's objects, which are numbers in binary form."""

_NO_TEXT: Final[Mapping[int, str]] = {
    790: "a value of type money has no currency and no decimal point in binary form: the server's lc_monetary says them",
    1033: "type aclitem has no binary form",
    3361: "the text of type pg_ndistinct depends on the server's version",
    3402: "the text of type pg_dependencies depends on the server's version",
    3642: "type gtsvector has no binary form",
    **{
        type_id: f"a value of type {name} is a number in binary form: the name is in the server's catalog"
        for type_id, name in REG_TYPES.items()
    },
}

_BUILT_IN: Final = Types()

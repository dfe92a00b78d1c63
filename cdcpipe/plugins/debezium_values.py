"""How Debezium's PostgreSQL connector writes values: from the text of a type to JSON.

`Values` knows the connector's options and finds the form of a type; what it does for each type was read off the connector
(``tests/data/debezium``), and where it differs on purpose is on the numbered list in docs/output-plugins.md.
"""

from __future__ import annotations

import base64
import hashlib
import re
import struct
import uuid
from binascii import b2a_base64
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from cdcpipe.plugins import row_compiler
from cdcpipe.plugins.catalog import NoCatalogError, TypeFacts
from cdcpipe.plugins.row_compiler import Style, escape, json_string
from cdcpipe.types.pg_type import type_id_of

if TYPE_CHECKING:
    from cdcpipe.plugins.catalog import Catalog

__all__ = ["Form", "ValueOptions", "Values"]

ToJson: TypeAlias = Callable[[bytes], bytes]

MILLIS, MICROS, NANOS, ISO = "millis", "micros", "nanos", "iso"


@dataclass(frozen=True, slots=True)
class ValueOptions:
    """The connector's options for values, by their names with underscores; the defaults are its own."""

    decimal_handling_mode: str = "precise"
    time_precision_mode: str = "adaptive"
    interval_handling_mode: str = "numeric"
    binary_handling_mode: str = "bytes"
    hstore_handling_mode: str = "json"
    include_unknown_datatypes: bool = False
    money_fraction_digits: int = 2
    unavailable_value_placeholder: str = "__debezium_unavailable_value"

    @property
    def placeholder(self) -> bytes:
        """What stands for a value that was not sent; ``hex:`` gives its bytes."""
        text = self.unavailable_value_placeholder
        return bytes.fromhex(text[4:]) if text.startswith("hex:") else text.encode()


@dataclass(frozen=True, slots=True)
class Form:
    """How the values of a type are written, and what is written for one that was not sent."""

    style: Style
    unavailable: bytes
    is_integer: bool = False


# Types of the connector's whose text is written as a string, by pg_type.typname.
_QUOTED: Final = frozenset(["uuid", "inet", "cidr", "macaddr", "macaddr8"])
_STRINGS: Final = _QUOTED | {
    *("char", "name", "text", "varchar", "bpchar", "json", "jsonb", "xml", "tsvector", "citext", "ltree", "isbn"),
    *("int4range", "int8range", "numrange", "tsrange", "tstzrange", "daterange"),
}
_INTEGERS: Final = frozenset(["int2", "int4", "int8", "oid"])
# Arrays that the connector has no form for, though it has one for their elements.
_UNKNOWN_ARRAYS: Final = frozenset(["_money", "_name", "_interval", "_varbit", "_xml", "_point", "_refcursor"])


class Values:
    """Finds the form of a type."""

    def __init__(self, options: ValueOptions, catalog: Catalog) -> None:
        self._options = options
        self._catalog = catalog
        placeholder = options.placeholder
        self._text_unavailable = json_string(placeholder.decode(errors="replace"))
        self._binary = _BINARY[options.binary_handling_mode]
        is_text = options.binary_handling_mode == "hex"
        self._binary_unavailable = self._text_unavailable if is_text else b'"%b"' % self._binary(placeholder)

    def binary(self, data: bytes) -> bytes:
        """Return the string for bytes."""
        return b'"%b"' % self._binary(data)

    def form(self, type_id: int, typmod: int) -> Form | None:
        """Return how values of the type are written; None if they are left out."""
        facts = self._type(type_id)
        if facts.base_type:
            return self.form(facts.base_type, facts.base_typmod)
        if facts.kind == "e":
            return self._form(row_compiler.STRING)
        if facts.element:
            return self._array(facts, typmod)
        form = self._scalar(facts.name, typmod)
        if form is None and self._options.include_unknown_datatypes:
            return Form(Style.call(self._binary, b'"'), self._binary_unavailable)
        return form

    def _form(self, style: Style) -> Form:
        return Form(style, self._text_unavailable)

    def _scalar(self, name: str, typmod: int) -> Form | None:
        options = self._options
        if name in _INTEGERS:
            return replace(self._form(row_compiler.VERBATIM), is_integer=True)
        if name in _STRINGS:
            return self._form(row_compiler.QUOTED if name in _QUOTED else row_compiler.STRING)
        match name:
            case "bool":
                return self._form(row_compiler.BOOLEAN)
            case "float4" | "float8":
                return self._form(_FLOAT)
            case "numeric":
                return self._form(_decimal(options.decimal_handling_mode, typmod))
            case "money":
                return self._form(Style.call(partial(_money, options.decimal_handling_mode, options.money_fraction_digits)))
            case "date":
                style = Style.call(_iso_date, b'"') if self._unit(0) == ISO else Style.call(_days)
                return replace(self._form(style), is_integer=self._unit(0) != ISO)
            case "time":
                is_adaptive = options.time_precision_mode == "adaptive_time_microseconds"
                return self._form(_TIMES[MICROS if is_adaptive else self._unit(typmod)])
            case "timestamp":
                return self._form(_TIMESTAMPS[self._unit(typmod)])
            case "timestamptz":
                return self._form(_zoned_timestamp(6 if typmod < 0 else typmod))
            case "timetz":
                return self._form(Style.call(_zoned_time, b'"'))
            case "interval":
                return self._form(Style.call(_duration) if options.interval_handling_mode == "string" else Style.call(_interval_us))
            case "bit" | "varbit":
                is_boolean = typmod == 1 or (name == "bit" and typmod < 0)
                return self._form(Style.call(_bit) if is_boolean else Style.call(_bits, b'"'))
            case "bytea":
                return Form(Style.call(lambda value: self._binary(_unhex(value)), b'"'), self._binary_unavailable)
            case "point":
                return self._form(Style.call(_point))
            case "hstore":
                return self._hstore()
            case "int2vector" | "oidvector":
                return self._form(Style.call(lambda value: b"[%b]" % b",".join(value.split(b" ") if value else [])))
        return None

    def _hstore(self) -> Form:
        pair = {self._text_unavailable: self._text_unavailable}
        if self._options.hstore_handling_mode == "map":
            return Form(Style.call(lambda value: _object(_hstore_pairs(value))), _object(pair))
        return Form(Style.call(lambda value: escape(_object(_hstore_pairs(value))), b'"'), b'"%b"' % escape(_object(pair)))

    def _array(self, facts: TypeFacts, typmod: int) -> Form | None:
        element_facts = self._type(facts.element)
        element = self.form(facts.element, typmod)
        if facts.name in _UNKNOWN_ARRAYS or element_facts.kind == "d":
            if not self._options.include_unknown_datatypes:
                return None
            element = Form(Style.call(self._binary, b'"'), self._binary_unavailable)
        if element is None:
            return None
        unavailable = b"[%b]" % element.unavailable
        if element.is_integer:
            signed = struct.unpack(f"{len(self._options.placeholder)}b", self._options.placeholder)
            unavailable = b"[%b]" % b",".join(b"%d" % byte for byte in signed)
        elif element_facts.name == "uuid":
            unavailable = b'["%b"]' % _uuid_of(self._options.placeholder)
        delimiter = b";" if element_facts.name == "box" else b","
        return Form(Style.call(partial(_array, element.style.render, delimiter)), unavailable)

    def _unit(self, typmod: int) -> str:
        match self._options.time_precision_mode:
            case "adaptive" | "adaptive_time_microseconds":
                return MILLIS if 0 <= typmod <= 3 else MICROS
            case "connect":
                return MILLIS
            case "isostring":
                return ISO
            case "nanoseconds":
                return NANOS
        return MICROS

    def _type(self, type_id: int) -> TypeFacts:
        try:
            facts = self._catalog.type(type_id)
        except NoCatalogError:
            return self._type_as_described(type_id)
        # One that has been dropped since: its text is all that can be known of a value.
        return facts if facts.kind else TypeFacts("text", "b")

    def _type_as_described(self, type_id: int) -> TypeFacts:
        """Return what the stream says, if that is enough."""
        described = self._catalog.described(type_id)
        # The stream has a domain under the name of its base type.
        if described is not None and described.namespace == "pg_catalog":
            return TypeFacts(described.name, "d", base_type=type_id_of(described.name) or 0)
        if described is not None and described.name in {*_STRINGS, "hstore"}:
            return TypeFacts(described.name, "b")
        known = f"{described.namespace}.{described.name}" if described else str(type_id)
        raise NoCatalogError(f"what kind of type {known} is")


# Numbers


def _whole_float(value: bytes) -> bytes:
    return value + b".0" if value[-1:] < b":" else b'"%b"' % value


# With a point or an exponent it is a floating point number as it stands; NaN and the infinities have neither.
_FLOAT: Final = Style("FLOAT", b"", "({v} if b'.' in {v} or b'e' in {v} else whole({v}))", names={"whole": _whole_float})


def _integer(digits: bytes) -> int:
    """Read an integer of any length: Python's int() refuses more than some thousand digits."""
    if len(digits) <= 4000:
        return int(digits)
    sign = -1 if digits.startswith(b"-") else 1
    digits = digits.lstrip(b"-")
    middle = len(digits) // 2
    power: int = 10 ** (len(digits) - middle)
    return sign * (_integer(digits[:middle]) * power + _integer(digits[middle:]))


def _unscaled(number: int) -> bytes:
    """Return base64 of the shortest big-endian two's complement."""
    length = (number if number >= 0 else ~number).bit_length() // 8 + 1
    return b2a_base64(number.to_bytes(length, "big", signed=True), newline=False)


def _decimal(mode: str, typmod: int) -> Style:
    if mode == "string":
        return Style.call(lambda value: _SPECIAL.get(value, value), b'"')
    if mode == "double":
        return _FLOAT
    if typmod < 4:
        return Style.call(_variable_decimal)
    # Eleven bits, and signed: the connector takes -2 for 2046.
    scale = typmod - 4 & 0x7FF
    return _SCALED_DECIMAL if scale < 1024 else Style.call(partial(_scaled_decimal, 10**scale), b'"')


_SPECIAL: Final = {b"NaN": b"NAN", b"Infinity": b"POSITIVE_INFINITY", b"-Infinity": b"NEGATIVE_INFINITY"}


def _scaled_decimal(factor: int, value: bytes) -> bytes:
    # The server writes all digits of the scale.
    return value if value == b"NaN" else _unscaled(_integer(value.replace(b".", b"", 1)) * factor)


# What _scaled_decimal() does with a factor of 1: there are many of them, and few are long.
_SCALED_DECIMAL: Final = Style(
    "SCALED_DECIMAL",
    b'"',
    "(base64((n := int({v}.replace(b'.', b'', 1))).to_bytes((n if n >= 0 else ~n).bit_length() // 8 + 1, 'big', signed=True),"
    " newline=False) if len({v}) < 4000 and {v} != b'NaN' else scaled_decimal({v}))",
    names={"base64": b2a_base64, "int": int, "scaled_decimal": partial(_scaled_decimal, 1)},
)


def _variable_decimal(value: bytes) -> bytes:
    if value in _SPECIAL:
        return b'"%b"' % value
    whole, _, fraction = value.partition(b".")
    fraction = fraction.rstrip(b"0")
    return b'{"scale":%d,"value":"%b"}' % (len(fraction), _unscaled(_integer(whole + fraction)))


_MONEY: Final = re.compile(rb"(-?)[^\d,.-]?([\d,]+)(?:\.(\d+))?")


def _money(mode: str, digits: int, value: bytes) -> bytes:
    match = _MONEY.fullmatch(value)
    if match is None:
        # Of another locale: what is a fraction can't be told.
        return b'"%b"' % escape(value)
    sign, whole, fraction = match[1], match[2].replace(b",", b""), match[3] or b""
    if mode == "string":
        return b'"%b%b%b"' % (sign, whole, b"." + fraction if fraction else b"")
    if mode == "double":
        return b"%b%b.%b" % (sign, whole, fraction or b"0")
    number = int(sign + whole + fraction) * 10 ** max(0, digits - len(fraction))
    if len(fraction) > digits:
        # As BigDecimal.setScale(HALF_UP) rounds: away from zero.
        unit = 10 ** (len(fraction) - digits)
        number = (abs(number) * 2 + unit) // (2 * unit) * (-1 if number < 0 else 1)
    return b'"%b"' % _unscaled(number)


# Dates and times, in a session with DateStyle ISO, TimeZone UTC and IntervalStyle postgres

_DAY_US: Final = 86_400_000_000
_SECOND_US: Final = 1_000_000
_MONTH_US: Final = 2_629_800_000_000
"""A twelfth of 365.25 days."""

_DATE: Final = re.compile(rb"(\d{4,})-(\d\d)-(\d\d)")
_TIME: Final = re.compile(rb"(\d\d):(\d\d):(\d\d)(?:\.(\d{1,6}))?")
_TIMESTAMP: Final = re.compile(rb"([\d-]+) ([\d:.]+)(\+00)?( BC)?")
_TIME_ZONED: Final = re.compile(rb"([\d:.]+)([+-])(\d\d)(?::(\d\d))?(?::(\d\d))?")


def _match(pattern: re.Pattern[bytes], value: bytes) -> re.Match[bytes]:
    match = pattern.fullmatch(value)
    if match is None:
        msg = "the text does not have the form of its type"
        raise ValueError(msg)
    return match


def _days_since_1970(year: int, month: int, day: int) -> int:
    """Count days in the proleptic Gregorian calendar; years start in March, so that the leap day is the last."""
    year -= month <= 2
    era, year_of_era = divmod(year, 400)
    day_of_year = (153 * ((month + 9) % 12) + 2) // 5 + day - 1
    return era * 146_097 + year_of_era * 365 + year_of_era // 4 - year_of_era // 100 + day_of_year - 719_468


class _Dates(dict[bytes, int]):
    """Microseconds of days since 1970 by their text; tables have few different ones."""

    def __missing__(self, text: bytes) -> int:
        year, month, day = _match(_DATE, text).groups()
        if len(self) > 100_000:
            self.clear()
        micros = self[text] = _days_since_1970(int(year), int(month), int(day)) * _DAY_US
        return micros


class _Seconds(dict[bytes, int]):
    """Microseconds of whole seconds by their text."""

    def __missing__(self, text: bytes) -> int:
        hours, minutes, seconds, fraction = _match(_TIME, text).groups()
        if fraction is not None:
            raise ValueError
        micros = self[text] = (int(hours) * 3600 + int(minutes) * 60 + int(seconds)) * _SECOND_US
        return micros


_dates: Final = _Dates()
_seconds: Final = _Seconds()

# What becomes of the connector's java.time values for infinity.
_INFINITE_DAYS: Final = {b"infinity": b"-2147472692", b"-infinity": b"-2147472691"}
_INFINITE_ISO_DATES: Final = {b"infinity": b"-5877611-06-21Z", b"-infinity": b"-5877611-06-22Z"}
_INFINITE_MS: Final = {b"infinity": 9_223_372_036_825_200, b"-infinity": -9_223_372_036_832_400}
_INFINITE_NS: Final = {b"infinity": (1 << 63) - 1, b"-infinity": -(1 << 63)}
_INFINITE_ISO_TIMESTAMPS: Final = {b"infinity": b"+294247-01-10T04:00:25.2Z", b"-infinity": b"-290308-12-21T19:59:27.6Z"}


def _days(value: bytes) -> bytes:
    if value in _INFINITE_DAYS:
        return _INFINITE_DAYS[value]
    year, month, day = _date(value)
    return b"%d" % _days_since_1970(year, month, day)


def _date(value: bytes) -> tuple[int, int, int]:
    year, month, day = _match(_DATE, value.removesuffix(b" BC")).groups()
    return (1 - int(year) if value.endswith(b" BC") else int(year)), int(month), int(day)


def _iso_date(value: bytes) -> bytes:
    if value in _INFINITE_ISO_DATES:
        return _INFINITE_ISO_DATES[value]
    return _iso(value) + b"Z"


def _iso(value: bytes) -> bytes:
    """Return the date as ISO 8601 has it: year 0 is 1 BC, years beyond 9999 have a sign."""
    year, month, day = _date(value)
    sign = b"-" if year < 0 else b"+" if year > 9999 else b""
    return b"%b%04d-%02d-%02d" % (sign, abs(year), month, day)


def _time_us(value: bytes) -> int:
    micros = _seconds[value[:8]]
    if len(value) > 8:
        if value[8:9] != b"." or len(value) > 15:
            raise ValueError
        micros += int(value[9:].ljust(6, b"0"))
    return micros


def _timestamp_us(value: bytes) -> int:
    if value[10:11] == b" " and value[-1:] < b":":
        return _dates[value[:10]] + _time_us(value[11:])
    date, time, _, era = _match(_TIMESTAMP, value).groups()
    return _days_since_1970(*_date(date + (era or b""))) * _DAY_US + _time_us(time)


def _timestamp(value: bytes) -> bytes:
    return b"%d" % (_INFINITE_MS[value] * 1000 if value in _INFINITE_MS else _timestamp_us(value))


def _timestamp_ms(value: bytes) -> bytes:
    return b"%d" % (_INFINITE_MS[value] if value in _INFINITE_MS else _timestamp_us(value) // 1000)


def _timestamp_ns(value: bytes) -> bytes:
    return b"%d" % (_INFINITE_NS[value] if value in _INFINITE_NS else _timestamp_us(value) * 1000)


def _iso_timestamp(value: bytes) -> bytes:
    if value in _INFINITE_ISO_TIMESTAMPS:
        return _INFINITE_ISO_TIMESTAMPS[value]
    date, time, _, era = _match(_TIMESTAMP, value).groups()
    return _iso(date + (era or b"")) + b"T" + time + b"Z"


_TIMESTAMPS: Final = {
    MILLIS: Style.call(_timestamp_ms),
    MICROS: Style.call(_timestamp),
    NANOS: Style.call(_timestamp_ns),
    ISO: Style.call(_iso_timestamp, b'"'),
}
_TIMES: Final = {
    MILLIS: Style.call(lambda value: b"%d" % (_time_us(value) // 1000)),
    MICROS: Style.call(lambda value: b"%d" % _time_us(value)),
    NANOS: Style.call(lambda value: b"%d" % (_time_us(value) * 1000)),
    ISO: Style.call(lambda value: (b"00:00:00" if value == b"24:00:00" else value) + b"Z", b'"'),
}


def _zoned_timestamp(digits: int) -> Style:
    """Write as many digits of the second as the column has, always."""
    length = 22 + (digits + 1 if digits else 0)
    is_usual = f"len({{v}}) == {length} and {{v}}[10] == 32 and {{v}}[-3:] == b'+00'"
    style = Style.call(partial(_zoned, digits), b'"')
    usual = "{v}.replace(b' ', b'T')[:-3] + b'Z'"
    return Style("ZONED_TIMESTAMP", b'"', f"({usual} if {is_usual} else {style.code})", names=style.names)


def _zoned(digits: int, value: bytes) -> bytes:
    if value in (b"infinity", b"-infinity"):
        return value
    date, time, zone, era = _match(_TIMESTAMP, value).groups()
    if zone is None:
        msg = "the session's time zone is not UTC"
        raise ValueError(msg)
    seconds, _, fraction = time.partition(b".")
    text = _iso(date + (era or b"")) + b"T" + seconds
    return text + (b"." + fraction.ljust(digits, b"0") if digits else b"") + b"Z"


def _zoned_time(value: bytes) -> bytes:
    time, sign, hours, minutes, seconds = _match(_TIME_ZONED, value).groups()
    offset = (int(hours) * 3600 + int(minutes or 0) * 60 + int(seconds or 0)) * (1 if sign == b"+" else -1)
    whole, _, fraction = time.partition(b".")
    in_utc = (_seconds[whole] // _SECOND_US - offset) % 86400
    text = b"%02d:%02d:%02d" % (in_utc // 3600, in_utc // 60 % 60, in_utc % 60)
    return text + (b"." + fraction if fraction else b"") + b"Z"


_INTERVAL: Final = re.compile(
    rb"(?:(-?\+?\d+) years? ?)?(?:(-?\+?\d+) mons? ?)?(?:(-?\+?\d+) days? ?)?(?:([-+]?)(\d+):(\d\d):(\d\d(?:\.\d{1,6})?))?"
)


class _Interval(NamedTuple):
    years: int
    months: int
    days: int
    hours: int
    minutes: int
    seconds: bytes
    """With its sign, and without zeros at the end of its fraction."""


def _interval(value: bytes) -> _Interval:
    years, months, days, sign, hours, minutes, seconds = _match(_INTERVAL, value).groups(b"0")
    minus = sign == b"-"
    if b"." in seconds:
        seconds = seconds.rstrip(b"0").rstrip(b".")
    seconds = seconds.lstrip(b"0") or b"0"
    seconds = b"0" + seconds if seconds.startswith(b".") else seconds
    factor = -1 if minus else 1
    return _Interval(
        int(years),
        int(months),
        int(days),
        factor * int(hours),
        factor * int(minutes),
        b"-" + seconds if minus and seconds != b"0" else seconds,
    )


def _interval_us(value: bytes) -> bytes:
    if value in (b"infinity", b"-infinity"):
        return b'"%b"' % value
    interval = _interval(value)
    whole, _, fraction = interval.seconds.lstrip(b"-").partition(b".")
    micros = int(whole) * _SECOND_US + int(fraction.ljust(6, b"0"))
    if interval.seconds.startswith(b"-"):
        micros = -micros
    micros += (interval.hours * 60 + interval.minutes) * 60 * _SECOND_US + interval.days * _DAY_US
    return b"%d" % (micros + (interval.years * 12 + interval.months) * _MONTH_US)


def _duration(value: bytes) -> bytes:
    if value in (b"infinity", b"-infinity"):
        return b'"%b"' % value
    return b'"P%dY%dM%dDT%dH%dM%bS"' % _interval(value)


# Bytes, bits and the rest

_BINARY: Final[dict[str, ToJson]] = {
    "bytes": base64.b64encode,
    "base64": base64.b64encode,
    "base64-url-safe": base64.urlsafe_b64encode,
    "hex": lambda data: data.hex().encode(),
}


def _unhex(value: bytes) -> bytes:
    if not value.startswith(b"\\x"):
        msg = "bytea_output is not hex"
        raise ValueError(msg)
    return bytes.fromhex(value[2:].decode())


def _bit(value: bytes) -> bytes:
    # Neither is an empty varbit, nor a value of a column "bit", which quoted has no length.
    return {b"0": b"false", b"1": b"true"}.get(value) or b'"%b"' % _bits(value)


def _bits(value: bytes) -> bytes:
    """Return base64 of the bits in little-endian order, up to the last that is set."""
    number = int(value, 2) if value else 0
    return base64.b64encode(number.to_bytes((number.bit_length() + 7) // 8, "little"))


_POINT: Final = re.compile(rb"\(([^,()]+),([^,()]+)\)")


def _point(value: bytes) -> bytes:
    x, y = _match(_POINT, value).groups()
    # OGC: byte order, kind, coordinates.
    wkb = base64.b64encode(struct.pack("<BIdd", 1, 1, float(x), float(y)))
    return b'{"x":%b,"y":%b,"wkb":"%b","srid":null}' % (_FLOAT.render(x), _FLOAT.render(y), wkb)


_ARRAY_TOKEN: Final = re.compile(rb'([{},;])|"((?:[^"\\]|\\.)*)"|([^{},;"]+)', re.DOTALL)


def _array(element: ToJson, delimiter: bytes, value: bytes) -> bytes:
    """Return the JSON array, nested where the array has more dimensions; its lower bounds are left out."""
    if value.startswith(b"["):
        value = value[value.index(b"=") + 1 :]
    parts = []
    pos = depth = 0
    while pos < len(value):
        token = _ARRAY_TOKEN.match(value, pos)
        if token is None:
            raise ValueError
        pos = token.end()
        sign, in_quotes, plain = token.groups()
        if sign is not None and sign in (b"{", b"}", delimiter):
            parts.append(_JSON_SIGNS[sign])
            depth += {b"{": 1, b"}": -1}.get(sign, 0)
        elif in_quotes is not None:
            parts.append(element(re.sub(rb"\\(.)", rb"\1", in_quotes, flags=re.DOTALL)))
        else:
            text = plain if plain is not None else sign
            parts.append(b"null" if text == b"NULL" else element(text))
    if depth or not value.startswith(b"{"):
        raise ValueError
    return b"".join(parts)


_JSON_SIGNS: Final = {b"{": b"[", b"}": b"]", b",": b",", b";": b","}

_HSTORE_PAIR: Final = re.compile(rb'"((?:[^"\\]|\\.)*)"=>(?:NULL|"((?:[^"\\]|\\.)*)")(?:, |$)', re.DOTALL)


def _hstore_pairs(value: bytes) -> dict[bytes, bytes]:
    pairs = {}
    pos = 0
    while pos < len(value):
        match = _HSTORE_PAIR.match(value, pos)
        if match is None:
            raise ValueError
        pos = match.end()
        key, text = (part and re.sub(rb"\\(.)", rb"\1", part, flags=re.DOTALL) for part in match.groups())
        pairs[b'"%b"' % escape(key)] = b"null" if text is None else b'"%b"' % escape(text)
    return pairs


def _object(pairs: dict[bytes, bytes]) -> bytes:
    return b"{%b}" % b",".join(b"%b:%b" % pair for pair in pairs.items())


def _uuid_of(name: bytes) -> bytes:
    """Return what java.util.UUID.nameUUIDFromBytes() makes of the name."""
    return str(uuid.UUID(bytes=hashlib.md5(name, usedforsecurity=False).digest(), version=3)).encode()

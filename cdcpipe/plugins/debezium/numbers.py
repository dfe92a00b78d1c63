"""Turns the text of numbers into JSON, as Debezium's connector writes them."""

from __future__ import annotations

import re
from binascii import b2a_base64
from functools import partial
from typing import Final

from cdcpipe.plugins.row_compiler import Style, escape

__all__ = ["FLOAT", "decimal", "money"]


def _whole_float(value: bytes) -> bytes:
    return value + b".0" if value[-1:] < b":" else b'"%b"' % value


# A text with a point or an exponent is a JSON number already. NaN and the infinities have neither.
FLOAT: Final = Style("FLOAT", b"", "({v} if b'.' in {v} or b'e' in {v} else whole({v}))", names={"whole": _whole_float})


def _integer(digits: bytes) -> int:
    """Read an integer of any length. Python's int() refuses more than some thousand digits."""
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


def decimal(mode: str, typmod: int) -> Style:
    """Return how a numeric is written in this decimal.handling.mode."""
    if mode == "string":
        return Style.call(lambda value: _SPECIAL.get(value, value), b'"')
    if mode == "double":
        return FLOAT
    if typmod < 4:
        return Style.call(_variable_decimal)
    # The scale is a signed number of eleven bits. The connector reads it without sign: -2 becomes 2046.
    scale = typmod - 4 & 0x7FF
    return _SCALED_DECIMAL if scale < 1024 else Style.call(partial(_scaled_decimal, 10**scale), b'"')


_SPECIAL: Final = {b"NaN": b"NAN", b"Infinity": b"POSITIVE_INFINITY", b"-Infinity": b"NEGATIVE_INFINITY"}


def _scaled_decimal(factor: int, value: bytes) -> bytes:
    # The server always writes all digits of the scale.
    return value if value == b"NaN" else _unscaled(_integer(value.replace(b".", b"", 1)) * factor)


# The same as _scaled_decimal() with a factor of 1, inlined, because there are many such values, and few are long.
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


def money(mode: str, digits: int, value: bytes) -> bytes:
    """Return an amount in this decimal.handling.mode."""
    match = _MONEY.fullmatch(value)
    if match is None:
        # The text is of another locale, in which the fraction can't be found.
        return b'"%b"' % escape(value)
    sign, whole, fraction = match[1], match[2].replace(b",", b""), match[3] or b""
    if mode == "string":
        return b'"%b%b%b"' % (sign, whole, b"." + fraction if fraction else b"")
    if mode == "double":
        return b"%b%b.%b" % (sign, whole, fraction or b"0")
    number = int(sign + whole + fraction) * 10 ** max(0, digits - len(fraction))
    if len(fraction) > digits:
        # Round half away from zero, like BigDecimal.setScale(HALF_UP).
        unit = 10 ** (len(fraction) - digits)
        number = (abs(number) * 2 + unit) // (2 * unit) * (-1 if number < 0 else 1)
    return b'"%b"' % _unscaled(number)

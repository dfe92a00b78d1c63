"""Numbers and booleans: turns their binary form into text."""

from __future__ import annotations

import struct
from fractions import Fraction
from math import inf, nextafter, ulp
from typing import Final

from cdcpipe.types.binary.reading import F4, F8, I2, I4, I8, U4, U8, ToText, check_end, malformed

__all__ = [
    "bool_text",
    "float4_text",
    "float8_text",
    "float_text",
    "int2_text",
    "int4_text",
    "int8_text",
    "numeric_text",
    "oid_text",
    "xid8_text",
]


def _integer(layout: struct.Struct) -> ToText:
    def text(data: bytes) -> bytes:
        return b"%d" % layout.unpack(data)[0]

    return text


int2_text, int4_text, int8_text = _integer(I2), _integer(I4), _integer(I8)
oid_text, xid8_text = _integer(U4), _integer(U8)


def bool_text(data: bytes) -> bytes:
    """boolsend: one byte."""
    if data == b"\1":
        return b"t"
    if data == b"\0":
        return b"f"
    raise malformed("it is neither true nor false")


_NUMERIC = struct.Struct(">HhHH")  # number of digits, weight of the first one, sign, display scale
_NUMERIC_SIGNS: Final = {0x0000: "", 0x4000: "-"}
_NUMERIC_SPECIAL: Final = {0xC000: b"NaN", 0xD000: b"Infinity", 0xF000: b"-Infinity"}
_MAX_SCALE: Final = 0x3FFF


def numeric_text(data: bytes) -> bytes:
    """numeric_send: digits of base 10000; the first one counts 10000 ** weight."""
    count, weight, sign, scale = _NUMERIC.unpack_from(data)
    digits = struct.unpack_from(f">{count}H", data, 8)
    check_end(data, 8 + 2 * count)
    if sign in _NUMERIC_SPECIAL:
        return _NUMERIC_SPECIAL[sign]
    if sign not in _NUMERIC_SIGNS or scale > _MAX_SCALE or (digits and max(digits) > 9999):
        raise malformed("no numeric has such a sign, scale or digit")
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


def float8_text(data: bytes) -> bytes:
    """float8send: IEEE 754."""
    return float_text(F8.unpack(data)[0])


def float_text(number: float) -> bytes:
    """Return the shortest decimal number that reads back as this one.

    Unlike Python, the server never writes a decimal halfway between two numbers, because it does not assume that readers round half
    to even. Such a decimal can have at most 17 digits only from 2 ** 53 on and below 1e41.
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


def float4_text(data: bytes) -> bytes:
    """float4send: IEEE 754."""
    (number,) = F4.unpack(data)
    if number == 0 or number - number != 0:  # NaN and the infinities, too
        return float_text(number)
    magnitude = abs(number)
    (bits,) = U4.unpack(F4.pack(magnitude))
    below = F4.unpack(U4.pack(bits - 1))[0]
    above = 2 * magnitude - below if bits == _LARGEST_FLOAT4 else F4.unpack(U4.pack(bits + 1))[0]
    low, high = (below + magnitude) / 2, (magnitude + above) / 2
    if magnitude >= _MIN_NORMAL_FLOAT4 and bits & 0x7FFFFF:
        # Any decimal of six digits survives. So if six digits are enough, they are the shortest, after trailing zeros are removed.
        for precision in (5, 6, 7, 8):
            text = f"{magnitude:.{precision}e}"
            value = float(text)
            if value in (low, high):
                break  # the decimal may be rounded to the boundary; in all other cases the comparison is exact
            if low < value < high:
                mantissa, _, power = text.partition("e")
                return _decimal(number < 0, mantissa.replace(".", ""), int(power), 6)
    digits, exponent = _shortest(Fraction(magnitude), Fraction(low), Fraction(high))
    return _decimal(number < 0, digits, exponent, 6)


_LARGEST_FLOAT4: Final = 0x7F7FFFFF


def _shortest(number: Fraction, low: Fraction, high: Fraction) -> tuple[str, int]:
    """Return the digits of the shortest decimal between ``low`` and ``high`` (the nearest of several), and its exponent."""
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
    """Write digits, the first of which counts 10 ** exponent. The exponent is written unless it is from -4 to below the limit."""
    digits = digits.rstrip("0") or "0"
    if -4 <= exponent < 0:
        text = "0." + "0" * (-exponent - 1) + digits
    elif 0 <= exponent < limit:
        whole, fraction = digits[: exponent + 1].ljust(exponent + 1, "0"), digits[exponent + 1 :]
        text = f"{whole}.{fraction}" if fraction else whole
    else:
        text = digits[0] + ("." + digits[1:] if len(digits) > 1 else "") + f"e{exponent:+03d}"
    return (f"-{text}" if is_negative else text).encode()

"""Dates, times and intervals: turns their binary form into text."""

from __future__ import annotations

import struct
from datetime import date
from typing import Final

from cdcpipe.types.binary.reading import I4, I8, ToText, malformed

__all__ = ["date_text", "interval_text", "time_text", "timestamp_text", "timestamptz_text", "timetz_text"]


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


def date_text(data: bytes) -> bytes:
    """date_send: days since 2000-01-01."""
    (days,) = I4.unpack(data)
    if days in _INFINITIES:
        return _INFINITIES[days]
    if not _FIRST_DAY <= days < _END_DAY:
        raise malformed("no date is so far away")
    text, is_bc = _day_text(days)
    return f"{text} BC".encode() if is_bc else text.encode()


def _day_text(days: int) -> tuple[str, bool]:
    """Return the date ``days`` days after 2000-01-01, and whether its year is BC."""
    ordinal = days + _2000_ORDINAL
    if 0 < ordinal <= _MAX_ORDINAL:
        return date.fromordinal(ordinal).isoformat(), False
    # Count years from March, in eras of 400 years, which all have the same length.
    era, day = divmod(ordinal + 305, 146_097)
    year = (day - day // 1460 + day // 36_524 - day // 146_096) // 365
    day -= 365 * year + year // 4 - year // 100
    month = (5 * day + 2) // 153
    day -= (153 * month + 2) // 5 - 1
    year += 400 * era + (month >= 10)
    month += 3 if month < 10 else -9
    return f"{year if year > 0 else 1 - year:04}-{month:02}-{day:02}", year <= 0


def _time_of_day(time_us: int) -> str:
    seconds, fraction = divmod(time_us, 1_000_000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    text = f"{hours:02}:{minutes:02}:{seconds:02}"
    return f"{text}.{fraction:06}".rstrip("0") if fraction else text


def time_text(data: bytes) -> bytes:
    """time_send: microseconds."""
    (time_us,) = I8.unpack(data)
    _check_time(time_us)
    return _time_of_day(time_us).encode()


def _check_time(time_us: int) -> None:
    if not 0 <= time_us <= _DAY_US:  # 24:00 is valid
        raise malformed("no time of day is so far away")


def timetz_text(data: bytes) -> bytes:
    """timetz_send: microseconds, seconds west of Greenwich."""
    time_us, west_s = _TIMETZ.unpack(data)
    _check_time(time_us)
    if abs(west_s) >= _ZONE_LIMIT_S:
        raise malformed("no time zone is so far away")
    minutes, seconds = divmod(abs(west_s), 60)
    hours, minutes = divmod(minutes, 60)
    zone = f"{hours:02}" + (f":{minutes:02}" if minutes or seconds else "") + (f":{seconds:02}" if seconds else "")
    return f"{_time_of_day(time_us)}{'-' if west_s > 0 else '+'}{zone}".encode()


def _timestamp_with(zone: str) -> ToText:
    def text(data: bytes) -> bytes:
        (time_us,) = I8.unpack(data)
        if time_us in _INFINITIES_US:
            return _INFINITIES_US[time_us]
        if not _FIRST_US <= time_us < _END_US:
            raise malformed("no timestamp is so far away")
        days, rest_us = divmod(time_us, _DAY_US)
        day, is_bc = _day_text(days)
        return f"{day} {_time_of_day(rest_us)}{zone}{' BC' if is_bc else ''}".encode()

    return text


timestamp_text, timestamptz_text = _timestamp_with(""), _timestamp_with("+00")


def interval_text(data: bytes) -> bytes:
    """interval_send: microseconds, days, months."""
    parts = _INTERVAL.unpack(data)
    if parts in _INTERVAL_INFINITIES:
        return _INTERVAL_INFINITIES[parts]
    time_us, days, months = parts
    years, months = divmod(abs(months), 12) if months >= 0 else (-number for number in divmod(-months, 12))
    texts = []
    was_negative = False
    for number, unit in ((years, "year"), (months, "mon"), (days, "day")):
        if number:
            # After a negative part, PostgreSQL writes a plus before a positive one.
            plus = "+" if was_negative and number > 0 else ""
            texts.append(f"{plus}{number} {unit}{'' if number == 1 else 's'}")
            was_negative = number < 0
    if time_us or not texts:
        sign = "-" if time_us < 0 else "+" if was_negative else ""
        texts.append(sign + _time_of_day(abs(time_us)))
    return " ".join(texts).encode()

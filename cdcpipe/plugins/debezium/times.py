"""Turns the text of dates, times and intervals into JSON, as Debezium's connector writes them.

The text must come from a session with DateStyle ISO, TimeZone UTC and IntervalStyle postgres.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Final, NamedTuple

from cdcpipe.plugins.row_compiler import Style
from cdcpipe.plugins.text import match_value

__all__ = [
    "ISO",
    "MICROS",
    "MILLIS",
    "NANOS",
    "TIMES",
    "TIMESTAMPS",
    "days",
    "duration",
    "interval_us",
    "iso_date",
    "zoned_time",
    "zoned_timestamp",
]

MILLIS, MICROS, NANOS, ISO = "millis", "micros", "nanos", "iso"

_DAY_US: Final = 86_400_000_000
_SECOND_US: Final = 1_000_000
_MONTH_US: Final = 2_629_800_000_000
"""A twelfth of 365.25 days."""

_DATE: Final = re.compile(rb"(\d{4,})-(\d\d)-(\d\d)")
_TIME: Final = re.compile(rb"(\d\d):(\d\d):(\d\d)(?:\.(\d{1,6}))?")
_TIMESTAMP: Final = re.compile(rb"([\d-]+) ([\d:.]+)(\+00)?( BC)?")
_TIME_ZONED: Final = re.compile(rb"([\d:.]+)([+-])(\d\d)(?::(\d\d))?(?::(\d\d))?")


def _days_since_1970(year: int, month: int, day: int) -> int:
    """Count days in the proleptic Gregorian calendar. Years start in March, so that the leap day is the last day."""
    year -= month <= 2
    era, year_of_era = divmod(year, 400)
    day_of_year = (153 * ((month + 9) % 12) + 2) // 5 + day - 1
    return era * 146_097 + year_of_era * 365 + year_of_era // 4 - year_of_era // 100 + day_of_year - 719_468


class _Dates(dict[bytes, int]):
    """Microseconds of days since 1970, by their text. They are kept, because tables have few different days."""

    def __missing__(self, text: bytes) -> int:
        year, month, day = match_value(_DATE, text).groups()
        if len(self) > 100_000:
            self.clear()
        micros = self[text] = _days_since_1970(int(year), int(month), int(day)) * _DAY_US
        return micros


class _Seconds(dict[bytes, int]):
    """Microseconds of whole seconds by their text."""

    def __missing__(self, text: bytes) -> int:
        hours, minutes, seconds, fraction = match_value(_TIME, text).groups()
        if fraction is not None:
            raise ValueError
        micros = self[text] = (int(hours) * 3600 + int(minutes) * 60 + int(seconds)) * _SECOND_US
        return micros


_dates: Final = _Dates()
_seconds: Final = _Seconds()

# The numbers that the connector gets from its java.time values for infinity.
_INFINITE_DAYS: Final = {b"infinity": b"-2147472692", b"-infinity": b"-2147472691"}
_INFINITE_ISO_DATES: Final = {b"infinity": b"-5877611-06-21Z", b"-infinity": b"-5877611-06-22Z"}
_INFINITE_MS: Final = {b"infinity": 9_223_372_036_825_200, b"-infinity": -9_223_372_036_832_400}
_INFINITE_NS: Final = {b"infinity": (1 << 63) - 1, b"-infinity": -(1 << 63)}
_INFINITE_ISO_TIMESTAMPS: Final = {b"infinity": b"+294247-01-10T04:00:25.2Z", b"-infinity": b"-290308-12-21T19:59:27.6Z"}


def days(value: bytes) -> bytes:
    """Return the days since 1970-01-01."""
    if value in _INFINITE_DAYS:
        return _INFINITE_DAYS[value]
    year, month, day = _date(value)
    return b"%d" % _days_since_1970(year, month, day)


def _date(value: bytes) -> tuple[int, int, int]:
    year, month, day = match_value(_DATE, value.removesuffix(b" BC")).groups()
    return (1 - int(year) if value.endswith(b" BC") else int(year)), int(month), int(day)


def iso_date(value: bytes) -> bytes:
    """Return a date in ISO 8601."""
    if value in _INFINITE_ISO_DATES:
        return _INFINITE_ISO_DATES[value]
    return _iso(value) + b"Z"


def _iso(value: bytes) -> bytes:
    """Return the date in ISO 8601: year 0 is 1 BC, and years beyond 9999 have a sign."""
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
    date, time, _, era = match_value(_TIMESTAMP, value).groups()
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
    date, time, _, era = match_value(_TIMESTAMP, value).groups()
    return _iso(date + (era or b"")) + b"T" + time + b"Z"


TIMESTAMPS: Final = {
    MILLIS: Style.call(_timestamp_ms),
    MICROS: Style.call(_timestamp),
    NANOS: Style.call(_timestamp_ns),
    ISO: Style.call(_iso_timestamp, b'"'),
}
TIMES: Final = {
    MILLIS: Style.call(lambda value: b"%d" % (_time_us(value) // 1000)),
    MICROS: Style.call(lambda value: b"%d" % _time_us(value)),
    NANOS: Style.call(lambda value: b"%d" % (_time_us(value) * 1000)),
    ISO: Style.call(lambda value: (b"00:00:00" if value == b"24:00:00" else value) + b"Z", b'"'),
}


def zoned_timestamp(digits: int) -> Style:
    """Return the style that always writes as many digits of the second as the column has."""
    length = 22 + (digits + 1 if digits else 0)
    is_usual = f"len({{v}}) == {length} and {{v}}[10] == 32 and {{v}}[-3:] == b'+00'"
    style = Style.call(partial(_zoned, digits), b'"')
    usual = "{v}.replace(b' ', b'T')[:-3] + b'Z'"
    return Style("ZONED_TIMESTAMP", b'"', f"({usual} if {is_usual} else {style.code})", names=style.names)


def _zoned(digits: int, value: bytes) -> bytes:
    if value in (b"infinity", b"-infinity"):
        return value
    date, time, zone, era = match_value(_TIMESTAMP, value).groups()
    if zone is None:
        msg = "the session's time zone is not UTC"
        raise ValueError(msg)
    seconds, _, fraction = time.partition(b".")
    text = _iso(date + (era or b"")) + b"T" + seconds
    return text + (b"." + fraction.ljust(digits, b"0") if digits else b"") + b"Z"


def zoned_time(value: bytes) -> bytes:
    """Return a time of day in UTC."""
    time, sign, hours, minutes, seconds = match_value(_TIME_ZONED, value).groups()
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
    """With its sign, and without trailing zeros of its fraction."""


def _interval(value: bytes) -> _Interval:
    years, months, days, sign, hours, minutes, seconds = match_value(_INTERVAL, value).groups(b"0")
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


def interval_us(value: bytes) -> bytes:
    """Return an interval in microseconds; a month is a twelfth of 365.25 days."""
    if value in (b"infinity", b"-infinity"):
        return b'"%b"' % value
    interval = _interval(value)
    whole, _, fraction = interval.seconds.lstrip(b"-").partition(b".")
    micros = int(whole) * _SECOND_US + int(fraction.ljust(6, b"0"))
    if interval.seconds.startswith(b"-"):
        micros = -micros
    micros += (interval.hours * 60 + interval.minutes) * 60 * _SECOND_US + interval.days * _DAY_US
    return b"%d" % (micros + (interval.years * 12 + interval.months) * _MONTH_US)


def duration(value: bytes) -> bytes:
    """Return an interval in ISO 8601."""
    if value in (b"infinity", b"-infinity"):
        return b'"%b"' % value
    return b'"P%dY%dM%dDT%dH%dM%bS"' % _interval(value)

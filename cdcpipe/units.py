"""Parses and formats sizes, durations, counts and lists of names for people, for both command lines: ``64MiB``, ``30 days``.

The units are those of coreutils and systemd. A single letter is a power of 1024: ``64M`` is ``64MiB``, and ``64MB`` is less. Case
does not matter. For any other text the parsers raise a ValueError that lists the units.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = [
    "FEW",
    "count_from",
    "counted",
    "few",
    "format_duration",
    "format_size",
    "has_size_unit",
    "listed",
    "parse_duration",
    "parse_seconds",
    "parse_size",
    "seconds_from",
]

FEW: Final = 20
"""As many names as `few` shows."""

_LISTED: Final = 5

_QUANTITY: Final = re.compile(r"([0-9]{1,15}) ?([a-z]*)", re.ASCII | re.IGNORECASE)

_SIZES: Final = {"": 1, "b": 1} | {
    unit: base**power
    for power, letter in enumerate("kmgt", 1)
    for unit, base in ((letter, 1024), (f"{letter}ib", 1024), (f"{letter}b", 1000))
}
_DURATIONS: Final = {
    unit: seconds
    for units, seconds in (
        (("s", "sec", "second", "seconds"), 1),
        (("min", "minute", "minutes"), 60),
        (("h", "hour", "hours"), 3600),
        (("d", "day", "days"), 86400),
        (("w", "week", "weeks"), 604800),
    )
    for unit in units
}


def parse_size(text: str) -> int:
    """Return the number of bytes that the text means."""
    size = _parse(text, _SIZES)
    if size is None:
        msg = f"{text!r} is not a size: a number of bytes, or a number with K, M, G, T (KiB, MiB, …; KB, MB, … are powers of 1000)"
        raise ValueError(msg)
    return size


def parse_duration(text: str) -> float:
    """Return the number of seconds that the text means. It must have a unit."""
    seconds = _parse(text, _DURATIONS)
    if seconds is None:
        msg = f"{text!r} is not a duration: a number with s, min, h, d or w (also second, minutes, days, …)"
        raise ValueError(msg)
    return float(seconds)


def parse_seconds(text: str) -> float:
    """Return the number of seconds that the text means. It may have a fraction, and must have no unit."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        msg = f"{text!r} is not a number of seconds (without a unit: 90, or 0.5)"
        raise ValueError(msg)
    return seconds


def seconds_from(least: float, most: float = math.inf) -> Callable[[str], float]:
    """Return a parser for a number of seconds, as `parse_seconds` reads it, from ``least`` to ``most``."""

    def parse(text: str) -> float:
        seconds = parse_seconds(text)
        if not least <= seconds <= most:
            msg = f"{text!r} is less than {least:g} seconds" if seconds < least else f"{text!r} is more than {most:g} seconds"
            raise ValueError(msg)
        return seconds

    return parse


def count_from(least: int) -> Callable[[str], int]:
    """Return a parser for a whole number that is at least ``least``."""

    def parse(text: str) -> int:
        if not re.fullmatch("[0-9]{1,15}", text) or int(text) < least:
            msg = f"{text!r} is not a whole number of at least {least}"
            raise ValueError(msg)
        return int(text)

    return parse


def has_size_unit(text: str) -> bool:
    """Tell whether the text is a size with a unit: ``10GiB``, not ``10``."""
    return _parse(text, _SIZES) is not None and not text.strip().isdigit()


def format_size(size: float) -> str:
    """Return a number of bytes as text for people: 1.5 MiB."""
    unit = "B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def format_duration(seconds: float) -> str:
    """Return a number of seconds as text for people: 45 s, 3.5 h."""
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f}".removesuffix(".0") + f" {unit}"
    return f"{seconds:.1f}".removesuffix(".0") + " s"


def counted(number: int, thing: str) -> str:
    """Return a number of things as text for people: 1 row, 12,000 rows."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def listed(names: Sequence[str]) -> str:
    """Return names as text for people: the first five, and how many more."""
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def few(names: Sequence[str]) -> str:
    """Return names that the reader needs to act: all, or the first 20 and the number of all."""
    shown = ", ".join(names[:FEW])
    return shown if len(names) <= FEW else f"{shown}, … ({len(names)} in all)"


def _parse(text: str, units: Mapping[str, int]) -> int | None:
    match = _QUANTITY.fullmatch(text.strip())
    factor = units.get(match[2].lower()) if match else None
    return None if match is None or factor is None else int(match[1]) * factor

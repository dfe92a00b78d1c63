"""Parses the names of servers on a command line: a system identifier, alone or with a timeline. Raises ValueError for other texts.

    parse_system("7711155989881817539/2")     # the same text, without leading zeros
    parse_system_id("7711155989881817539")

`cdcpipe prepare` prints both numbers.
"""

from __future__ import annotations

__all__ = ["parse_system", "parse_system_id"]


def parse_system(text: str) -> str:
    """Read SYSTEM_ID/TIMELINE, as ``system_id`` and ``timeline`` of `cdcpipe prepare`."""
    system_id, _, timeline = text.partition("/")
    parts = _number(system_id, 64), _number(timeline, 32)
    if not all(parts):
        msg = f"{text!r} is not a system identifier and a timeline (like 7711155989881817539/1, from cdcpipe prepare)"
        raise ValueError(msg)
    return "/".join(map(str, parts))


def parse_system_id(text: str) -> str:
    """Read a system identifier, as ``system_id`` of `cdcpipe prepare`."""
    number = _number(text, 64)
    if not number:
        msg = f"{text!r} is not a system identifier (a number like 7711155989881817539, from cdcpipe prepare)"
        raise ValueError(msg)
    return str(number)


def _number(text: str, bits: int) -> int:
    """Return the number that the digits are; 0 for any other text, and for a number that is too large."""
    if not (text.isascii() and text.isdigit() and len(text) <= 20):
        return 0
    number = int(text)
    return number if number < 1 << bits else 0

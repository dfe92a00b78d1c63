"""Parses the values of options: sizes, durations, directories, places. Parsers raise ValueError for a wrong value."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from cdcpipe.units import has_size_unit, parse_duration, parse_size
from spark_sink.files.local import check_readable, local_directory
from spark_sink.files.places import place
from spark_sink.snapshot.schedule import parse_hours
from spark_sink.staging.readers import Retention
from spark_sink.status.check import Limit

__all__ = [
    "DIRECTORY",
    "PLACE",
    "Directory",
    "hour_or_off",
    "limit",
    "minute_or_off",
    "parse_amount",
    "parse_heal",
    "parse_retention",
]


class Directory(click.Path):
    """A directory of a local or mounted file system."""

    def __init__(self) -> None:
        super().__init__(file_okay=False, readable=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Refuse a URL, and any value that click refuses."""
        local_directory(value, _named(param))
        return super().convert(value, param, ctx)


class _ReadableDirectory(Directory):
    """A directory that this user can read, if it exists."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Refuse what `check_readable` refuses, too."""
        found: Path = super().convert(value, param, ctx)
        check_readable(found, _named(param))
        return found


def _named(param: click.Parameter | None) -> str:
    return "this" if param is None else param.opts[-1]


def parse_amount(text: str) -> int:
    """Return a number of bytes. Raises ValueError for 0."""
    size = parse_size(text)
    if size == 0:
        raise ValueError("it has to be more than 0")
    return size


def _duration_or_off(least_s: float) -> Callable[[str], float | None]:
    """Return a parser for a duration of at least ``least_s``, or the word off, for which it returns None."""

    def parse(text: str) -> float | None:
        if text == "off":
            return None
        try:
            seconds = parse_duration(text)
        except ValueError as ex:
            msg = f"{ex}; or it can be off"
            raise ValueError(msg) from ex
        if seconds < least_s:
            msg = f"{text!r} is less than {least_s / 60:.0f}min; or it can be off"
            raise ValueError(msg)
        return seconds

    return parse


def parse_retention(text: str) -> Retention:
    """Parse a duration or a size. A size must have a unit, because a number alone does not say which of the two it is."""
    if has_size_unit(text):
        return Retention(size=parse_amount(text))
    try:
        return Retention(seconds=parse_duration(text))
    except ValueError as ex:
        msg = f"{ex}; nor is it a size with a unit, like 10GiB"
        raise ValueError(msg) from ex


def parse_heal(text: str) -> str:
    """Return the value of ``--heal`` as it is. Raises ValueError unless it is one."""
    parse_hours(text)
    return text


def limit(parse: Callable[[str], float]) -> Callable[[str], Limit]:
    """Return a parser for a limit: ``CRITICAL`` or ``WARNING,CRITICAL``. Each value is parsed by ``parse``."""

    def parse_limit(text: str) -> Limit:
        first, comma, second = text.partition(",")
        if not comma:
            return Limit(parse(first))
        found = Limit(parse(second), parse(first))
        if found.warning is not None and found.warning > found.critical:
            msg = f"{text!r} warns beyond a greater value than the one that is critical: it is WARNING,CRITICAL"
            raise ValueError(msg)
        return found

    return parse_limit


class _Place(click.ParamType[Path]):
    """A directory, or a place in an object store."""

    name = "DIR|URL"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        if isinstance(value, str) and "://" not in value:
            return Path(DIRECTORY.convert(value, param, ctx))
        return place(value, _named(param))


minute_or_off, hour_or_off = _duration_or_off(60.0), _duration_or_off(3600.0)

DIRECTORY = _ReadableDirectory()
PLACE = _Place()

"""The arguments of ``cdcpipe`` for a connection: made from the values of the connection options, and without a password in them."""

from __future__ import annotations

import re
from itertools import zip_longest
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["connection_arguments", "refuse_passwords"]

_OPTION: Final = re.compile(r"(?P<database>-d|--dbname(=|$))(?P<name>.*)|(-m|--param(=|$))(?P<parameter>.*)", re.DOTALL)
_SUSPICIOUS: Final = re.compile(r"pass|secret|scram_|:.*@|:[^/]*[^/\d,]|%", re.IGNORECASE | re.DOTALL)
"""What is in each value that has a password, and in few others."""


def connection_arguments(
    *, dbname: str | None, host: str | None, port: str | None, username: str | None, params: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the command-line arguments of ``cdcpipe`` for a connection."""
    arguments: list[str] = []
    for option, value in (("-d", dbname), ("-h", host), ("-p", port), ("-U", username)):
        if value is not None:
            arguments += [option, value]
    for param in params:
        arguments += ["-m", param]
    return tuple(arguments)


def refuse_passwords(arguments: Sequence[str]) -> None:
    """Raise InvalidArgumentsError if arguments of ``cdcpipe`` have a password. Call this before they are a process's command line.

    The values may be from a file that one user reads, from a variable, or from a program: until then they are a secret. ``cdcpipe``
    refuses a password, too, but ``ps`` shows its command line to every user of the machine until it ends.
    """
    for key, value in _parameters(arguments):
        if _SUSPICIOUS.search(f"{key}={value}"):
            from cdcpipe.libpq.parameters import connection_parameters  # here, because psycopg takes a while

            connection_parameters([(key, value)])


def _parameters(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield name and value of each parameter of libpq that can have a password. An option's value may be an argument of its own."""
    for argument, following in zip_longest(arguments, arguments[1:], fillvalue=""):
        if (found := _OPTION.fullmatch(argument)) is None:
            continue
        if (name := found["name"]) is not None:
            yield "dbname", name or following
        else:
            key, _, value = (found["parameter"] or following).partition("=")
            yield key, value

"""The options that the commands share, as decorators, and how their values become a configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar, cast

import click

from cdcpipe.config import SlotConfig
from cdcpipe.lsn import LSN
from cdcpipe.pgoutput.transactions import SPILL_THRESHOLD
from cdcpipe.replication.connection import connection_parameters
from cdcpipe.units import parse_seconds, parse_size

__all__ = [
    "CONTEXT_SETTINGS",
    "LSN_TYPE",
    "SECONDS",
    "SIZE",
    "connection_options",
    "connection_parameters_of",
    "output_plugin",
    "parse_options",
    "record_options",
    "slot_config",
    "slot_options",
]

CONTEXT_SETTINGS = {"help_option_names": ["-?", "--help"], "max_content_width": 120}
"""``-h`` is the host, as in all of PostgreSQL's programs."""

T = TypeVar("T")
Command: TypeAlias = Callable[..., Any]
Decorator: TypeAlias = Callable[[Command], Command]


class Parsed(click.ParamType[T]):
    """What a function of the core makes of a text; its ValueError says what is wrong."""

    def __init__(self, name: str, parse: Callable[[str], T]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> T:
        if not isinstance(value, str):
            return cast("T", value)  # a default
        try:
            return self._parse(value)
        except ValueError as ex:
            self.fail(str(ex), param, ctx)


SECONDS = Parsed("SECS", parse_seconds)
SIZE = Parsed("SIZE", parse_size)
LSN_TYPE = Parsed("LSN", LSN.parse)


def _together(*options: Decorator) -> Decorator:
    """Return one decorator for several, in the order of ``--help``."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


connection_options = _together(
    click.option("-d", "--dbname", metavar="DBNAME", help="Database to connect to; a conninfo string or a URI as well."),
    click.option("-h", "--host", metavar="HOSTNAME", help="Database server's host or socket directory."),
    click.option("-p", "--port", metavar="PORT", help="Database server's port."),
    click.option("-U", "--username", metavar="USERNAME", help="Database user name."),
    click.option(
        "-m",
        "--param",
        "params",
        multiple=True,
        metavar="KEY=VALUE",
        help="Any other connection parameter of libpq (connect_timeout, sslmode, …). Passwords come from PGPASSWORD,"
        " a password file or a service file. Repeatable.",
    ),
)
"""libpq's: ``-d -h -p -U -m``."""

slot_options = _together(
    click.option("-S", "--slot", metavar="NAME", help="Name of the logical replication slot (required)."),
    click.option(
        "-c", "--create-slot", is_flag=True, help="Create the slot if it does not exist, and before it publications that do not."
    ),
    click.option(
        "-P",
        "--plugin",
        metavar="NAME",
        help="The server's output plugin for a new slot.  [default: pgoutput; wal2json with -j or -J and no --publication]",
    ),
    click.option(
        "--create-timeout",
        type=SECONDS,
        default=60.0,
        show_default=True,
        help="How long the server may wait for running transactions before it makes the slot (0: no limit).",
    ),
    click.option(
        "--publication",
        "publications",
        multiple=True,
        metavar="NAME",
        help="Publication to stream on a pgoutput slot, any name as it is. Repeatable.",
    ),
    click.option(
        "--table",
        "tables",
        multiple=True,
        metavar="SCHEMA.NAME",
        help="With -c: a publication that does not exist is created for these tables (left out: for all). Repeatable.",
    ),
)
"""What names the slot, and what is made with it."""

record_options = _together(
    click.option(
        "-o",
        "--option",
        "plugin_options",
        multiple=True,
        metavar="KEY[=VALUE]",
        help="Option for the output plugin, as it is. Repeatable.",
    ),
    click.option(
        "--output",
        metavar="NAME",
        help="Output plugin that renders a pgoutput slot's records here: wal2json, test_decoding, debezium, json,"
        " or one installed.",
    ),
    click.option("-j", "--wal2json1", is_flag=True, help="Records of wal2json, format version 1: a JSON object a transaction."),
    click.option(
        "-J",
        "--wal2json2",
        is_flag=True,
        help="Records of wal2json, format version 2, with headers: a JSON object a change.",
    ),
    click.option("-H", "--write-header", is_flag=True, help="Write a header line, w LSN LENGTH, before each record."),
    click.option("-N", "--write-nl", is_flag=True, help="Write a newline after each record."),
    click.option(
        "--whole-transactions",
        is_flag=True,
        help="pgoutput: only committed transactions, whole and in commit order, however the server sends them.",
    ),
    click.option(
        "--spill-threshold",
        type=SIZE,
        default=SPILL_THRESHOLD,
        metavar="SIZE",
        help="With --whole-transactions: hold so much in memory, the rest in files in $TMPDIR.  [default: 64MiB]",
    ),
)
"""Which records are written, and how: the same of a stream and of a capture."""


def parse_options(texts: Sequence[str]) -> dict[str, str | None]:
    """Return the options given with ``-o KEY[=VALUE]``; the last one of a name counts."""
    return {key: value if equals else None for key, equals, value in (text.partition("=") for text in texts)}


def output_plugin(output: str | None, *, wal2json1: bool, wal2json2: bool) -> tuple[str | None, dict[str, str | None]]:
    """Return the output plugin that ``--output``, ``-j`` and ``-J`` name, and the options that come with it."""
    if wal2json1 and wal2json2:
        raise click.UsageError("-j and -J exclude each other")
    if (wal2json1 or wal2json2) and output not in (None, "wal2json"):
        raise click.UsageError(f"-j and -J are --output wal2json, not {output}")
    if wal2json1:
        return "wal2json", {"format-version": "1", "include-lsn": "true"}
    if wal2json2:
        return "wal2json", {"format-version": "2"}
    return output, {}


def connection_parameters_of(
    *, dbname: str | None, host: str | None, port: str | None, username: str | None, params: Sequence[str]
) -> dict[str, str]:
    """Return libpq's parameters from the options of ``connection_options``; empty if none is given."""
    given = [("dbname", dbname), ("host", host), ("port", port), ("user", username), *map(_parse_parameter, params)]
    return connection_parameters((key, value) for key, value in given if value is not None)


def _parse_parameter(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        # It may be a connection string, with a password in it.
        raise click.UsageError("--param takes KEY=VALUE; what was given is something else (it is not shown)")
    return key, value


def _parse_table(text: str) -> tuple[str, str]:
    schema, dot, name = text.partition(".")
    if not schema or not dot or not name:
        msg = f"--table takes SCHEMA.NAME, not {text!r}"
        raise click.UsageError(msg)
    return schema, name


def slot_config(
    *,
    slot: str | None,
    create_slot: bool,
    plugin: str | None,
    create_timeout: float,
    publications: Sequence[str],
    tables: Sequence[str],
    **connection: Any,
) -> SlotConfig:
    """Build the configuration from ``slot_options`` and ``connection_options``."""
    if not slot:
        raise click.UsageError("--slot NAME has to be given")
    return SlotConfig(
        parameters=connection_parameters_of(**connection),
        slot=slot,
        create=create_slot,
        plugin=plugin or "pgoutput",
        publications=tuple(publications),
        tables=tuple(_parse_table(table) for table in tables),
        create_timeout_s=create_timeout or None,
    )

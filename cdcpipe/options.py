"""The options that both command lines share, as data: names, help, defaults. Imports no library for command lines.

Each command line passes them to its library in the same way: ``cloup.option(*option.names, **option.settings)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from cdcpipe import logs
from cdcpipe.exposition import parse_address
from cdcpipe.publishing import KEYLESS, REFUSE, NewPublication
from cdcpipe.sql import check_name

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

__all__ = [
    "CONNECTION",
    "CONTEXT_SETTINGS",
    "CREATE_SLOT",
    "FAILOVER",
    "LOG_FORMAT",
    "METRICS",
    "NEW_PUBLICATION",
    "PUBLICATION",
    "SLOT",
    "Option",
    "OptionGroup",
    "check_names",
    "take_new_publication",
    "text_mistake",
    "usage_hint",
]


@dataclass(frozen=True, slots=True)
class Option:
    """One option: its names, and its settings, which are arguments of ``click.option``."""

    names: tuple[str, ...]
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class OptionGroup:
    """Options that ``--help`` shows together."""

    title: str
    help: str
    options: tuple[Option, ...]


def text_mistake(error: BaseException, arguments: Sequence[str]) -> tuple[str, str] | None:
    """Return message and hint if an error comes from an argument whose bytes are not UTF-8; None for any other error.

    Only paths may have such bytes. The argument is not shown, because it may be a connection string.
    """
    if not isinstance(error, UnicodeEncodeError):
        return None
    wrong = [number for number, given in enumerate(arguments, 1) if any("\udc80" <= each <= "\udcff" for each in given)]
    hint = "names, options and parameters are sent as UTF-8: use a UTF-8 terminal and locale (LC_ALL=C.UTF-8)"
    return (f"argument {wrong[0]} is not UTF-8", hint) if wrong else None


def usage_hint(arguments: Iterable[str], names: Collection[str], otherwise: str | None = "--help shows the options") -> str | None:
    """Return the hint for ``arguments`` that are wrong. ``names`` are the options of the command.

    It names a long option that was written with one hyphen: ``-publication shop`` is ``-p ublication``, and the word ``shop``. If
    there is none, it is ``otherwise``.
    """
    for argument in arguments:
        name = f"-{argument.partition('=')[0]}"
        if name.startswith("--") and name in names:
            return f"{name} has two hyphens"
    return otherwise


def check_names(_context: object, _parameter: object, value: Any) -> Any:
    """Return the value of an option that names something on the server. It is a callback of ``click.option``.

    Raises InvalidArgumentsError for a name that can't be one of the server's.
    """
    for name in value if isinstance(value, tuple) else (value,):
        if name is not None:
            check_name(name)
    return value


def _option(*names: str, **settings: Any) -> Option:
    return Option(names, settings)


CONTEXT_SETTINGS: Final = {"help_option_names": ["-?", "--help"], "max_content_width": 120}
"""The names of the help option: ``-h`` is not among them, because it means the host, as in all of PostgreSQL's programs."""

CONNECTION: Final = OptionGroup(
    "Connection",
    "As for psql, PGHOST and the like are the defaults. Passwords come from PGPASSWORD, a password file or a service file only.",
    (
        _option("-d", "--dbname", metavar="DBNAME", help="Connect to this database, or as this conninfo string or URI says."),
        _option("-h", "--host", metavar="HOSTNAME", help="Connect to this host, or to the socket in this directory."),
        _option("-p", "--port", metavar="PORT", help="Connect to this port."),
        _option("-U", "--username", metavar="USERNAME", help="Connect as this user."),
        _option(
            "-m",
            "--param",
            "params",
            multiple=True,
            metavar="KEY=VALUE",
            help="Set any other connection parameter of libpq (connect_timeout, sslmode, …); repeatable.",
        ),
    ),
)

SLOT: Final = _option("-S", "--slot", callback=check_names, metavar="NAME", help="Use this logical replication slot.")

PUBLICATION: Final = _option(
    "--publication",
    "publications",
    callback=check_names,
    multiple=True,
    metavar="NAME",
    help="Stream what this publication has, its name exactly as it is; repeatable.",
)

CREATE_SLOT: Final = _option(
    "-c", "--create-slot", is_flag=True, help="If the slot does not exist, make the publications that are missing, then the slot."
)

NEW_PUBLICATION: Final = (
    _option(
        "--table",
        "tables",
        multiple=True,
        metavar="SCHEMA.NAME",
        help="With -c, let a new publication have this table (with *: all that match) in place of all tables; repeatable.",
    ),
    _option(
        "--exclude-table",
        "exclude_tables",
        multiple=True,
        metavar="SCHEMA.NAME",
        help="With -c, leave this table (with *: all that match) out of a new publication; repeatable.",
    ),
    _option(
        "--keyless",
        metavar="|".join(KEYLESS),
        default=REFUSE,
        show_default=True,
        help="With -c, if the server would refuse UPDATE and DELETE on tables without a key: create no publication; or publish"
        " their INSERT and TRUNCATE alone, in a second publication NAME_keyless; or set REPLICA IDENTITY FULL on them.",
    ),
    _option(
        "--via-root",
        is_flag=True,
        help="With -c, publish a partitioned table as one table, not as its partitions.",
    ),
    _option(
        "--exclude-column",
        "exclude_columns",
        multiple=True,
        metavar="SCHEMA.TABLE.COLUMN",
        help="With -c, leave this column (with *: all that match) out of what the table publishes, so that it never leaves the"
        " server (PostgreSQL 15 or newer); repeatable.",
    ),
)
"""The options that say what a publication publishes that -c has to create. `take_new_publication` takes their values."""


def take_new_publication(options: dict[str, Any]) -> NewPublication:
    """Take the values of the options `NEW_PUBLICATION` out of ``options``. Raises InvalidArgumentsError."""
    names = ("tables", "exclude_tables", "keyless", "via_root", "exclude_columns")
    return NewPublication.of(**{name: options.pop(name) for name in names})


FAILOVER: Final = _option(
    "--failover",
    metavar="yes|no",
    show_default="yes for a new pgoutput slot on a primary of version 17 or newer",
    help="Let the primary's standbys keep a copy of the slot, so that it survives a failover; yes also changes an existing slot.",
)
"""Its value is yes or no: each command line adds the type."""

METRICS: Final = _option(
    "--metrics",
    type=parse_address,
    metavar="[HOST:]PORT",
    show_default="none; the host is 127.0.0.1",
    help="Serve metrics in the OpenMetrics format, for Prometheus, at http://HOST:PORT/metrics.",
)

LOG_FORMAT: Final = _option(
    "--log-format",
    metavar="|".join(logs.FORMATS),
    default=logs.FORMATS[0],
    show_default=True,
    is_eager=True,
    expose_value=False,
    callback=lambda _context, _parameter, name: logs.use(name),
    help="Write each line on stderr as text, or as a JSON object with time, level, part and message.",
)
"""Each command line adds the type. It is read before the other options: it counts for mistakes in these, too."""

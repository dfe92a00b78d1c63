"""The options that both command lines share, as data: names, help, defaults. Imports no library for command lines.

Each command line passes them to its library in the same way: ``cloup.option(*option.names, **option.settings)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["CONNECTION", "CREATED_TABLE", "CREATE_SLOT", "FAILOVER", "PUBLICATION", "SLOT", "Option", "OptionGroup"]


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


def _option(*names: str, **settings: Any) -> Option:
    return Option(names, settings)


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

SLOT: Final = _option("-S", "--slot", metavar="NAME", help="Use this logical replication slot.")

PUBLICATION: Final = _option(
    "--publication",
    "publications",
    multiple=True,
    metavar="NAME",
    help="Stream what this publication has, its name exactly as it is; repeatable.",
)

CREATE_SLOT: Final = _option(
    "-c", "--create-slot", is_flag=True, help="Make the publications and the slot, in this order, if they do not exist."
)

CREATED_TABLE: Final = _option(
    "--table",
    "tables",
    multiple=True,
    metavar="SCHEMA.NAME",
    help="With -c, publish this table, and not all tables, in a publication that does not exist; repeatable.",
)
"""The options that say what a new publication publishes."""

FAILOVER: Final = _option(
    "--failover",
    metavar="yes|no",
    show_default="yes for a new pgoutput slot on a primary of version 17 or newer",
    help="Let the primary's standbys keep a copy of the slot, so that it survives a failover; yes also changes an existing slot.",
)
"""Its value is yes or no: each command line adds the type."""

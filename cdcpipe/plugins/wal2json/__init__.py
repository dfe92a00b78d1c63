"""wal2json 2.5's output from a pgoutput slot: the same bytes for the same WAL, format versions 1 and 2.

What can't be the same, and why, is on the numbered list in docs/output-plugins.md. Types are as the server prints them
with bytea_output=hex; so the plugin's records need a session with that setting, DateStyle ISO and TimeZone UTC.

Version 1 writes a transaction as one record (or, with ``write-in-chunks``, as one for each change), version 2 one for
each change and, with ``include-transaction``, for begin and commit. Version 2 with ``include-lsn`` puts the end of the
transaction into the record for its begin, which pgoutput tells only at the commit: the records of a transaction are held
until then, beyond a limit in a temporary file. Version 1 holds the transaction in memory, as the server does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdcpipe.plugins.wal2json.options import parse_format_version
from cdcpipe.plugins.wal2json.version1 import Wal2Json1
from cdcpipe.plugins.wal2json.version2 import Wal2Json2

if TYPE_CHECKING:
    from cdcpipe.plugins.base import Options, OutputPlugin, Query

__all__ = ["Wal2Json1", "Wal2Json2", "load"]


def load(options: Options, query: Query) -> OutputPlugin:
    """Return the plugin of the format version that the options ask for; 1 if they don't, as on the server."""
    version = parse_format_version(options)
    return (Wal2Json1 if version == 1 else Wal2Json2)(options, query)

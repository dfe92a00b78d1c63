"""wal2json 2.5's output from a pgoutput slot: the same bytes for the same WAL, format versions 1 and 2.

docs/output-plugins.md has a numbered list of all differences. To compare records, the server's plugin needs a session with
bytea_output=hex, DateStyle ISO and TimeZone UTC.

Version 1 writes one record for each transaction (with ``write-in-chunks``: for each change). Version 2 writes one record for each
change and, with ``include-transaction``, for begin and commit. Version 2 with ``include-lsn`` has the end of the transaction in the
record for its begin. pgoutput sends this only at the commit. So the records of a transaction are held until then, beyond a limit in
a temporary file. Without ``include-transaction`` each record of version 2 waits for the next one, because the header of a
transaction's last record has the end of the transaction. Version 1 holds the transaction in memory, as the server does.
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
    """Return the plugin for the format version in the options; by default 1, as on the server."""
    version = parse_format_version(options)
    return (Wal2Json1 if version == 1 else Wal2Json2)(options, query)

"""``cdcpipe checksum``: the server's half of ``cdcpipe-spark verify``, for any program that compares a table with a copy.

A request is a line of JSON on stdin. The answer is a line of JSON on stdout. The command ends at the end of stdin. All tables are
read in one snapshot, which lasts until the next ``begin``. cdcpipe/subcommands/checksum.py defines the checksums.

    {"begin": [[SCHEMA, NAME], ...], "publications": [NAME, ...], "trim_numbers": false}
    {"system_id", "database", "xmax", "running", "wal_lsn", "tables": [
        {"schema", "name", "relation_id", "columns": [[NAME, TYPE_ID, TYPE_MODIFIER], ...], "row_estimate", "published_as"}, ...],
     "missing": [[SCHEMA, NAME], ...]}                                  # the tables of the request that do not exist

    {"buckets": [SCHEMA, NAME], "key": [COLUMN, ...]}
    {BUCKET: [ROWS, SUM], ...}

    {"rows": [SCHEMA, NAME], "key": [COLUMN, ...], "buckets": [BUCKET, ...]}
    [[KEY'S TEXT, ..., MD5], ...]

    {"slot": NAME, "publications": [NAME, ...], "upto": LSN}
    {"active", "confirmed_flush_lsn", "pending"}
"""

from __future__ import annotations

import json
import sys
from typing import Any

import cloup

from cdcpipe.errors import CommandError
from cdcpipe.libpq.connection import Connection
from cdcpipe.lsn import LSN
from cdcpipe.masks import Masks
from cdcpipe.replication.session import connected
from cdcpipe.replication.tables import few
from cdcpipe.subcommands.checksum import Checksums, ServerTable, find_slot_state
from cli.options import CONTEXT_SETTINGS, connection_options, connection_parameters_of

__all__ = ["command"]

_EXAMPLE = """\b
Example:
  echo '{"begin": [["public", "fruit"]]}' | cdcpipe checksum -d shop
"""


@cloup.command(
    "checksum",
    context_settings=CONTEXT_SETTINGS,
    short_help="Let the server compute checksums of tables, to compare copies with.",
    epilog=_EXAMPLE,
)
@connection_options
def command(**options: Any) -> None:
    """Answer requests for checksums of tables, which the server computes in one snapshot: JSON lines on stdin and stdout.

    cdcpipe-spark verify runs this command. The user needs SELECT on the tables. No values of rows leave the server except keys, and
    keys only when a request asks for them.
    """
    parameters = connection_parameters_of(**options)
    with connected(parameters) as connection, connected(parameters) as another:
        server = _Server(Checksums(connection), another)
        for line in sys.stdin:
            sys.stdout.write(json.dumps(server.answer(line)) + "\n")
            sys.stdout.flush()


class _Server:
    """Turns requests into calls, and their results into answers."""

    def __init__(self, checksums: Checksums, another: Connection) -> None:
        self._checksums = checksums
        # Slots are read on another connection, outside of the snapshot.
        self._another = another
        self._tables: dict[tuple[str, str], ServerTable] = {}

    def answer(self, line: str) -> Any:
        try:
            request = json.loads(line)
            if "begin" in request:
                return self._begin(
                    [(str(schema), str(name)) for schema, name in request["begin"]],
                    request.get("publications") or [],
                    trim_numbers=bool(request.get("trim_numbers")),
                    masks=Masks.of(request.get("masks") or {}),
                )
            if "slot" in request:
                return self._slot(str(request["slot"]), request["publications"], LSN.parse(request["upto"]))
            what = "rows" if "rows" in request else "buckets"
            schema, name = request[what]
            wanted, key = (str(schema), str(name)), [str(column) for column in request["key"]]
        except (ValueError, KeyError, TypeError) as ex:
            msg = f"not a request: {ex!r}"
            raise CommandError(msg, hint='a request is a line of JSON, like {"begin": [["public", "fruit"]]}') from ex
        table = self._tables.get(wanted)
        if table is None:
            there = few([".".join(each) for each in sorted(self._tables)])
            raise CommandError(
                f"the snapshot has no table {'.'.join(wanted)}",
                hint=f"it has {there}" if there else "a table has to be there, and be named in 'begin', which comes first",
            )
        if what == "rows":
            return self._checksums.rows(table, key, [str(bucket) for bucket in request["buckets"]])
        return self._checksums.buckets(table, key)

    def _begin(self, tables: list[tuple[str, str]], publications: list[str], *, trim_numbers: bool, masks: Masks) -> dict[str, Any]:
        system_id, database = self._checksums.system()
        snapshot, found = self._checksums.begin(tables, publications, trim_numbers=trim_numbers, masks=masks)
        self._tables = {(table.schema, table.name): table for table in found}
        missing = sorted(set(tables) - set(self._tables))
        return {
            "system_id": system_id,
            "database": database,
            "xmax": snapshot.xmax,
            "running": list(snapshot.running),
            "wal_lsn": str(snapshot.wal_lsn),
            "tables": [
                {
                    "schema": table.schema,
                    "name": table.name,
                    "relation_id": table.relation_id,
                    "columns": [list(column) for column in table.columns],
                    "row_estimate": table.row_estimate,
                    "published_as": table.published_as,
                    "hashed": sorted(table.hashed),
                    "left_out": list(table.left_out),
                }
                for table in found
            ],
            "missing": missing,
        }

    def _slot(self, name: str, publications: list[str], upto: LSN) -> dict[str, Any]:
        state = find_slot_state(self._another, name, publications, upto)
        return {"active": state.active, "confirmed_flush_lsn": str(state.confirmed_flush_lsn), "pending": state.is_pending}

"""``cdcpipe checksum``: the server's half of ``cdcpipe-spark verify``, for any program that compares a table with a copy.

A request is a line of JSON on stdin. The answer is a line of JSON on stdout. The command ends at the end of stdin. All tables are
read in one snapshot, which lasts until the next ``begin``. cdcpipe/subcommands/checksum.py defines the checksums. The command
connects to the server once it has read the first request. The user needs SELECT on the tables. Only ``pending`` needs REPLICATION,
too: it looks for changes in the slot, which it takes for that, for some seconds at most. The answer is true if there may be some.

``begin`` names what the copy has: the publications, which have to exist, and its masks, as ``--mask`` has them (cdcpipe/masks.py).
Without tables, it asks which server answers.

    {"begin": [[SCHEMA, NAME], ...], "publications": [NAME, ...], "trim_numbers": false, "masks": {COLUMN: KIND, ...}}
    {"system_id", "database", "xmax", "running", "wal_lsn", "tables": [
        {"schema", "name", "relation_id", "columns": [[NAME, TYPE_ID, TYPE_MODIFIER], ...], "row_estimate", "published_as",
         "hashed": [NAME, ...], "left_out": [NAME, ...]}, ...],
     "missing": [[SCHEMA, NAME], ...]}                                  # the tables of the request that do not exist

    {"locks": [[SCHEMA, NAME], ...]}
    {"most": LOCKS, "tables": [[SCHEMA, NAME, LOCKS], ...]}             # a 'begin' whose tables take more than 'most' is refused

    {"published": [NAME, ...]}                                          # the tables of these publications, as of the snapshot
    [{"schema", "name", "relation_id", "primary_key": [COLUMN, ...], "replica_identity",
      "unpublished_key": [COLUMN, ...], "columns": [NAME, ...]}, ...]

    {"buckets": [SCHEMA, NAME], "key": [COLUMN, ...]}
    {BUCKET: [ROWS, SUM], ...}

    {"buckets": [SCHEMA, NAME], "key": [COLUMN, ...], "within": [BUCKET, ...]}
    {PART: [ROWS, SUM], ...}                                            # each of these buckets has up to 4096 parts

    {"rows": [SCHEMA, NAME], "key": [COLUMN, ...], "buckets": [BUCKET, ...]}     # or [PART, ...]
    [[KEY'S TEXT, ..., MD5], ...]

    {"slot": NAME}
    {"active", "confirmed_flush_lsn"}

    {"pending": NAME, "publications": [NAME, ...], "upto": LSN}         # whether a slot that nobody uses has changes before 'upto'
    BOOLEAN
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from typing import Any

import cloup

from cdcpipe.errors import CommandError
from cdcpipe.libpq.connection import Connection
from cdcpipe.lsn import LSN
from cdcpipe.masks import Masks
from cdcpipe.replication.session import connected
from cdcpipe.subcommands.checksum import Checksums, ServerTable, find_slot_state, may_have_changes
from cdcpipe.units import few
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

    cdcpipe-spark verify runs this command. The user needs SELECT on the tables, and to look for changes in a slot also
    REPLICATION. No values of rows leave the server except keys, and keys only when a request asks for them.
    """
    parameters = connection_parameters_of(**options)
    requests = map(_parse, sys.stdin)
    first = list(itertools.islice(requests, 1))  # what is wrong with it shows before there is a connection
    if not first:
        return
    with connected(parameters) as connection, connected(connection.parameters_here) as another:
        server = _Server(Checksums(connection), another)
        for request in itertools.chain(first, requests):
            sys.stdout.write(json.dumps(request(server)) + "\n")
            sys.stdout.flush()


def _parse(line: str) -> Callable[[_Server], Any]:
    """Return a function that asks a server what a request asks for. Raises CommandError for anything else.

    Raises InvalidArgumentsError if the request has hashed columns and the environment has no key for them.
    """
    try:
        request = json.loads(line)
        if "begin" in request:
            tables = [(str(schema), str(name)) for schema, name in request["begin"]]
            publications = [str(name) for name in request.get("publications") or []]
            masks = Masks.of(request.get("masks") or {}).with_key()
            trim_numbers = bool(request.get("trim_numbers"))
            return lambda server: server.begin(tables, publications, trim_numbers=trim_numbers, masks=masks)
        if "locks" in request:
            asked = [(str(schema), str(name)) for schema, name in request["locks"]]
            return lambda server: server.locks(asked)
        if "published" in request:
            published = [str(name) for name in request["published"]]
            return lambda server: server.published(published)
        if "slot" in request:
            slot = str(request["slot"])
            return lambda server: server.slot(slot)
        if "pending" in request:
            unused, upto = str(request["pending"]), LSN.parse(request["upto"])
            publishing = [str(name) for name in request["publications"]]
            return lambda server: server.pending(unused, publishing, upto)
        schema, name = request["rows" if "rows" in request else "buckets"]
        wanted, key = (str(schema), str(name)), [str(column) for column in request["key"]]
        if "rows" in request:
            buckets = [str(bucket) for bucket in request["buckets"]]
            return lambda server: server.rows(wanted, key, buckets)
        within = [str(bucket) for bucket in request.get("within") or []]
        return lambda server: server.buckets(wanted, key, within)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as ex:
        msg = f"not a request: {ex!r}"
        raise CommandError(msg, hint='a request is a line of JSON, like {"begin": [["public", "fruit"]]}') from ex


class _Server:
    """Answers the requests, each with one method."""

    def __init__(self, checksums: Checksums, another: Connection) -> None:
        self._checksums = checksums
        # Slots are read on another connection, outside of the snapshot.
        self._another = another
        self._tables: dict[tuple[str, str], ServerTable] = {}

    def rows(self, wanted: tuple[str, str], key: list[str], buckets: list[str]) -> Any:
        return self._checksums.rows(self._table(wanted), key, buckets)

    def buckets(self, wanted: tuple[str, str], key: list[str], within: list[str]) -> Any:
        return self._checksums.buckets(self._table(wanted), key, within)

    def _table(self, wanted: tuple[str, str]) -> ServerTable:
        table = self._tables.get(wanted)
        if table is None:
            there = few([".".join(each) for each in sorted(self._tables)])
            raise CommandError(
                f"the snapshot has no table {'.'.join(wanted)}",
                hint=f"it has {there}" if there else "a table has to be there, and be named in 'begin', which comes first",
            )
        return table

    def begin(self, tables: list[tuple[str, str]], publications: list[str], *, trim_numbers: bool, masks: Masks) -> dict[str, Any]:
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

    def locks(self, tables: list[tuple[str, str]]) -> dict[str, Any]:
        most, needed = self._checksums.needed_locks(tables)
        return {"most": most, "tables": [[schema, name, count] for (schema, name), count in sorted(needed.items())]}

    def published(self, publications: list[str]) -> list[dict[str, Any]]:
        return [
            {
                "schema": table.schema,
                "name": table.name,
                "relation_id": table.relation_id,
                "primary_key": list(table.primary_key),
                "replica_identity": table.replica_identity,
                "unpublished_key": list(table.unpublished_key),
                "columns": [column.name for column in table.columns],
            }
            for table in self._checksums.published_tables(publications)
        ]

    def slot(self, name: str) -> dict[str, Any]:
        state = find_slot_state(self._another, name)
        return {"active": state.active, "confirmed_flush_lsn": str(state.confirmed_flush_lsn)}

    def pending(self, name: str, publications: list[str], upto: LSN) -> bool:
        return may_have_changes(self._another, name, publications, upto)

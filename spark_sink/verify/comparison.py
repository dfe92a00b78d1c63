"""Compares replicas with PostgreSQL, while everything goes on: ``verify``.

Both sides make the same checksums (verify/canonical.py, cdcpipe/subcommands/checksum.py), of the same state, that of one snapshot
of the server's. PostgreSQL goes on, and so do the tables, and neither can wait for the other. So:

1. Each replica's version is noted, and the LSN that it has reached.
2. The server takes a snapshot, which tells by transaction ids what it sees.
3. The tables get everything that the snapshot sees: the slot's consumer is past where the WAL was then, and the tables are
   where the staging log ends, or further.
4. The replica as it was at 1, with the changes since then that the snapshot sees, from the changelog, has to be what the
   snapshot shows. If the replica had a transaction at 1 that the snapshot does not see, because it became visible only
   later, all of it begins again. Where it has by now got nothing but what the snapshot sees, the replica as it is now will do.

Who changed a replica's rows behind the pipeline's back is found, because the replica's own rows are compared. With Parquet the
replica is a view over the changelog, and it is the changelog that is compared.

Nothing but keys is printed of the rows. The server's side is a ``cdcpipe checksum`` (psycopg is not imported here).
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

from cdcpipe.errors import InvalidArgumentsError
from cdcpipe.lsn import LSN
from spark_sink.changelog.tables import changelogs_of
from spark_sink.client.checksum import ChecksumServer
from spark_sink.delta import sql as delta
from spark_sink.delta.log import TableLog, commit_path, pin
from spark_sink.replica.replay import LAST_LSN, replay
from spark_sink.schema.table import NATIVE, Table
from spark_sink.schema.types import original_name
from spark_sink.verify import quick as quick_checksum
from spark_sink.verify.canonical import Canonical, exact_session
from spark_sink.verify.visibility import POLL_S, VerifyError, Visibility, wait_for_log, wait_for_tables
from spark_sink.warehouse.warehouse import Warehouse

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from pyspark.sql import DataFrame, SparkSession


__all__ = ["DIFFERENT", "NOT_COMPARED", "Difference", "TableResult", "VerifyError", "verify"]

_logger = logging.getLogger(__name__)

DIFFERENT = 10
"""The command's exit code when a table differs; the codes below are the pipe's."""
NOT_COMPARED = 11
"""The command's exit code when no table differs, but some table could not be compared, or there was none."""

_NO_REPLICA = "has no key, and so no replica to compare"


@dataclass(frozen=True, slots=True)
class Difference:
    """A key under which the two sides differ: the row is ``missing`` from the replica, ``surplus`` there, or ``changed``."""

    kind: str
    key: dict[str, str | None]


@dataclass(frozen=True, slots=True)
class TableResult:
    """What came out for one table; ``problem`` is why there was nothing to compare, if so."""

    table: Table
    server_rows: int = 0
    replica_rows: int = 0
    is_equal: bool = False
    differences: list[Difference] = field(default_factory=list)
    """The first ones found, no more than asked for."""
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class _Base:
    """A replica as it was, and the LSN that it had reached; no log: there is no replica to read, only the changelog."""

    log: TableLog | None = None

    @property
    def lsn(self) -> int:
        return 0 if self.log is None else self.log.lsn or 0


def verify(
    spark: SparkSession,
    warehouse: Path | str,
    connection: Sequence[str],
    *,
    tables: Collection[str] = (),
    staging: Path | str | None = None,
    max_keys: int = 10,
    timeout_s: float = 300.0,
    tell: Callable[[str, float], None] | None = None,
) -> list[TableResult]:
    """Compare replicas with their tables, all of them or those named "schema.name", and return what came out for each.

    ``connection`` are the options of `cdcpipe`, ``("-d", "shop")``. ``staging`` is where the warehouse says it is if left
    out. ``tell`` is called with what is being done, and which part of all is done (0 to 1). Tables that have nothing to compare
    are left out, unless they are named: then that is an error. These are a table without a key, which has no replica, and one
    that has become a partition of another published table, as whose rows its changes come now.
    """
    house = Warehouse.existing(warehouse)
    spark = exact_session(spark)
    tell = tell or (lambda _text, _part: None)
    chosen = [house.find(name) for name in dict.fromkeys(tables)] or house.tables()
    versions = {table: house.versions(table) for table in chosen}
    keyless = [table for table in chosen if not (versions[table] and versions[table][-1].key)]
    if keyless and tables:
        raise VerifyError(f"{keyless[0]} {_NO_REPLICA}")
    for table in keyless:
        _logger.warning("%s %s", table, _NO_REPLICA)
        chosen.remove(table)
    deadline = time.monotonic() + timeout_s
    with ChecksumServer(connection) as server:
        while True:
            comparison = _Comparison(spark, house, chosen, server, max_keys)
            comparison.begin(None if staging is None else Path(staging), deadline, tell)
            comparison.leave_out_partitions(are_named=bool(tables))
            early = comparison.find_early()
            if early is None:
                return comparison.run(tell)
            tell(f"waiting for a transaction in {early} to become visible on the server", 0)
            if time.monotonic() > deadline:
                raise VerifyError(
                    f"{early} has a transaction that has committed in the WAL, and that the server does not show yet",
                    hint="it may be waiting for a synchronous standby: SELECT * FROM pg_stat_activity WHERE wait_event = 'SyncRep'",
                )
            time.sleep(POLL_S)


class _Comparison:
    """One snapshot, and the replicas as they were before it."""

    def __init__(self, spark: SparkSession, house: Warehouse, tables: list[Table], server: ChecksumServer, max_keys: int) -> None:
        self._spark = spark
        self._house = house
        self._tables = tables
        self._server = server
        self._max_keys = max_keys
        self._visibility = Visibility(0, (), 0)
        self._bases: dict[Table, _Base] = {}
        self._changelogs: dict[Table, TableLog] = {}
        self._there: dict[Table, dict[str, Any]] = {}

    def begin(self, staging: Path | None, deadline: float, tell: Callable[[str, float], None]) -> None:
        """Note where the replicas are, take the snapshot, wait until the tables have what it sees."""
        self._bases = {table: self._base(table) for table in self._tables}
        source = self._house.source()
        tell("taking a snapshot on the server", 0)
        begun = self._server.ask(
            {
                "begin": [[table.schema, table.name] for table in self._tables],
                "publications": source.publications,
                "trim_numbers": self._house.types == NATIVE,
            }
        )
        hint = "connect to the server and the database that the changes come from"
        self._house.check_source("but the server has", hint, system_id=begun["system_id"], database=begun["database"])
        self._visibility = Visibility(begun["xmax"], tuple(begun["running"]), int(LSN.parse(begun["wal_lsn"])))
        self._there = {Table(found["schema"], found["name"]): found for found in begun["tables"]}
        staging = staging or source.staging
        if staging is None:
            raise InvalidArgumentsError(
                f"{self._house.name} does not say where its staging directory is", hint="name it: --staging DIR"
            )
        wait_for_log(self._server, source, self._visibility.wal_lsn, deadline, tell)
        wait_for_tables(self._house, staging, deadline, tell)

    def leave_out_partitions(self, *, are_named: bool) -> None:
        """Leave out tables whose changes come as rows of another table; raise VerifyError if they were asked for."""
        for table in list(self._tables):
            root = self._there.get(table, {}).get("published_as")
            if root is not None:
                message = f"{table} is a partition now, and its changes come as those of {'.'.join(root)}"
                hint = f"what it held when it was attached is not in that replica: cdcpipe-spark snapshot --table {'.'.join(root)}"
                if are_named:
                    raise VerifyError(message, hint=hint)
                _logger.warning("%s: not compared; %s", message, hint)
                self._tables.remove(table)
                del self._bases[table]

    def _base(self, table: Table) -> _Base:
        return _Base(pin(self._house.replica(table)) if self._house.format.keeps_replicas else None)

    def find_early(self) -> Table | None:
        """Return a table whose replica had a transaction that the snapshot does not see."""
        recent_lsn = self._visibility.recent_lsn
        for table, base in self._bases.items():
            if base.log is not None and base.lsn > recent_lsn and self._is_early(table, recent_lsn, base.lsn):
                return table
        return None

    def _is_early(self, table: Table, after_lsn: int, until_lsn: int) -> bool:
        """Tell whether there is a change in (after_lsn, until_lsn] that the snapshot does not see."""
        found = self._any_unseen(table, after_lsn, until_lsn)
        if found is None:
            position = F.col("_cdc_end_lsn")
            recent = (position > after_lsn) & (position <= until_lsn)
            found = not self._changes(table).where(recent & ~self._visibility.sees()).isEmpty()
        return found

    def _any_unseen(self, table: Table, after_lsn: int, until_lsn: int) -> bool | None:
        """Tell the same without Spark; None where only that can tell."""
        return quick_checksum.any_change(
            self._changelog(table), after_lsn, until_lsn, lambda end_lsn, xids: ~self._visibility.seen(end_lsn, xids)
        )

    def run(self, tell: Callable[[str, float], None]) -> list[TableResult]:
        """Compare table by table."""
        weights = [self._there[table]["row_estimate"] + 1000 if table in self._there else 1000 for table in self._tables]
        results = []
        for index, table in enumerate(self._tables):
            tell(f"{table}, {index + 1} of {len(self._tables)}", sum(weights[:index]) / sum(weights))
            results.append(self._compare(table))
        return results

    def _compare(self, table: Table) -> TableResult:
        version = self._house.versions(table)[-1]
        there = self._there.get(table)
        if there is None:
            return TableResult(table, problem="there is no such table on the server: it was dropped or renamed")
        if there["relation_id"] != version.relation_id:
            return TableResult(
                table, problem="the server's table of this name is another one, which has been made since, and has not changed yet"
            )
        key = [original_name(name) for name in version.key]
        names = [column[0] for column in there["columns"]]
        if not set(key) <= set(names):
            return TableResult(
                table, problem=f"the server's table has no column {', '.join(sorted(set(key) - set(names)))}, the key"
            )
        columns = [(name, type_id, modifier) for name, type_id, modifier in there["columns"]]
        request = {"key": key}
        self._server.send({"buckets": [table.schema, table.name], **request})
        self._renew(table)
        quick = self._quick_checksums(table, columns, key)
        theirs = {bucket: (count, total) for bucket, (count, total) in self._server.receive().items()}
        if quick == theirs:
            count = sum(count for count, _ in theirs.values())
            return TableResult(table, server_rows=count, replica_rows=count, is_equal=True)
        rows = self._rows(table)
        canonical = Canonical(rows.schema, columns, self._house.types)
        ours = canonical.checksums(rows, key)
        different = sorted(bucket for bucket in ours.keys() | theirs.keys() if ours.get(bucket) != theirs.get(bucket))
        differences: list[Difference] = []
        if different and self._max_keys:
            chosen = different[: self._max_keys]  # each has a key at least
            self._server.send({"rows": [table.schema, table.name], "buckets": chosen, **request})
            found = canonical.rows(rows, key, chosen)
            differences = _differences(key, found, self._server.receive())[: self._max_keys]
        return TableResult(
            table,
            server_rows=sum(count for count, _ in theirs.values()),
            replica_rows=sum(count for count, _ in ours.values()),
            is_equal=not different,
            differences=differences,
        )

    def _renew(self, table: Table) -> None:
        """Take the replica as it is by now, unless it has come to what the snapshot does not see: there is less to replay on it."""
        base = self._bases[table]
        if base.log is not None and not commit_path(base.log.path, base.log.version + 1).exists():
            return
        newer = self._base(table)
        if newer.lsn > base.lsn and self._any_unseen(table, base.lsn, newer.lsn) is False:
            self._bases[table] = newer

    def _quick_checksums(
        self, table: Table, columns: Sequence[tuple[str, int, int]], key: Sequence[str]
    ) -> dict[str, tuple[int, int]] | None:
        """Return the checksums of a small replica that nothing has changed since; None where Spark has to make them."""
        base = self._bases[table]
        if (
            base.log is None
            or quick_checksum.any_change(self._changelog(table), base.lsn, LAST_LSN, self._visibility.seen) is not False
        ):
            return None
        self._house.check_changes(table, base.lsn)
        return quick_checksum.checksums(base.log, columns, key, self._house.types)

    def _rows(self, table: Table) -> DataFrame:
        """Return the rows that the replica has to have, going by what it was, at the snapshot."""
        base = self._bases[table]
        changes = self._changes(table).where(self._visibility.sees() & (F.col("_cdc_end_lsn") > base.lsn))
        if base.log is None:
            return replay(self._house, table, changes)
        rows = delta.read_version(self._spark, self._house.replica(table), base.log.version)
        if changes.isEmpty():
            self._house.check_changes(table, base.lsn)
            return rows
        return replay(self._house, table, changes, rows, after_lsn=base.lsn)

    def _changelog(self, table: Table) -> TableLog:
        """Return the log of a table's changelog, as it is now."""
        return self._changelogs.setdefault(table, TableLog(self._house.changelog(table))).refresh()

    def _changes(self, table: Table) -> DataFrame:
        return changelogs_of(self._spark, self._house).read_as_is(table)


def _differences(key: Sequence[str], ours: Collection[Sequence[Any]], theirs: Collection[Sequence[Any]]) -> list[Difference]:
    """Return how two lists of rows, each a key and a checksum, differ, in the order of the keys."""
    sides: list[dict[tuple[Any, ...], Counter[str]]] = []
    for rows in (ours, theirs):
        side: dict[tuple[Any, ...], Counter[str]] = defaultdict(Counter)
        for row in rows:
            side[tuple(row[:-1])][row[-1]] += 1
        sides.append(side)
    here, there = sides
    found = []
    for values in sorted(here.keys() | there.keys(), key=lambda values: tuple((len(v or ""), v or "") for v in values)):
        mine, wanted = here.get(values, Counter()), there.get(values, Counter())
        if mine != wanted:
            difference = mine.total() - wanted.total()
            kind = "changed" if difference == 0 else "missing" if difference < 0 else "surplus"
            found.append(Difference(kind, dict(zip(key, values, strict=True))))
    return found

"""Compares replicas with PostgreSQL while both change: ``verify``.

Both sides compute the same checksums (verify/canonical.py, cdcpipe/subcommands/checksum.py) of the same state: that of one snapshot
of the server. Neither side can wait for the other. So `verify` does this:

1. It notes the version of each replica, and the LSN that the replica has reached.
2. The server takes a snapshot, and reports by transaction ids what the snapshot sees.
3. It waits until the tables have everything that the snapshot sees: until the slot's consumer is past the end of the WAL at the
   snapshot, and the tables are at the end of the staging log.
4. The replica's version from step 1, plus the later changes that the snapshot sees (from the changelog), must equal the snapshot.
   If the replica had a transaction in step 1 that the snapshot does not see, because it became visible later, everything begins
   again. If the replica by now has only changes that the snapshot sees, its present version is used instead. That can't be told
   any more once changes since step 1 were purged.

Because the replica's own rows are compared, `verify` also finds changes that another program made to them. A table without a
replica is not compared. With Parquet the replica is a view over the changelog, so the changelog is compared. Deleted rows that a
replica keeps (``--deletes soft``) are left out.

A snapshot keeps the locks of its tables until its end, and all sessions share the server's table of locks. So many tables are
compared in parts, each with a snapshot of its own. Once a table has been compared, no later error takes its result away.

Of the rows only keys are printed. A ``cdcpipe checksum`` does the server's part (psycopg is not imported here).
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

from cdcpipe.error_texts import unexpected
from cdcpipe.errors import CdcpipeError, InvalidArgumentsError
from cdcpipe.lsn import LSN, format_lsn
from spark_sink.changelog.tables import changelogs_of
from spark_sink.client.checksum import ChecksumServer
from spark_sink.delta import sql as delta
from spark_sink.delta.log import TableLog, commit_path, pin
from spark_sink.files.system_limits import described
from spark_sink.replica.layout import existing_rows
from spark_sink.replica.replay import LAST_LSN, replay
from spark_sink.schema.table import NATIVE, Table, has_key, key_lost_at
from spark_sink.schema.types import original_name
from spark_sink.spark import jvm, session
from spark_sink.spark.failure import explained
from spark_sink.status.staging_directory import staging_directory
from spark_sink.verify import quick as quick_checksum
from spark_sink.verify.canonical import Canonical, exact_session
from spark_sink.verify.differences import Difference, Sides
from spark_sink.verify.unknown_tables import unknown_tables
from spark_sink.verify.visibility import (
    POLL_S,
    VerifyError,
    Visibility,
    check_log,
    check_server,
    history_lsn_of,
    wait_for,
    wait_for_log,
    wait_for_tables,
)
from spark_sink.warehouse import dropped_tables, gaps, purged_changes
from spark_sink.warehouse.mask_settings import check_key
from spark_sink.warehouse.purged_changes import PurgedError
from spark_sink.warehouse.unchanged import check_unchanged
from spark_sink.warehouse.warehouse import Warehouse

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from pyspark.sql import DataFrame, SparkSession


__all__ = ["DIFFERENT", "NOT_COMPARED", "Difference", "TableResult", "VerifyError", "verify"]

_logger = logging.getLogger(__name__)

DIFFERENT = 10
"""The command's exit code if a table differs. Lower codes are those of the pipe."""
NOT_COMPARED = 11
"""The command's exit code if no table differs, but a table could not be compared, or there was none."""
_NO_REPLICA = "has no key, and so no replica to compare"


@dataclass(frozen=True, slots=True)
class TableResult:
    """The result for one table. ``problem`` says why the table could not be compared, if so."""

    table: Table
    server_rows: int = 0
    replica_rows: int = 0
    is_equal: bool = False
    differences: list[Difference] = field(default_factory=list)
    """The first differences, at most ``max_keys``."""
    problem: str | None = None
    left_out: tuple[str, ...] = ()
    """Masked columns that can't be compared."""
    hashed: tuple[str, ...] = ()
    """Masked columns that were compared as hashes."""
    without_deleted: bool = False
    """Whether the replica keeps deleted rows, which were left out."""


@dataclass(frozen=True, slots=True)
class _Base:
    """A replica's version at the beginning, and its LSN. Without a log there is no replica to read."""

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
    """Compare replicas with their tables, and return a result for each. ``tables`` are "schema.name"; empty for all.

    ``connection`` has options of `cdcpipe`, ``("-d", "shop")``. By default ``staging`` is the directory that the warehouse records.
    ``tell`` is called with the present step, and with the share of the work that is done (0 to 1).

    As long as no table has been compared, an error is raised. Later it becomes the ``problem`` of the tables that are left.

    Tables with nothing to compare are left out: a table that never had a key, so that it has no replica; and a table that has
    become a partition of another published table, if its changes now come as changes of that table. If such a table is named, this
    is an error. Without ``tables``, there is also a result with a ``problem`` for each published table that the warehouse does not
    have.
    """
    house = Warehouse.existing(warehouse)
    spark = exact_session(spark)
    tell = tell or (lambda _text, _part: None)
    chosen = [house.find(name) for name in dict.fromkeys(tables)] or house.tables()
    place = staging_directory(None if staging is None else Path(staging), house)
    check_log(house, place)
    check_key(house)
    versions = {table: house.versions(table) for table in chosen}
    keyless = [table for table in chosen if not has_key(versions[table])]
    if keyless and tables:
        raise InvalidArgumentsError(f"{keyless[0]} {_NO_REPLICA}", hint="leave this --table out")
    for table in keyless:
        _logger.warning("%s %s", table, _NO_REPLICA)
        chosen.remove(table)
    with ChecksumServer(connection) as server:
        parts, results = _parts(chosen, server)
        unknown: list[TableResult] = []
        for number, part in enumerate(parts, 1):
            tell_part = _part_teller(tell, number, parts)
            comparison = _Comparison(spark, house, part, server, max_keys)
            try:
                comparison.begin_certain(place, time.monotonic() + timeout_s, tell_part, are_named=bool(tables))
                if number == 1 and not tables:
                    unknown = _unknown(house, server, tell)
                for result in comparison.run(tell_part):
                    results.append(result)
            except Exception as ex:
                if all(result.problem is not None for result in results):
                    raise  # nothing was compared
                found = {result.table for result in results}
                left = [table for each in parts[number - 1 :] for table in each if table not in found]
                return [*results, *_failed(left, ex), *unknown]
    return [*results, *unknown]


def _failed(tables: Sequence[Table], ex: Exception) -> list[TableResult]:
    """Return a result for each of the tables that an error has left uncompared."""
    error = session.ended_error() if jvm.has_ended(jvm.END_S) else explained(ex)
    # A defect of cdcpipe, or a damaged file of a table, takes nothing away either.
    known = (error.message, error.hint) if isinstance(error, CdcpipeError) else described(ex) or (unexpected(ex), "-v shows more")
    _logger.info("not compared", exc_info=ex)
    problem = "; ".join(filter(None, known))
    return [TableResult(table, problem=problem) for table in tables]


def _parts(tables: Sequence[Table], server: ChecksumServer) -> tuple[list[list[Table]], list[TableResult]]:
    """Return the tables in parts that take few locks each, and a result for each table that alone takes too many.

    A part holds its locks for hours, perhaps. A table is not divided, so it may take more locks than a part of several.
    """
    answer = server.ask({"locks": [_name(table) for table in tables if not table.now.number]})
    most, needed = answer["most"], {Table(schema, name): count for schema, name, count in answer["tables"]}
    parts: list[list[Table]] = [[]]
    results: list[TableResult] = []
    taken = 0
    for table in tables:
        count = needed.get(table.now, 0)
        if count > most:
            problem = f"to read it takes {count:,} locks on its partitions and indexes, and more than {most:,} would leave too few"
            results.append(
                TableResult(table, problem=f"{problem} for other sessions; raise max_locks_per_transaction on the server")
            )
            continue
        if parts[-1] and taken + count > most // 2:
            parts.append([])
            taken = 0
        parts[-1].append(table)
        taken += count
    return parts, results


def _part_teller(tell: Callable[[str, float], None], number: int, parts: Sequence[Sequence[Table]]) -> Callable[[str, float], None]:
    """Return a ``tell`` for one of the parts: its share of the work is that of its tables."""
    if len(parts) == 1:
        return tell
    weights = [len(part) for part in parts]
    before, own, total = sum(weights[: number - 1]), weights[number - 1], sum(weights)
    return lambda text, share: tell(f"part {number} of {len(parts)}: {text}", (before + share * own) / total)


def _unknown(house: Warehouse, server: ChecksumServer, tell: Callable[[str, float], None]) -> list[TableResult]:
    """Return a result for each published table that should have a replica, but has no table in the warehouse."""
    tell("asking which tables are published", 0)
    results = []
    # The connection of the comparison, because the role may lack what a stream needs: REPLICATION, and a free walsender.
    publications = house.source().publications
    published = server.ask({"published": publications}) if publications else []
    for table, is_keyed in unknown_tables(house, published):
        if is_keyed:
            problem = f"the warehouse has no such table: no change of it has come, and its rows were not copied; {table.copying}"
            results.append(TableResult(table, problem=problem))
        else:
            _logger.warning("%s %s", table, _NO_REPLICA)
    return results


class _Comparison:
    """One snapshot, and the versions of the replicas before it."""

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

    def begin_certain(self, staging: Path, deadline: float, tell: Callable[[str, float], None], *, are_named: bool) -> None:
        """Begin, again and again, until no replica has a transaction that the snapshot does not see."""
        while True:
            self.begin(staging, deadline, tell)
            self.leave_out_partitions(are_named=are_named)
            if self.gets_replica(staging, deadline, tell):
                continue  # its version has to be noted before a snapshot
            early = self.find_early()
            if early is None:
                return
            tell(f"waiting for a transaction in {early} to become visible on the server", 0)
            if time.monotonic() > deadline:
                raise VerifyError(
                    f"{early} has a transaction that has committed in the WAL, but that is not visible on the server yet",
                    hint="it may be waiting for a synchronous standby: SELECT * FROM pg_stat_activity WHERE wait_event = 'SyncRep'",
                )
            time.sleep(POLL_S)

    def begin(self, staging: Path, deadline: float, tell: Callable[[str, float], None]) -> None:
        """Note the versions of the replicas, take the snapshot, and wait until the tables have everything that it sees."""
        self._bases = {table: self._base(table) for table in self._tables}
        source = self._house.source()
        # Read before the snapshot is taken: what is in the log up to a gap that is found later may be newer than the snapshot.
        history_lsn = history_lsn_of(self._house)
        tell("taking a snapshot on the server", 0)
        check_server(self._server, self._house)  # another server may lack the publications, too
        begun = self._server.ask(
            {
                "begin": [_name(table) for table in self._tables if not table.now.number],
                "publications": source.publications,
                "trim_numbers": self._house.types == NATIVE,
                "masks": self._house.masks.as_kinds,
            }
        )
        self._visibility = Visibility(begun["xmax"], tuple(begun["running"]), int(LSN.parse(begun["wal_lsn"])), history_lsn)
        found = {(each["schema"], each["name"]): each for each in begun["tables"]}
        living = {table: (table.now.schema, table.now.name) for table in self._tables if not table.now.number}
        self._there = {table: found[name] for table, name in living.items() if name in found}
        wait_for_log(self._server, source, staging, self._visibility.wal_lsn, deadline, tell)
        wait_for_tables(self._house, staging, deadline, tell)
        # Now that the tables have all that the snapshot sees: a run with other masks has written nothing of it.
        check_unchanged(self._house, ("deletes",))

    def leave_out_partitions(self, *, are_named: bool) -> None:
        """Leave out tables whose changes come as changes of another table. Raises InvalidArgumentsError if one was named."""
        for table in list(self._tables):
            root = self._there.get(table, {}).get("published_as")
            if root is not None:
                message = f"{table} is a partition now, and its changes come as those of {'.'.join(root)}"
                hint = f"its rows are compared as those of {'.'.join(root)}"
                if not self._is_copied_since_attached(table, Table(*root)):
                    hint = f"that replica lacks the rows from before it was attached: {Table(*root).copying}"
                if are_named:
                    raise InvalidArgumentsError(message, hint=hint)
                _logger.warning("%s: not compared; %s", message, hint)
                self._tables.remove(table)
                del self._bases[table]

    def _is_copied_since_attached(self, partition: Table, root: Table) -> bool:
        """Tell whether the root was copied after the partition's own last change, and so has all of its rows."""
        last_lsn = self._house.format.lsn(self._house.changelog(partition)) or 0
        return any(table.now == root and gaps.is_copied_since(self._house, table, last_lsn) for table in self._house.tables())

    def _base(self, table: Table) -> _Base:
        return _Base(pin(self._house.replica(table)) if self._house.format.keeps_replicas else None)

    def gets_replica(self, staging: Path, deadline: float, tell: Callable[[str, float], None]) -> bool:
        """Tell whether a replica was made that was not there at the beginning. Waits for one: that of a new table comes later."""
        missing = [table for table in self._bases if table in self._there and self._lacks_replica(table)]
        missing = [table for table in missing if self._house.has_changelog(table)]
        missing = [table for table in missing if key_lost_at(self._house.versions(table), LAST_LSN) is None]

        def waited_for() -> str | None:
            return None if any(self._base(table).log is not None for table in missing) else f"the replica of {missing[0]}"

        return bool(missing) and wait_for(waited_for, staging, deadline, tell)

    def _lacks_replica(self, table: Table) -> bool:
        return self._house.format.keeps_replicas and self._bases[table].log is None

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
        """Tell without Spark whether there is such a change; return None if this is not possible."""
        return quick_checksum.any_change(
            self._changelog(table), after_lsn, until_lsn, lambda end_lsn, xids: ~self._visibility.seen(end_lsn, xids)
        )

    def run(self, tell: Callable[[str, float], None]) -> Iterator[TableResult]:
        """Compare table by table."""
        weights = [self._there[table]["row_estimate"] + 1000 if table in self._there else 1000 for table in self._tables]
        for index, table in enumerate(self._tables):
            tell(f"{table}, {index + 1} of {len(self._tables)}", sum(weights[:index]) / sum(weights))
            there = self._there.get(table, {})
            try:
                result = self._compare(table)
            except PurgedError as ex:  # a purge has removed them since the part began: other tables may still have theirs
                result = TableResult(table, problem=f"{ex.message}; start verify again, and if that does not help, {table.copying}")
            left_out, hashed = tuple(there.get("left_out", ())), tuple(there.get("hashed", ()))
            yield replace(result, left_out=left_out, hashed=hashed, without_deleted=self._house.keeps_deleted)

    def _compare(self, table: Table) -> TableResult:
        if not self._house.has_changelog(table):
            return TableResult(table, problem=f"its changelog, {self._house.changelog(table)}, has gone; {table.copying}")
        versions = self._house.versions(table)
        version, there = versions[-1], self._there.get(table)
        if there is None and dropped_tables.where(self._house, table, versions) is not None and self._rows(table).isEmpty():
            return TableResult(table, is_equal=True)
        if there is None:
            return TableResult(table, problem="there is no such table on the server: it was dropped or renamed")
        if there["relation_id"] != version.relation_id:
            return TableResult(
                table,
                problem="the server has another table of this name: it was created later and has not changed yet, or its partitions"
                " are published as tables of their own",
            )
        lost = key_lost_at(versions, LAST_LSN)
        if lost is not None:
            problem = f"it has no key since {format_lsn(lost[0])}, and its replica has only the rows from before"
            return TableResult(table, problem=f"{problem}; give it a primary key on the server")
        key = [original_name(name) for name in version.key]
        names = [column[0] for column in there["columns"]]
        if not set(key) <= set(names):
            return TableResult(
                table, problem=f"the server's table has no column {', '.join(sorted(set(key) - set(names)))}, the key"
            )
        columns = [(name, type_id, modifier) for name, type_id, modifier in there["columns"]]
        self._renew(table)
        if self._lacks_replica(table):
            return TableResult(table, problem="it had no replica; start cdcpipe-spark run, which makes it")
        self._server.send({"buckets": _name(table), "key": key})
        filled = {fill.column for each in versions for fill in each.fills}
        quick = self._quick_checksums(table, columns, key, filled)
        theirs = {bucket: (count, total) for bucket, (count, total) in self._server.receive().items()}
        if quick == theirs:
            count = sum(count for count, _ in theirs.values())
            return TableResult(table, server_rows=count, replica_rows=count, is_equal=True)
        rows = self._rows(table)
        canonical = Canonical(rows.schema, columns, self._house.types, filled)
        ours = canonical.checksums(rows, key)
        return TableResult(
            table,
            server_rows=sum(count for count, _ in theirs.values()),
            replica_rows=sum(count for count, _ in ours.values()),
            is_equal=ours == theirs,
            differences=Sides(self._server, _name(table), canonical, rows, key).differences(ours, theirs, self._max_keys),
        )

    def _renew(self, table: Table) -> None:
        """Use the replica's present version, unless it has changes that the snapshot does not see: then less has to be replayed."""
        base = self._bases[table]
        if base.log is not None and not commit_path(base.log.path, base.log.version + 1).exists():
            return
        newer = self._base(table)
        has_none_unseen = newer.lsn > base.lsn and self._any_unseen(table, base.lsn, newer.lsn) is False
        # Asked after the changelog was read: a purge may have removed such a change, and notes this before.
        if has_none_unseen and purged_changes.last_lsn(self._house, table) <= base.lsn:
            self._bases[table] = newer

    def _quick_checksums(
        self, table: Table, columns: Sequence[tuple[str, int, int]], key: Sequence[str], filled: Collection[str]
    ) -> dict[str, tuple[int, int]] | None:
        """Return the checksums of a small replica without later changes; None if Spark has to compute them."""
        base = self._bases[table]
        if (
            base.log is None
            or self._lacks_fills(table, base)
            or quick_checksum.any_change(self._changelog(table), base.lsn, LAST_LSN, self._visibility.seen) is not False
            or purged_changes.last_lsn(self._house, table) > base.lsn
        ):
            return None
        return quick_checksum.checksums(base.log, columns, key, self._house.types, filled)

    def _rows(self, table: Table) -> DataFrame:
        """Return the rows that the replica has at the snapshot: those of its noted version, with the later changes applied."""
        base = self._bases[table]
        changes = self._changes(table).where(self._visibility.sees() & (F.col("_cdc_end_lsn") > base.lsn))
        if base.log is None:
            return replay(self._house, table, changes)
        rows = existing_rows(delta.read_at(self._spark, base.log))
        if not self._lacks_fills(table, base) and changes.isEmpty():
            purged_changes.check(self._house, table, base.lsn)
            return rows
        return replay(self._house, table, changes, rows, after_lsn=base.lsn)

    def _lacks_fills(self, table: Table, base: _Base) -> bool:
        """Tell whether captured DDL gave values to the rows since the noted version, which may come without any change."""
        until_lsn = self._visibility.wal_lsn
        return any(version.fills and base.lsn < version.end_lsn <= until_lsn for version in self._house.versions(table))

    def _changelog(self, table: Table) -> TableLog:
        """Return the present log of a table's changelog."""
        return self._changelogs.setdefault(table, TableLog(self._house.changelog(table))).refresh()

    def _changes(self, table: Table) -> DataFrame:
        return changelogs_of(self._spark, self._house).read(table)


def _name(table: Table) -> list[str]:
    """Return the name that the table has on the server."""
    return [table.now.schema, table.now.name]

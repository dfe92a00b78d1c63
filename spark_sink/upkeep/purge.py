"""Removes old changes from changelogs.

`purge` removes the changes before a place in the order of all commits. The place is an LSN, a position (``EPOCH:LSN``), or a time:
that of the first transaction of any table that committed then or later (replica/as_of.py). It keeps changes that are still needed:

- With Delta Lake it keeps changes that the table's replica does not have yet, because the replica gets them from nowhere else.
- With Parquet the current rows are made of all changes since the table's last snapshot or TRUNCATE. If these would have to go,
  `purge` refuses. It removes only whole appends. It keeps an append that also has later changes, and the newest one, which records
  the position of the changelog.

The remaining changes do not show that earlier ones are missing. So `purge` first records in the warehouse up to where changes may
be missing. After a kill at any moment, a changelog is complete, or is known to be incomplete. Code that needs all changes since
some place calls Warehouse.check_changes: `as-of` and the rebuilding of a replica then raise an error, unless a later snapshot gives
the table a new beginning.

For each table, `purge` holds the right to write the tables alone while it records and deletes (warehouse/lock.py). Otherwise a
snapshot or the rebuilding of a replica could use changes that disappear. And Delta Lake refuses a DELETE if somebody appends
meanwhile.
"""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

from cdcpipe.lsn import format_lsn
from cdcpipe.retry import RetryPolicy
from spark_sink.changelog import tables as changelog
from spark_sink.delta import sql as delta
from spark_sink.replica import as_of, merge
from spark_sink.schema.table import MESSAGES, Table
from spark_sink.staging.log import Position
from spark_sink.warehouse.lock import TableLock
from spark_sink.warehouse.warehouse import Warehouse, WarehouseError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from pyspark.sql import SparkSession

    from spark_sink.replica.as_of import At

__all__ = ["Purged", "find_table", "purge"]

_logger = logging.getLogger(__name__)

_CONFLICTS = ("DELTA_CONCURRENT_", "DELTA_METADATA_CHANGED", "DELTA_PROTOCOL_CHANGED")
"""Delta's error texts if another program, which does not take our lock, has rewritten files meanwhile (an OPTIMIZE by hand)."""
_DELETES = RetryPolicy(attempts=5)


@dataclass(frozen=True, slots=True)
class Purged:
    """How many rows were removed from a table's changelog, how many earlier rows were kept, and why."""

    table: Table
    rows: int
    kept: int = 0
    reason: str = ""


def purge(
    spark: SparkSession,
    warehouse: Path | str,
    before: At,
    *,
    tables: Collection[str] = (),
    is_dry_run: bool = False,
    is_stopping: Callable[[], bool] = lambda: False,
) -> list[Purged]:
    """Remove changes before ``before`` from the changelogs of ``tables`` ("schema.name"; empty for all, with that of the messages).

    Returns what was removed from each; with ``is_dry_run`` what would be. Raises WarehouseError, and removes nothing, if the tables
    have not reached the place, or if a Parquet table's current rows need such changes. Raises InterruptedError once
    ``is_stopping`` is True while it waits for the lock.
    """
    house = Warehouse.existing(warehouse)
    chosen = [find_table(house, name) for name in dict.fromkeys(tables)] or _all(house)
    lsn = _place(spark, house, before)
    _logger.info("purging changes up to %s", format_lsn(lsn))
    purges = [_purge_of(spark, house, table, lsn) for table in chosen if changelog.exists(house, table)]
    for each in purges:
        each.check()
    if not is_dry_run:
        for each in purges:
            if each.rows:
                with TableLock(house.local_root()).alone(is_stopping):
                    # An unfinished snapshot may have rows before the place, which its replica still needs. So finish it first.
                    merge.finish_snapshots(spark, house)
                    each.check()
                    house.note_purged(each.table, each.lsn)
                    each.remove()
    return [Purged(each.table, each.rows, each.kept, each.reason) for each in purges]


def _all(house: Warehouse) -> list[Table]:
    return [*house.tables(), MESSAGES]


def find_table(house: Warehouse, name: str) -> Table:
    """Return the table with this name, also that of the logical messages. Raises InvalidArgumentsError if there is none."""
    return MESSAGES if name == str(MESSAGES) else house.find(name)


def _place(spark: SparkSession, house: Warehouse, before: At) -> int:
    """Return the last LSN before ``before`` in the order of commits. Raises WarehouseError if the tables have not reached it."""
    position, end_lsn = house.source().position, F.col("_cdc_end_lsn")
    if position is None:
        raise WarehouseError(f"{house.name} has no changes yet")
    if not isinstance(before, datetime):
        lsn = before.lsn if isinstance(before, Position) else int(before)
        if lsn > position.lsn or (isinstance(before, Position) and before.epoch > position.epoch):
            raise WarehouseError(f"the tables are at {position}, before {before}", hint="give an earlier position")
        if not isinstance(before, Position):
            return lsn - 1
    changes = [changelog.read(spark, house, table) for table in _all(house) if changelog.exists(house, table)]
    if isinstance(before, datetime):
        time, moment = F.col("_cdc_commit_time"), as_of.moment(before)
        is_late = time >= moment
        # Messages outside of transactions have no time: they are removed together with a later transaction.
        early = [each.where(time < moment).agg(F.max(end_lsn)).collect()[0][0] for each in changes]
        last_lsn = max(map(int, filter(None, early)), default=0)
    else:
        is_late = F.col("_cdc_epoch") > before.epoch
        last_lsn = before.lsn - 1
    late = [each.where(is_late & (end_lsn <= last_lsn)).agg(F.min(end_lsn)).collect()[0][0] for each in changes]
    return min([last_lsn, *(int(found) - 1 for found in late if found is not None)])


def _purge_of(spark: SparkSession, house: Warehouse, table: Table, lsn: int) -> _DeltaPurge | _ParquetPurge:
    return _DeltaPurge(spark, house, table, lsn) if house.format == "delta" else _ParquetPurge(spark, house, table, lsn)


def _has_key(house: Warehouse, table: Table) -> bool:
    return any(version.key for version in house.versions(table))


class _DeltaPurge:
    """The purge of one Delta changelog: it can remove ``rows`` changes, up to ``lsn``."""

    def __init__(self, spark: SparkSession, house: Warehouse, table: Table, lsn: int) -> None:
        self.table = table
        self._spark = spark
        self._house = house
        limit, end_lsn = self._limit(lsn), F.col("_cdc_end_lsn")
        old = changelog.read(spark, house, table).where(end_lsn <= lsn)
        found = old.agg(
            F.count(F.when(end_lsn <= limit, 1)).alias("rows"),
            F.max(F.when(end_lsn <= limit, end_lsn)).alias("last"),
            F.count("*").alias("old"),
        ).collect()[0]
        self.lsn: int = found["last"] or 0
        self.rows: int = found["rows"]
        self.kept: int = found["old"] - found["rows"]
        self.reason = f"the replica is at {format_lsn(limit)}" if limit else "there is no replica"

    def _limit(self, lsn: int) -> int:
        """Return the LSN up to which changes may be removed: ``lsn``, or that of the replica if it is lower."""
        if not _has_key(self._house, self.table):
            return lsn
        return min(lsn, delta.newest_lsn(self._house.replica(self.table)) or 0)

    def check(self) -> None:
        """Raise WarehouseError if the replica has been set back since, or removed."""
        if self._limit(self.lsn) < self.lsn:
            raise WarehouseError(
                f"the replica of {self.table} was at {format_lsn(self.lsn)} a moment ago, but now it is before", hint="try again"
            )

    def remove(self) -> None:
        """Delete the rows, in one commit."""
        path = self._house.changelog(self.table)
        _DELETES.call(
            lambda: self._spark.sql(f"DELETE FROM {delta.table_name(path)} WHERE _cdc_end_lsn <= {self.lsn}").collect(),
            Exception,
            where=lambda ex: any(conflict in str(ex) for conflict in _CONFLICTS),
        )


class _ParquetPurge:
    """The purge of one Parquet changelog: it can remove ``rows`` changes, in appends that end at or before ``lsn``."""

    def __init__(self, spark: SparkSession, house: Warehouse, table: Table, lsn: int) -> None:
        self.table = table
        self._path = house.changelog(table)
        self._batches = changelog.batches_before(house, table, lsn)
        self.lsn = max((end_lsn for end_lsn, _ in self._batches), default=0)
        self.rows = sum(pq.read_metadata(file).num_rows for _, batch in self._batches for file in batch.glob("*.parquet"))
        changes, end_lsn = changelog.read(spark, house, table), F.col("_cdc_end_lsn")
        self.kept = changes.where(end_lsn <= lsn).count() - self.rows
        self.reason = "they are in one append with later ones, or in the newest"
        is_beginning = F.col("_cdc_op").isin("snapshot", "truncate")
        self._beginning: int | None = changes.where(is_beginning).agg(F.max(end_lsn)).collect()[0][0]
        self._is_needed = _has_key(house, table)

    def check(self) -> None:
        """Raise WarehouseError if the current rows are made of changes that would be removed."""
        if self.rows and self._is_needed and (self._beginning is None or self._beginning <= self.lsn):
            since = "" if self._beginning is None else f" since {format_lsn(self._beginning)}"
            raise WarehouseError(
                f"the current rows of {self.table} are made of all changes{since}: with Parquet these can't be removed",
                hint=f"run cdcpipe-spark snapshot --table {self.table}, and then purge the changes before that snapshot",
            )

    def remove(self) -> None:
        """Remove the appends. A reader sees each append completely or not at all."""
        going = self._path / "_purged"
        shutil.rmtree(going, ignore_errors=True)  # left by a killed purge
        going.mkdir()
        for _, batch in self._batches:
            if batch.is_dir():  # otherwise another purge has just removed it
                batch.rename(going / batch.name)
        shutil.rmtree(going)

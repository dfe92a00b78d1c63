"""Drops old changes from changelogs: ``purge``.

What goes is what lies before a place in the order of all commits: an LSN, a position (``EPOCH:LSN``), or for a time the place of
the first transaction of any table that committed then or later (replica/as_of.py). But never

- with Delta Lake what the table's replica does not have yet: nothing else could bring it there;
- with Parquet what the current rows are made of, all since the table's last snapshot or TRUNCATE: that is refused. Whole appends
  go; one with later changes, and the newest, which says how far the changelog is, stay.

What is left does not tell what was before it. So up to where changes may be lacking is noted in the warehouse before the first one
goes: killed at any moment, a changelog has all, or is known not to. Whoever makes something of all changes since some place asks
(Warehouse.check_changes): `as-of` and a replica that is made again are refused, unless a snapshot since then begins anew.

The tables are the purge's alone while it notes and deletes (warehouse/lock.py), one after the other: a snapshot that is landed,
or a replica made again, builds on changes that it has looked at, and Delta refuses a DELETE during which somebody has appended.
"""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq

from cdcpipe.lsn import format_lsn
from cdcpipe.retry import RetryPolicy
from spark_sink.changelog import tables as changelog
from spark_sink.delta import sql as delta
from spark_sink.replica import as_of
from spark_sink.replica import merge as replica
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
"""What Delta says when somebody who takes no lock of ours, like an OPTIMIZE by hand, has rewritten files meanwhile."""
_DELETES = RetryPolicy(attempts=5)


@dataclass(frozen=True, slots=True)
class Purged:
    """How many rows went from a table's changelog, how many of those before the place were kept, and why."""

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
    """Remove what is older than ``before`` from changelogs: all, the messages' too, or those of the tables named "schema.name".

    Return what went from each; with ``is_dry_run`` what would. Raise WarehouseError, with nothing removed, for a place that the
    tables have not reached and for a Parquet table whose current rows need what would go; InterruptedError once
    ``is_stopping`` says so while it waits for the tables.
    """
    house = Warehouse.existing(warehouse)
    chosen = [find_table(house, name) for name in dict.fromkeys(tables)] or _all(house)
    lsn = _place(spark, house, before)
    _logger.info("up to %s", format_lsn(lsn))
    purges = [_purge_of(spark, house, table, lsn) for table in chosen if changelog.exists(house, table)]
    for each in purges:
        each.check()
    if not is_dry_run:
        for each in purges:
            if each.rows:
                with TableLock(house.local_root()).alone(is_stopping):
                    # Of a snapshot whose end was not seen to, the rows may be before the place.
                    replica.finish_snapshots(spark, house)
                    each.check()
                    house.note_purged(each.table, each.lsn)
                    each.remove()
    return [Purged(each.table, each.rows, each.kept, each.reason) for each in purges]


def _all(house: Warehouse) -> list[Table]:
    return [*house.tables(), MESSAGES]


def find_table(house: Warehouse, name: str) -> Table:
    """Return the table of this name, also that of the logical messages; raise WarehouseError if there is none."""
    return MESSAGES if name == str(MESSAGES) else house.find(name)


def _place(spark: SparkSession, house: Warehouse, before: At) -> int:
    """Return the last LSN before ``before``, in the order of commits; WarehouseError if the tables are not there yet."""
    from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

    position, end_lsn = house.source().position, F.col("_cdc_end_lsn")
    if position is None:
        raise WarehouseError(f"{house.name} has no changes yet")
    if not isinstance(before, datetime):
        lsn = before.lsn if isinstance(before, Position) else int(before)
        if lsn > position.lsn or (isinstance(before, Position) and before.epoch > position.epoch):
            raise WarehouseError(f"the tables are at {position}, and not yet at {before}", hint="give an earlier position")
        if not isinstance(before, Position):
            return lsn - 1
    changes = [changelog.read(spark, house, table) for table in _all(house) if changelog.exists(house, table)]
    if isinstance(before, datetime):
        time, moment = F.col("_cdc_commit_time"), as_of.moment(before)
        is_late = time >= moment
        # Messages that are not transactional have no time: they go with a transaction after them.
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
    """What can go from one changelog in Delta Lake: ``rows``, up to ``lsn``."""

    def __init__(self, spark: SparkSession, house: Warehouse, table: Table, lsn: int) -> None:
        from pyspark.sql import functions as F  # noqa: N812

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
        """Return up to where what is before ``lsn`` may go."""
        if not _has_key(self._house, self.table):
            return lsn
        return min(lsn, delta.newest_lsn(self._house.replica(self.table)) or 0)

    def check(self) -> None:
        """Raise WarehouseError if the replica has gone back since, or away."""
        if self._limit(self.lsn) < self.lsn:
            raise WarehouseError(
                f"the replica of {self.table} was at {format_lsn(self.lsn)} a moment ago, and is not any more", hint="try again"
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
    """What can go from one Parquet changelog: ``rows``, in appends that end at or before ``lsn``."""

    def __init__(self, spark: SparkSession, house: Warehouse, table: Table, lsn: int) -> None:
        from pyspark.sql import functions as F  # noqa: N812

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
        """Raise WarehouseError if the current rows are made of what would go."""
        if self.rows and self._is_needed and (self._beginning is None or self._beginning <= self.lsn):
            since = "" if self._beginning is None else f" since {format_lsn(self._beginning)}"
            raise WarehouseError(
                f"the current rows of {self.table} are made of all changes{since}: with Parquet these can't go",
                hint=f"cdcpipe-spark snapshot --table {self.table}, and then purge what is before that",
            )

    def remove(self) -> None:
        """Remove the appends, each as a whole for those who read."""
        going = self._path / "_purged"
        shutil.rmtree(going, ignore_errors=True)  # what a killed purge has left
        going.mkdir()
        for _, batch in self._batches:
            if batch.is_dir():  # otherwise somebody else has just done so
                batch.rename(going / batch.name)
        shutil.rmtree(going)

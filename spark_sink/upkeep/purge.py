"""Removes old changes from changelogs, and old versions from histories.

`purge` removes the changes before a place in the order of all commits. The place is an LSN, a position (``EPOCH:LSN``), or a time:
that of the first transaction of any table that committed then or later (replica/as_of.py), or of the first copy whose rows came to
the tables then or later. It keeps changes that are still needed:

- With Delta Lake it keeps changes that the table's replica or its stored history does not have yet, because these get them from
  nowhere else.
- With Parquet the current rows are made of all changes since the table's last snapshot or TRUNCATE. If these would have to go,
  `purge` refuses. It removes only whole appends. It keeps an append that also has later changes, and the newest one, which records
  the position of the changelog.

The remaining changes do not show that earlier ones are missing. So `purge` first records in the warehouse up to where changes may
be missing. After a kill at any moment, a changelog is complete, or is known to be incomplete. Code that needs all changes since
some place calls purged_changes.check: `as-of` and the rebuilding of a replica then raise an error, unless a later snapshot gives
the table a new beginning.

For each table, `purge` holds the right to write the tables alone while it records and deletes (warehouse/lock.py). Otherwise a
snapshot or the rebuilding of a replica could use changes that disappear. And Delta Lake refuses a DELETE if somebody appends
meanwhile.

Most of many tables have nothing to remove: their source has dropped them, or has not changed them since the last purge. Their files
tell that (delta/least_values.py), so Spark reads only the others.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

from cdcpipe.errors import InvalidArgumentsError
from cdcpipe.lsn import format_lsn
from spark_sink.changelog.tables import changelogs_of
from spark_sink.delta import sql as delta
from spark_sink.delta.least_values import has_none_before
from spark_sink.delta.schema import columns
from spark_sink.replica import as_of, merge
from spark_sink.replica.history import own_names
from spark_sink.schema.table import MESSAGES, Table
from spark_sink.staging.log import Position
from spark_sink.warehouse import purged_changes, stored_histories
from spark_sink.warehouse.errors import WarehouseError
from spark_sink.warehouse.lock import TableLock
from spark_sink.warehouse.warehouse import FIRST_CHANGES, Warehouse

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from pyspark.sql import DataFrame, SparkSession

    from spark_sink.replica.as_of import At

__all__ = ["Purged", "find_table", "purge", "purge_histories"]

_T = TypeVar("_T")

_logger = logging.getLogger(__name__)

_MUCH_AHEAD = timedelta(days=1)
"""From how much on a commit time ahead of its order is worth a warning. Transactions that commit at one time differ by little."""


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

    Returns what was removed from each; with ``is_dry_run`` what would be. If the tables have not reached the place, raises
    InvalidArgumentsError, and removes nothing. If a Parquet table's current rows need such changes, raises WarehouseError, and
    removes nothing. Raises InterruptedError once ``is_stopping`` is True: it is asked before each table, and while this waits for
    the lock.
    """
    house = Warehouse.existing(warehouse)
    chosen = [find_table(house, name) for name in dict.fromkeys(tables)] or _all(house)
    lsn = _place(spark, house, before, is_stopping)
    _logger.info("purging changes up to %s", format_lsn(lsn))
    changelogs = changelogs_of(spark, house)
    purges = [changelogs.old_changes(table, lsn) for table in _until(is_stopping, chosen) if house.has_changelog(table)]
    for each in purges:
        each.check()
    if not is_dry_run:
        for each in _until(is_stopping, purges):
            if each.rows:
                with TableLock(house.local_root()).alone(is_stopping):
                    # An unfinished snapshot may have rows before the place, which its replica still needs. So finish it first.
                    merge.finish_snapshots(spark, house, is_stopping)
                    each.check()
                    purged_changes.record(house, each.table, each.lsn)
                    each.remove()
                _logger.info("%s: %d changes from before %s removed", each.table, each.rows, before)
    return [Purged(each.table, each.rows, each.kept, each.reason) for each in purges]


def purge_histories(
    spark: SparkSession, house: Warehouse, lock: TableLock, before: datetime, is_stopping: Callable[[], bool] = lambda: False
) -> list[Purged]:
    """Remove the versions that ended before a time from all histories, for good. Returns what was removed from each.

    The versions that are valid at the time or later stay. ``lock`` is the lock of this process's pipeline. Raises InterruptedError
    once ``is_stopping`` is True: it is asked before each table.
    """
    found = []
    for table in _until(is_stopping, house.tables()):
        with lock.history():
            count = _purge_history(spark, house, table, before)
        if count:
            _logger.info("%s: %d versions that ended before %s removed", table, count, before.isoformat(" "))
            found.append(Purged(table, count))
    return found


def _purge_history(spark: SparkSession, house: Warehouse, table: Table, before: datetime) -> int:
    path = house.history(table)
    with house.logs.newest(path) as log:
        found = stored_histories.facts_in(log)
        if found is None:
            return 0
        own = own_names(columns(log.metadata).names)
        to_lsn, valid_to = own["to_lsn"], own["valid_to"]
        if has_none_before(log, valid_to, before):
            return 0
    rows = delta.read(spark, path)
    # Commit times need not be in the order of the commits. A version stays if one that ended before it stays.
    is_late = F.col(valid_to) >= as_of.moment(before)
    first = F.struct(F.col(to_lsn).alias("lsn"), F.unix_micros(valid_to).alias("time"))
    ends = rows.agg(
        F.min(F.when(is_late, first)).alias("kept"),
        F.max(F.when(~is_late, F.col(to_lsn))).alias("early"),
        F.max(to_lsn).alias("last"),
    ).collect()[0]
    kept, lsn = ends["kept"], ends["last"]
    if kept is not None:
        lsn = kept["lsn"] - 1
        if ends["early"] is not None and ends["early"] > lsn:
            _warn_of_future(
                f"version of {table} that ended at {format_lsn(kept['lsn'])} or later", as_of.time_of(kept["time"]), before
            )
    count = 0 if lsn is None else rows.where(F.col(to_lsn) <= lsn).count()
    if count:
        # First the note: without these versions, the rows of earlier moments are not known.
        noted = stored_histories.properties(after_lsn=max(lsn - 1, found.after_lsn), is_restored=found.is_restored)
        delta.set_properties(spark, path, noted)
        spark.sql(f"DELETE FROM {delta.table_name(path)} WHERE {to_lsn} <= {lsn}").collect()
    return count


def _until(is_stopping: Callable[[], bool], items: Iterable[_T]) -> Iterator[_T]:
    """Yield the items, each of which takes Spark a while. Raises InterruptedError once ``is_stopping`` is True."""
    for each in items:
        if is_stopping():
            raise InterruptedError
        yield each


def _all(house: Warehouse) -> list[Table]:
    return [*house.tables(), MESSAGES]


def find_table(house: Warehouse, name: str) -> Table:
    """Return the table with this name, also that of the logical messages. Raises InvalidArgumentsError if there is none."""
    return MESSAGES if name == str(MESSAGES) else house.find(name)


def _place(spark: SparkSession, house: Warehouse, before: At, is_stopping: Callable[[], bool] = lambda: False) -> int:
    """Return the last LSN before ``before`` in the order of commits.

    Raises InvalidArgumentsError if the tables have not reached it.
    """
    position, end_lsn = house.source().position, F.col("_cdc_end_lsn")
    if position is None:
        raise WarehouseError(f"{house.name} has no changes yet", hint=FIRST_CHANGES)
    if not isinstance(before, datetime):
        lsn = before.lsn if isinstance(before, Position) else int(before)
        if lsn > position.lsn or (isinstance(before, Position) and before.epoch > position.epoch):
            raise InvalidArgumentsError(f"the tables are at {position}, before {before}", hint=f"give {position} or an earlier one")
        if not isinstance(before, Position):
            return lsn - 1
    changelogs = changelogs_of(spark, house)
    tables = [table for table in _all(house) if house.has_changelog(table)]
    read = cache(changelogs.read)  # both questions are about the same version

    def changes_before(place: int | datetime) -> Iterator[DataFrame]:
        """Yield the changelogs that may have changes before a place."""
        return (read(table) for table in _until(is_stopping, tables) if not changelogs.has_none_before(table, place))

    if isinstance(before, datetime):
        time, moment = F.col("_cdc_commit_time"), as_of.moment(before)
        is_late = time >= moment
        # Messages outside of transactions have no time: they are removed together with a later transaction.
        early = [each.where(time < moment).agg(F.max(end_lsn)).collect()[0][0] for each in changes_before(before)]
        last_lsn = max(map(int, filter(None, early)), default=0)
        last_lsn = min([last_lsn, *(lsn - 1 for lsn in _copies_since(house, before))])
    else:
        is_late = F.col("_cdc_epoch") > before.epoch
        last_lsn = before.lsn - 1
    is_before = is_late & (end_lsn <= last_lsn)
    first = F.min(F.struct(end_lsn, F.unix_micros("_cdc_commit_time")))
    found = [each.where(is_before).agg(first).collect()[0][0] for each in changes_before(last_lsn + 1)]
    late = min((each for each in found if each is not None), key=itemgetter(0), default=None)
    if late is None:
        return last_lsn
    lsn = int(late[0])
    if isinstance(before, datetime):
        remedy = ". cdcpipe-spark purge --before with a later LSN passes it"
        _warn_of_future(f"change from {format_lsn(lsn)} on", as_of.time_of(late[1]), before, remedy)
    return lsn - 1


def _copies_since(house: Warehouse, since: datetime) -> list[int]:
    """Return the LSNs of the copies whose rows came to the tables at a time or later.

    The rows of a copy from a standby have the commit time of the last transaction there. If the primary is quiet, this may be days
    before the copy. A time that is yet to come does not count: this machine's clock was ahead during the copy.
    """
    begin, end = since.timestamp(), (datetime.now(UTC) + _MUCH_AHEAD).timestamp()
    versions = chain.from_iterable(house.all_versions().values())
    return [each.end_lsn for each in versions if each.copied_at is not None and begin <= each.copied_at < end]


_warned: set[str] = set()
"""What stays because of a transaction whose time is far ahead, as it was named: each is named once."""


def _warn_of_future(what: str, time: datetime, before: datetime, remedy: str = "") -> None:
    """Warn once of a transaction that keeps what follows it for long, although that is old: the server's clock was ahead.

    ``what`` says what stays, and where the transaction ends. ``time`` is its commit time.
    """
    if time > before + _MUCH_AHEAD and what not in _warned:
        _warned.add(what)
        _logger.warning(
            "no %s is removed by its age until the time of the transaction there, %s, is old enough, too: it is far ahead of later"
            " ones, because the server's clock was%s",
            what,
            time.isoformat(" "),
            remedy,
        )

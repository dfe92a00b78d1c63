"""Returns a table's rows at an earlier time, an LSN or a position. They are made from its changelog alone.

Transactions apply in the order of their commits in the WAL, each completely or not at all. ``at`` says where to stop:

- an LSN: after the transactions that end at or before it (``pg_current_wal_lsn()`` after a commit is such an LSN);
- a position, ``EPOCH:LSN``: the same, and before a later epoch begins;
- a time: before the first of the table's transactions that committed later, like PostgreSQL's ``recovery_target_time``. So the
  result is always a state that existed, even if commit times are not in the order of the commits. Captured DDL of the table is such
  a transaction, too. If a table was copied for the first time later, its first snapshot counts if there is no transaction in
  between: it shows the same rows. A later copy never counts for a time before it: it was made because the stream did not tell all
  rows, in a gap or after some ALTER TABLE.

If the table has a stored history (replica/history_table.py) that has the place, the rows are those of the versions valid there. It
may have them after a purge of the changelog, too, but then an LSN has to say where to stop: the times of purged commits are gone.

The rules are the replica's (replica/merge.py): the key comes from the table's versions (Version); unsent values come from earlier
changes of the row; a change of the key ends one row and begins another; TRUNCATE, and another table under the same name, end all
earlier rows. The columns are today's columns of the changelog; a column that was added later is NULL. Those that were gone from the
replica then are left out (`schema.table.gone_columns`).

Rows from before the beginning of the changelog appear with their first change, or with their snapshot. A place whose rows are not
known is a wrong argument (InvalidArgumentsError), and the hint says what is known: a time or an LSN before the beginning, an LSN in
a gap of the log (warehouse/gaps.py), and one that the tables have not reached. On a server with other traffic they reach LSNs
beyond their last change while ``cdcpipe-spark run`` is running (staging/account.py). After a purge of old changes
(upkeep/purge.py) the beginning is the first snapshot after the purged changes.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

from cdcpipe.errors import InvalidArgumentsError
from cdcpipe.lsn import LSN, format_lsn
from spark_sink.changelog.tables import changelogs_of
from spark_sink.replica.checks import check_key_kept, keyed_versions
from spark_sink.replica.history_table import rows_at
from spark_sink.replica.replay import replay, without_unneeded
from spark_sink.schema.table import DDL, copies_until, gone_columns
from spark_sink.spark import refused_settings
from spark_sink.staging.log import Position
from spark_sink.warehouse import gaps, new_changelogs, purged_changes
from spark_sink.warehouse.errors import WarehouseError
from spark_sink.warehouse.purged_changes import PurgedError
from spark_sink.warehouse.reached import reached_lsn
from spark_sink.warehouse.warehouse import FIRST_CHANGES, Warehouse

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from pyspark.sql import Column, DataFrame, SparkSession

    from spark_sink.schema.table import Table
    from spark_sink.warehouse.warehouse import Source

__all__ = ["At", "moment", "parse_at", "read_as_of", "time_of"]

_logger = logging.getLogger(__name__)

At = datetime | LSN | Position


def parse_at(text: str) -> At:
    """Read an LSN, a position, or an ISO 8601 time (UTC by default). Raises InvalidArgumentsError for any other text."""
    for parse in (LSN.parse, Position.parse, datetime.fromisoformat):
        try:
            found = parse(text.strip())
        except ValueError:
            continue
        return _aware(found) if isinstance(found, datetime) else found
    raise InvalidArgumentsError(
        f"neither a time nor an LSN: {text!r}",
        hint="a time is like '2026-03-01 12:30:00.5' (UTC) or 2026-03-01T12:30:00+01:00, an LSN like 0/171F388 or 1:0/171F388",
    )


def read_as_of(spark: SparkSession, warehouse: str | Path, table: str, at: At | str) -> DataFrame:
    """Return the rows that ``table`` ("schema.name") had at a time, an LSN or a position; see above.

    Raises InvalidArgumentsError if the warehouse does not have the table, or does not know its rows at that place. Raises
    WarehouseError for a table without a key, or that had lost its key and changed since, and for a warehouse without changes.
    Raises InitError for a session whose settings would skip or change values.
    """
    refused_settings.refuse_to_read(spark.conf.get)
    house = Warehouse.existing(warehouse)
    known = house.find(table)
    if isinstance(at, str):
        at = parse_at(at)
    elif isinstance(at, datetime):
        at = _aware(at)
    keyed_versions(house, known)
    source = house.source()
    known_lsn = reached_lsn(house, source)
    # Read the changes after the position and the copies are known, so that they reach it or go further, and have the copies' rows.
    copies = gaps.complete_copies(house, known)
    changes = changelogs_of(spark, house).read(known)

    @cache
    def last_lsn() -> int:
        found = _last_lsn(spark, house, known, changes, at, source, known_lsn)
        return _known_lsn(spark, house, known, at, found, copies) if isinstance(at, datetime) else found

    if not purged_changes.last_lsn(house, known):
        until_lsn = last_lsn()
        rows = rows_at(spark, house, known, until_lsn, changes)
    elif isinstance(at, LSN) and source.begin is not None and source.begin.lsn <= int(at) <= known_lsn:
        until_lsn = int(at)  # the changelog would not tell, the history does
        rows = rows_at(spark, house, known, until_lsn, changes)
    else:
        until_lsn, rows = 0, None
    if rows is None:
        until_lsn = last_lsn()
        begun_lsn = new_changelogs.begun_lsn(house, known)
        if until_lsn <= begun_lsn and not any(copy <= until_lsn for copy in copies):
            raise InvalidArgumentsError(
                f"the rows of {table} are not known at {at}: its changelog began anew at {format_lsn(begun_lsn)}",
                hint="ask for a later position",
            )
        try:
            rows = replay(house, known, changes, until_lsn=until_lsn)
        except PurgedError as ex:
            raise InvalidArgumentsError(f"the rows of {table} are not known at {at}: {ex.message}", hint=ex.hint) from ex
    gaps.check_known(house, known, until_lsn, copies)
    check_key_kept(house, known, changes, until_lsn)
    _logger.info("%s: rows as of %s", table, format_lsn(until_lsn))
    return without_unneeded(rows, gone_columns(house.versions(known), until_lsn))


def _aware(time: datetime) -> datetime:
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)


def _last_lsn(
    spark: SparkSession, house: Warehouse, table: Table, changes: DataFrame, at: At, source: Source, last_lsn: int
) -> int:
    """Return the LSN up to which the table's transactions count. The tables have everything up to ``last_lsn``.

    Raises InvalidArgumentsError if the changelog does not reach the place ``at``.
    """
    if source.position is None:
        raise WarehouseError(f"{house.name} has no changes yet", hint=FIRST_CHANGES)
    too_late = _is_after(at)
    if not isinstance(at, datetime):
        lsn = at.lsn if isinstance(at, Position) else int(at)
        reached = Position(source.position.epoch, last_lsn)
        if source.begin is not None and lsn < source.begin.lsn:
            raise InvalidArgumentsError(
                f"{format_lsn(lsn)} is before {source.begin}, the beginning of the log",
                hint=f"the tables are known from there to {reached}",
            )
        if lsn > last_lsn or (isinstance(at, Position) and at.epoch > source.position.epoch):
            raise InvalidArgumentsError(
                f"the tables are known to be complete only up to {reached}, not up to {at}",
                hint="wait while cdcpipe-spark run is running, or ask for an earlier position",
            )
        last_lsn = lsn
    end_lsn = F.col("_cdc_end_lsn")
    is_snapshot = F.col("_cdc_op") == "snapshot"
    found = changes.agg(
        F.min(F.when(too_late & ~is_snapshot, end_lsn)).alias("first_late"),
        F.collect_set(F.when(too_late & is_snapshot, end_lsn)).alias("late_copies"),
        F.min(end_lsn).alias("first"),
        F.min(F.when(is_snapshot, end_lsn)).alias("snapshot"),
        F.min(F.when(is_snapshot, F.unix_micros("_cdc_commit_time"))).alias("snapshot_us"),
    ).collect()[0]
    late_copies = sorted(found["late_copies"])
    late = [found["first_late"], *_limiting(house, table, at, late_copies), _late_command(spark, house, table, at)]
    last_lsn = min([last_lsn, *(lsn - 1 for lsn in late if lsn is not None)])
    # Is the first change of the table a snapshot? Then earlier rows are not known.
    begins_with_snapshot = found["snapshot"] is not None and found["snapshot"] == found["first"]
    if begins_with_snapshot and (found["snapshot"] > last_lsn or found["snapshot"] in late_copies):
        snapshot = format_lsn(found["snapshot"])
        since = time_of(found["snapshot_us"]) if isinstance(at, datetime) else snapshot
        raise InvalidArgumentsError(
            f"the rows of {table} are known only since its snapshot at {snapshot}, not at {at}", hint=f"ask for {since} or later"
        )
    if isinstance(at, datetime) and (found["first"] is None or found["first"] > last_lsn):
        _check_begun(spark, house, at)
    return last_lsn


def _limiting(house: Warehouse, table: Table, at: At, late_copies: Sequence[int]) -> Sequence[int]:
    """Return those of the copies after the place ``at``, in order, before which it is: all but one that shows the earlier rows."""
    if late_copies and isinstance(at, datetime) and _shows_earlier_rows(house, table, late_copies[0]):
        return late_copies[1:]
    return late_copies


def _late_command(spark: SparkSession, house: Warehouse, table: Table, at: At) -> int | None:
    """Return the LSN of the table's first version after the time ``at`` that captured DDL tells. It may come without any change."""
    logs = changelogs_of(spark, house)
    if not isinstance(at, datetime) or logs.state(DDL) is None:
        return None
    lsns = sorted({version.end_lsn for version in house.versions(table)})
    late = logs.read(DDL).where(_is_after(at) & F.col("_cdc_end_lsn").isin(lsns))
    lsn: int | None = late.agg(F.min("_cdc_end_lsn")).collect()[0][0]
    return lsn


def _shows_earlier_rows(house: Warehouse, table: Table, lsn: int) -> bool:
    """Tell whether the table's copy at ``lsn`` shows the rows from before it, too, as far as no change was in between.

    It does if it is the first one, and no changes are missing before it. An empty table's copy has no rows, but a version.
    """
    return not copies_until(house.versions(table), lsn - 1) and not any(each.gap.after_lsn < lsn for each in gaps.read(house))


def _known_lsn(spark: SparkSession, house: Warehouse, table: Table, at: datetime, last_lsn: int, copies: Collection[int]) -> int:
    """Return ``last_lsn``, or the beginning of a gap before it, if ``at`` is certainly before that gap.

    A gap has no time. But if some table has a change from before the gap that committed later than ``at``, then so did the gap.
    Raises InvalidArgumentsError if the rows are not known.
    """
    try:
        gaps.check_known(house, table, last_lsn, copies)
    except InvalidArgumentsError:
        for lsn in sorted(each.gap.after_lsn for each in gaps.read(house) if each.gap.after_lsn < last_lsn):
            if _is_before(spark, house, at, lsn):
                return lsn
        raise
    return last_lsn


def _is_before(spark: SparkSession, house: Warehouse, at: datetime, lsn: int) -> bool:
    """Tell whether some table has a change up to ``lsn`` that committed later than ``at``."""
    later = _is_after(at) & (F.col("_cdc_end_lsn") <= lsn)
    logs = changelogs_of(spark, house)
    return any(not logs.read(each).where(later).isEmpty() for each in house.tables() if logs.state(each) is not None)


def _is_after(at: At) -> Column:
    """Return an expression: whether the transaction of a change comes after the place to stop."""
    if isinstance(at, datetime):
        return F.col("_cdc_commit_time") > moment(at)
    if isinstance(at, Position):
        return F.col("_cdc_epoch") > at.epoch
    return F.col("_cdc_end_lsn") > int(at)


def moment(at: datetime) -> Column:
    """Return a time as an exact literal of Spark, to the microsecond."""
    since_epoch = at - datetime(1970, 1, 1, tzinfo=UTC)
    microseconds = (since_epoch.days * 86400 + since_epoch.seconds) * 1_000_000 + since_epoch.microseconds
    return F.timestamp_micros(F.lit(microseconds))


def time_of(micros: int) -> datetime:
    """Return a time that Spark gave in microseconds."""
    return datetime.fromtimestamp(0, UTC) + timedelta(microseconds=micros)


def _check_begun(spark: SparkSession, house: Warehouse, at: datetime) -> None:
    """Raise InvalidArgumentsError unless some table has a change from ``at`` or before. Only changes show when the log began."""
    first_times = []
    for table in house.tables():
        if changelogs_of(spark, house).state(table) is not None:
            changes = changelogs_of(spark, house).read(table)
            if not changes.where(~_is_after(at)).isEmpty():
                return
            first_times.append(changes.agg(F.unix_micros(F.min("_cdc_commit_time"))).collect()[0][0])
    first = min((micros for micros in first_times if micros is not None), default=None)
    hint = None if first is None else f"the first one committed at {time_of(first)}"
    raise InvalidArgumentsError(
        f"{at.isoformat(' ')} is before the first transaction in {house.name}: the rows of that time are not known", hint=hint
    )

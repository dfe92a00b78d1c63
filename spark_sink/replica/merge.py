"""Brings replicas to a later position of their changelogs. A replica has the current rows, and is made from its changelog alone.

With Delta Lake, the new changes are reduced to one row per key and merged in one commit, which also records the position. So a
commit that is made twice is skipped, and a deleted replica can be made again. There are three ways:

- ordinary_merge.py merges ordinary changes without Spark, and ordinary_fill.py fills new columns of small replicas.
- This module merges all others, by Spark's MERGE.
- If earlier rows have to change, too, this module rewrites the replica (with replay.py).

With Parquet, the replica is a view: each reader replays the whole changelog (current.py).

These rules hold everywhere; the changes of a key apply in the order of their positions:

- A snapshot is the whole table at its position. Earlier changes do not count any more.
- Changes from before the table had a key use the key that it got later, if they have its columns. Rows and changes without a value
  for the key are left out: no later change could find them. They are from before its columns, or from before these were NOT NULL.
- The last change of a key decides whether there is a row. A change of the key ends the row of the old key and begins one of the new
  key.
- An update may have only a part of the old key, if a partition has another replica identity than its table. It is a change of the
  key only if a value of this part differs. Nothing tells which row it was, so the table needs a copy.
- TRUNCATE ends all earlier rows. So do a captured DROP TABLE, and another table under the same name.
- A column that an update did not send (an unchanged TOAST value) keeps its value: from an earlier change, else from the replica;
  after a change of the key, from the row of the old key. If the value is nowhere, because the row is older than the slot, or the
  column came or was renamed since, it is NULL, and ``_cdc_unchanged`` has the column's name. A TOAST value itself is never NULL. So
  if a row has NULL before an update that left the column out, this NULL is from before the column, and the value is nowhere.
- An insert begins another row. If it lacks a value, because an update has brought the row into a row filter, the value is nowhere:
  that of an earlier row with the key, which may be deleted, is another one.
- A value that its column can't hold is NULL, with its text in ``_cdc_exact``. The text follows the value, also for an unsent
  column.
- A replica gets ``_cdc_unchanged`` and ``_cdc_exact`` when it needs them for the first time.
- If a column of the key has had several types, all its columns are compared, as text.
- A column that is gone (`schema.table.gone_columns`) leaves the replica before changes that come after it.
- With ``--deletes soft``, a replica keeps the last row of a key that has no row any more, with the commit time of its end in
  ``_cdc_deleted_at``. A snapshot deletes at its own time the rows that it does not have. A row that was never in the replica, and
  in no change before its delete, is not kept.
- If the catalog has certain values for a new column of earlier rows (changelog/versions.py), the rows get these.
"""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import unquote

from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it
from pyspark.sql.types import StructType

from spark_sink.changelog.tables import changelogs_of
from spark_sink.delta import log as delta_log
from spark_sink.delta import sql as delta
from spark_sink.delta.file_table import columns_with_nulls
from spark_sink.replica import reduction, row_keys
from spark_sink.replica.checks import check_growth, keyed_changes
from spark_sink.replica.layout import OPTIONAL, existing_rows, replica_properties
from spark_sink.replica.ordinary_fill import fill_without_spark
from spark_sink.replica.ordinary_merge import merge_without_spark
from spark_sink.replica.pieces import cut_pieces
from spark_sink.replica.replay import as_changes, changes_of, replay, replay_all, with_former, without_unneeded
from spark_sink.schema.table import copies_until, gone_columns, key_lost_at
from spark_sink.schema.types import DELETED_AT, replica_schema
from spark_sink.spark.jobs import Jobs
from spark_sink.spark.sql import literal, quote
from spark_sink.staging.log import Position
from spark_sink.warehouse import gaps, landed_snapshots, purged_changes, unchecked_merges
from spark_sink.warehouse.unchanged import check_unchanged
from spark_sink.warehouse.wanted_copies import SET_BACK, take_back_first, waits_for, want_copy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from pyspark.sql import Column, DataFrame, Row, SparkSession

    from spark_sink.delta.log import TableLog
    from spark_sink.replica.checks import Wants
    from spark_sink.replica.pieces import Piece
    from spark_sink.replica.reduction import Summary
    from spark_sink.schema.table import Table, Version
    from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["INTERRUPTED", "bring", "finish_merges", "finish_snapshots", "merge_changes", "remake"]


_logger = logging.getLogger(__name__)

INTERRUPTED = "a merge was interrupted before its rows were counted"
"""The reason for a copy of a table whose merge by Spark was killed at its end: nobody knows then whether its rows are all there."""


_BROADCAST_ROWS = 20_000
"""Up to this many changes are broadcast. Spark can't see that they are few, because it knows the sizes of files, not of rows."""


def bring(spark: SparkSession, warehouse: Warehouse, table: Table, until: Position) -> None:
    """Bring a Delta replica to ``until``. Creates the replica if it does not exist.

    A finished copy leaves the replica at its position, or later. A replica that is before it was put back from a backup. It is made
    anew from the copy: a merge would keep the rows that the copy does not have.
    """
    reached = delta_log.newest_lsn(warehouse.replica(table))
    if gaps.is_copied_since(warehouse, table, 0 if reached is None else reached + 1):
        lsn = max(until.lsn, *copies_until(warehouse.versions(table)))
        remake(spark, warehouse, table, Position(until.epoch, lsn))  # changes before the snapshot do not count any more
    else:
        merge_changes(spark, warehouse, table, until)


def merge_changes(spark: SparkSession, warehouse: Warehouse, table: Table, until: Position) -> None:
    """Bring a Delta replica from its position to ``until``. Does nothing for a table without a key."""
    path = warehouse.replica(table)
    pieces = list(cut_pieces(warehouse.versions(table), delta_log.newest_lsn(path) or 0, until.lsn))
    if not pieces:
        return
    purged_changes.check(warehouse, table, pieces[0].after_lsn)
    changes: DataFrame | None = None
    for until_lsn, together in itertools.groupby(pieces, lambda piece: piece.until_lsn):
        position = Position(until.epoch, until_lsn)
        first, *others = together
        if not others and _bring_without_spark(warehouse, table, first, position):
            continue
        if changes is None:
            changes = changelogs_of(spark, warehouse).read(table)
        if others or first.fills or (first.is_new_key and _has_others(spark, warehouse, table, changes, first)):
            _write_anew(spark, warehouse, table, changes, first.after_lsn, position)
        else:
            want = partial(want_copy, warehouse, table, position.lsn)
            unchecked_merges.record_start(warehouse, table, position.lsn)
            _merge_piece(spark, warehouse, table, changes_of(changes, first), first, position, want)
            unchecked_merges.record_check(warehouse, table)


def _bring_without_spark(warehouse: Warehouse, table: Table, piece: Piece, position: Position) -> bool:
    """Merge a piece without Spark, if its fills and its changes allow it. Returns whether the replica is at ``position``."""
    plain = replace(piece, fills=())
    if not plain.is_plain or (piece.fills and not fill_without_spark(warehouse, table, piece)):
        return False
    return merge_without_spark(warehouse, table, plain, position)


def remake(spark: SparkSession, warehouse: Warehouse, table: Table, position: Position) -> None:
    """Rebuild a Delta replica from the whole changelog, in one commit. Its position is ``position``, or later.

    If the table has lost its key, its position is that of its last copy, or the loss: a later key tells the changes since apart.
    Does nothing for a table without a key. Nobody else may write the table meanwhile.
    """
    path, versions = warehouse.replica(table), warehouse.versions(table)
    keys = [version.key for version in versions if version.key]
    if not keys:
        return
    changes_lsn, state = delta_log.newest_lsn(warehouse.changelog(table)), delta.state(path)
    if changes_lsn is None:
        return
    reached = (warehouse.source().position, Position(position.epoch, changes_lsn))
    until = max(position, *filter(None, reached), key=lambda each: each.lsn)
    until = Position(until.epoch, _appliable_lsn(versions, until.lsn))
    changes = changelogs_of(spark, warehouse).read(table)
    gone = gone_columns(versions, until.lsn)
    rows = without_unneeded(_remade(spark, warehouse, table, changes, until), gone, keeps_deleted=warehouse.keeps_deleted)
    if state is not None:
        delta.widen(spark, path, state.schema, rows.schema)
        delta.end_clustering(spark, path, gone)
    if state is None:
        with delta.recording(spark, until):
            delta.create(path, rows, _properties(warehouse, keys[-1], rows))
    elif state.lsn < until.lsn:
        with delta.recording(spark, until):
            delta.overwrite(path, rows, gone)
    else:
        # Without `recording`: Delta would skip a commit with a position that the table has already.
        delta.overwrite(path, rows, gone)


def _properties(warehouse: Warehouse, key: Sequence[str], rows: DataFrame) -> dict[str, str]:
    """Return the properties of a new replica with these rows."""
    return replica_properties(warehouse, key, reduction.data_columns(existing_rows(rows).schema))


def _appliable_lsn(versions: Sequence[Version], lsn: int) -> int:
    """Return the last LSN up to ``lsn`` at which a replay has all rows: it leaves out changes that no key tells apart."""
    lost = key_lost_at(versions, lsn)
    return lsn if lost is None else max([lost[0] - 1, *copies_until(versions, lsn)])


def _remade(spark: SparkSession, warehouse: Warehouse, table: Table, changes: DataFrame, until: Position) -> DataFrame:
    """Return the rows of a replica that is made anew after a snapshot. Deleted rows of the present replica are kept."""
    path, want = warehouse.replica(table), partial(want_copy, warehouse, table, until.lsn)
    snapshots = copies_until(warehouse.versions(table), until.lsn)
    # A copy of an empty table has no rows, and so `replay` does not see it. What came before is no reason for another copy.
    since = changes.where(F.col("_cdc_end_lsn") >= max(snapshots)) if snapshots else changes
    if not warehouse.keeps_deleted:
        return replay(warehouse, table, since, until_lsn=until.lsn, want=want)
    state = delta.state(path)
    is_set_back = state is not None and _is_set_back(warehouse, table)
    if is_set_back:
        if purged_changes.last_lsn(warehouse, table):
            _logger.warning(
                "%s: RESTORE has set the replica back, and earlier changes were purged: rows that were deleted before the copy may"
                " be missing, or have its time",
                table,
            )
        else:
            state = None  # the changelog has all deleted rows, and the replica has not
    if state is None:
        return replay_all(warehouse, table, changes, until_lsn=until.lsn, want=None if snapshots else want)
    rows = replay(warehouse, table, since, until_lsn=until.lsn, want=want, keeps_deleted=True)
    if not snapshots:
        return rows
    former = delta.read(spark, path)
    return with_former(warehouse, table, changes, rows, former, state.lsn, max(snapshots), until.lsn, is_set_back=is_set_back)


def _is_set_back(warehouse: Warehouse, table: Table) -> bool:
    """Tell whether RESTORE has set a replica back since its last copy. Then its position says nothing of its deleted rows."""
    end = delta_log.table_end(warehouse.replica(table))
    return (end is not None and end.is_restored) or waits_for(warehouse, table, SET_BACK.format("replica"))


def finish_snapshots(spark: SparkSession, warehouse: Warehouse, is_stopping: Callable[[], bool] = lambda: False) -> None:
    """Finish the snapshots that a killed process left unfinished.

    If the changelog has the snapshot's rows, the replica is rebuilt from it. Otherwise nothing of the snapshot is kept: the table
    must not count as copied. Only an empty table has a complete first snapshot without a row: a micro-batch makes no changelog
    before it has taken back what is unfinished (pipeline/micro_batch.py).

    Raises InterruptedError once ``is_stopping`` is True. The next call then makes the replica that this one was making.
    """
    if landed_snapshots.unfinished(warehouse):
        check_unchanged(warehouse)
        Jobs("finish").run(spark, lambda: _finish_snapshots(spark, warehouse), is_stopping)


def _finish_snapshots(spark: SparkSession, warehouse: Warehouse) -> None:
    for table, position in landed_snapshots.unfinished(warehouse):
        if not warehouse.has_changelog(table):
            take_back_first(warehouse, table, position)
        elif _has_rows_of(spark, warehouse, table, position):
            if warehouse.format.keeps_replicas:
                remake(spark, warehouse, table, position)
        elif landed_snapshots.adds_rows(warehouse, table):
            _take_back(warehouse, table, position)
        landed_snapshots.record_end(warehouse, table)


def _has_rows_of(spark: SparkSession, warehouse: Warehouse, table: Table, position: Position) -> bool:
    """Tell whether the changelog has the rows of the snapshot with this position."""
    # The snapshot of an empty table is a TRUNCATE. No transaction ends at the LSN of a snapshot.
    is_its = F.col("_cdc_op").isin("snapshot", "truncate") & (F.col("_cdc_end_lsn") == position.lsn)
    return not changelogs_of(spark, warehouse).read(table).where(is_its).isEmpty()


def _take_back(warehouse: Warehouse, table: Table, position: Position) -> None:
    """Remove the version of a snapshot whose rows did not come to the changelog.

    If the stream is past it, it stays as a plain version: the stream has recorded no version that says the same.
    """
    versions, place = warehouse.versions(table), (position.lsn, 0)
    taken = next((version for version in versions if version.snapshot and version.place == place), None)
    if taken is None:
        return  # the process was killed before it wrote the version
    before, after = [each for each in versions if each.place < place], [each for each in versions if each.place > place]
    is_past = (warehouse.format.lsn(warehouse.changelog(table)) or 0) > position.lsn
    if after or is_past:  # what is known of earlier rows was decided for those of the copy
        want_copy(warehouse, table, position.lsn, landed_snapshots.KILLED)
    gone = tuple(sorted(gone_columns(versions, position.lsn)))
    plain = replace(taken, snapshot=(), described=(), is_whole=False, copied_at=None, gone=gone)
    is_kept = is_past and not (before and plain.says_nothing_after(before[-1]))
    warehouse.write_versions(table, [*before, *([plain] if is_kept else []), *after])
    _logger.warning("a copy of %s was killed before its rows were in the changelog: nothing of it is kept", table)


def finish_merges(warehouse: Warehouse) -> None:
    """Let the tables be copied whose last merge a killed process has committed, and perhaps not checked."""
    for table, lsn in unchecked_merges.unchecked(warehouse):
        if (delta_log.newest_lsn(warehouse.replica(table)) or 0) >= lsn:
            want_copy(warehouse, table, lsn, INTERRUPTED)
        unchecked_merges.record_check(warehouse, table)


def _has_others(spark: SparkSession, warehouse: Warehouse, table: Table, changes: DataFrame, piece: Piece) -> bool:
    """Tell whether the replica has rows without a value for the key, or may have several deleted rows with one key."""
    path = warehouse.replica(table)
    if not delta_log.exists(path):
        return False
    if warehouse.keeps_deleted:
        return True
    rows = as_changes(delta.read(spark, path), changes.schema)
    return bool(reduction.with_key(rows, piece.columns).count() < rows.count())


def _write_anew(
    spark: SparkSession, warehouse: Warehouse, table: Table, changes: DataFrame, after_lsn: int, until: Position
) -> None:
    """Bring the replica to ``until`` by rewriting it in one commit, because a MERGE could not do it in one.

    This is for a transaction in which the key changes, and for pieces that begin with fills of earlier rows.
    """
    path = warehouse.replica(table)
    base = delta.read(spark, path) if delta_log.exists(path) else None
    want = partial(want_copy, warehouse, table, until.lsn)
    play, keeps_deleted = (replay_all, True) if warehouse.keeps_deleted else (replay, False)
    made = play(warehouse, table, changes, base, after_lsn=after_lsn, until_lsn=until.lsn, is_checked=True, want=want)
    gone = gone_columns(warehouse.versions(table), until.lsn)
    rows = without_unneeded(made, gone, keeps_deleted=keeps_deleted)
    if base is not None:
        delta.widen(spark, path, base.schema, rows.schema)
        delta.end_clustering(spark, path, gone)
    with delta.recording(spark, until):
        if base is not None:
            delta.overwrite(path, rows, gone)
        else:
            key = next(version.key for version in reversed(warehouse.versions(table)) if version.end_lsn <= until.lsn)
            delta.create(path, rows, _properties(warehouse, key, rows))


def _merge_piece(
    spark: SparkSession, warehouse: Warehouse, table: Table, changes: DataFrame, piece: Piece, position: Position, want: Wants
) -> None:
    """Merge the changes of one piece into the replica, and record ``position``."""
    path, part, keeps_deleted = warehouse.replica(table), changes, warehouse.keeps_deleted
    changes = reduction.without_marks(changes, piece.gone)
    changes, summary = keyed_changes(changes, piece, table, want)
    ends_all = summary.truncated_at is not None or piece.is_new_table
    if delta_log.exists(path):
        if ends_all and keeps_deleted:
            _write_anew(spark, warehouse, table, part, piece.after_lsn, position)
            return
        delta.drop_columns(spark, path, piece.gone)
    columns = [name for name in reduction.data_columns(changes.schema) if name not in piece.gone]
    rows = reduction.reduce(changes, piece.columns, columns, summary, keeps_deleted=keeps_deleted)
    state = delta.state(path)
    if state is not None:
        delta.widen(spark, path, state.schema, changes.select(*map(quote, columns)).schema)
    if state is None or ends_all:
        existing = [] if state is None else [name for name in OPTIONAL if name in state.schema.names]
        rows = _laid_out(rows, columns, summary, existing)
        with delta.recording(spark, position):
            if state is not None:
                delta.overwrite(path, rows)
            else:
                delta.create(path, rows, replica_properties(warehouse, piece.key, columns))
        check_growth(table, piece, reduction.growth(changes, summary), existing_rows(delta.read(spark, path)).count(), want)
        return
    wanted = [changes.schema[name] for name in columns]
    if summary.exact:
        wanted.append(OPTIONAL["_cdc_exact"])
    delta.add_columns(spark, path, state.schema, replica_schema(StructType(wanted), keeps_deleted=keeps_deleted))
    current = delta.read(spark, path)
    before = existing_rows(current).count() if keeps_deleted else 0  # MERGE does not tell how many rows it has revived
    if summary.has_partial_moves:  # it reads the whole replica
        rows = _fill_moved(rows, current, piece, summary)
    if summary.unchanged:
        rows = rows.withColumn("_cdc_moved", F.array_union("_cdc_moved", "_cdc_unknown"))
    if summary.unchanged and "_cdc_unchanged" not in current.columns:
        with warehouse.logs.newest(path) as log:
            is_needed = _has_unknown(rows, current, log, piece, summary)
        if is_needed:
            delta.add_columns(spark, path, current.schema, StructType([OPTIONAL["_cdc_unchanged"]]))
            current = delta.read(spark, path)
    for done in _run_merge(spark, path, rows, current, piece, columns, summary, position):
        grown = done["num_inserted_rows"] - done["num_deleted_rows"]
        if keeps_deleted:
            grown = existing_rows(delta.read(spark, path)).count() - before
        check_growth(table, piece, summary.growth, grown, want)


def _laid_out(rows: DataFrame, columns: Sequence[str], summary: Summary, optional: Sequence[str]) -> DataFrame:
    """Return reduced rows as the rows of a new replica with the ``optional`` columns."""
    deleted_at = [DELETED_AT] if DELETED_AT in rows.columns else []
    rows = rows.where(F.col("_cdc_has_row") if deleted_at else ~F.col("_cdc_gone"))
    unknown = F.array_union(F.array_union("_cdc_missing", "_cdc_moved"), "_cdc_unknown")
    needed = {"_cdc_exact": bool(summary.exact), "_cdc_unchanged": False}
    if summary.unchanged and "_cdc_unchanged" not in optional:
        needed["_cdc_unchanged"] = not rows.where(F.size(unknown) > 0).isEmpty()
    kept = [name for name in OPTIONAL if needed[name] or name in optional]
    rows = rows.withColumn("_cdc_unchanged", F.when(F.size(unknown) > 0, unknown))
    return rows.select(*(F.col(quote(name)) for name in (*columns, *deleted_at, *kept)))


def _fill_moved(rows: DataFrame, current: DataFrame, piece: Piece, summary: Summary) -> DataFrame:
    """Give rows whose key has changed the values that the replica has for their old key."""
    has_texts = "_cdc_exact" in current.columns
    origin = current.select(
        row_keys.key_struct(current, piece.columns, rows.schema).alias("_cdc_at"),
        F.struct(*map(quote, [*summary.unchanged, *(["_cdc_exact"] if has_texts else [])])).alias("_cdc_there"),
        _absent(current, summary.unchanged).alias("_cdc_absent"),
    )
    is_moved = F.size("_cdc_moved") > 0
    joined = rows.join(origin, is_moved & (F.col("_cdc_origin") == F.col("_cdc_at")), "left")
    there = {name: F.col("_cdc_there").getField(name) for name in summary.unchanged}
    filled = {
        name: F.when(F.array_contains("_cdc_moved", name), value).otherwise(F.col(quote(name))) for name, value in there.items()
    }
    if has_texts:
        filled["_cdc_exact"] = F.expr(_exact_sql("_cdc_exact", "_cdc_there._cdc_exact", "_cdc_moved"))
    still = F.when(F.col("_cdc_at").isNull(), F.col("_cdc_moved")).otherwise(F.array_intersect("_cdc_moved", "_cdc_absent"))
    return joined.withColumns(filled | {"_cdc_moved": still}).drop("_cdc_at", "_cdc_there", "_cdc_absent")


def _absent(rows: DataFrame, names: Sequence[str]) -> Column:
    """Return an expression for the columns in which a replica's row has neither a value nor an exact text."""
    return F.expr(_absent_sql(rows, names))


def _absent_sql(rows: DataFrame, names: Sequence[str], row: str = "") -> str:
    has_texts = "_cdc_exact" in rows.columns
    parts = []
    for name in names:
        text = f" AND {row}_cdc_exact[{literal(name)}] IS NULL" if has_texts else ""
        parts.append(f"IF({row}{quote(name)} IS NULL{text}, {literal(name)}, NULL)")
    return f"array_compact(CAST(array({', '.join(parts)}) AS ARRAY<STRING>))"


def _exact_sql(exact: str, before: str, names: str) -> str:
    """Return SQL for a row's exact texts, and the texts that it had ``before`` in the columns ``names`` (an array)."""
    kept = f"map_filter({before}, (name, _) -> array_contains({names}, name))"
    return f"IF(size({kept}) > 0, map_concat(coalesce({exact}, CAST(map() AS MAP<STRING, STRING>)), {kept}), {exact})"


def _has_unknown(rows: DataFrame, current: DataFrame, log: TableLog, piece: Piece, summary: Summary) -> bool:
    """Tell whether some unsent value is neither in the changes nor in the replica, whose ``current`` rows ``log`` has.

    A row of the replica may lack a value only in a column that has NULL somewhere. Such columns are read from the files that have
    rows with these keys, because their values may be large. (MERGE reads the same files.)
    """
    is_moved = F.size("_cdc_moved") > 0
    incomplete = rows.where((F.size("_cdc_missing") > 0) | is_moved).select("_cdc_key", "_cdc_missing", "_cdc_moved")
    ranges = _ranges_sql(row_keys.key_sql(current.schema, piece.columns, changes=rows.schema), summary)
    in_range = current.where(" AND ".join(["true", *ranges]))
    key = row_keys.key_struct(current, piece.columns, rows.schema).alias("_cdc_key")
    # `F.col` would find a column that the table itself calls so.
    keys = in_range.select(key, current.metadataColumn("_metadata")["file_name"].alias("_cdc_file"))
    file = F.when(~is_moved, F.col("_cdc_file"))  # null also for a row that is not there
    files = {row[0] for row in incomplete.join(keys, "_cdc_key", "left").select(file).distinct().collect()}
    if None in files:
        return True
    with_nulls = columns_with_nulls(log, summary.unchanged)
    if not (files and with_nulls):
        return False
    there = delta.read_files(rows.sparkSession, log, {unquote(name) for name in files})
    key = row_keys.key_struct(there, piece.columns, rows.schema).alias("_cdc_key")
    absent = there.select(key, _absent(there, with_nulls).alias("_cdc_absent"))
    return not incomplete.join(absent, "_cdc_key").where(F.arrays_overlap("_cdc_missing", "_cdc_absent")).isEmpty()


def _ranges_sql(keys: Sequence[str], summary: Summary) -> list[str]:
    """Return conditions of SQL for the range in which the changes have each column of the key."""
    return [f"{keys[i]} BETWEEN {of_key[0]} AND {of_key[1]}" for i, of_key in enumerate(summary.ranges) if of_key is not None]


def _run_merge(
    spark: SparkSession,
    path: Path,
    rows: DataFrame,
    current: DataFrame,
    piece: Piece,
    columns: Sequence[str],
    summary: Summary,
    position: Position,
) -> list[Row]:
    """Merge reduced rows into the replica, and record ``position``. Returns MERGE's report; empty if it was done before."""
    keys = row_keys.key_sql(current.schema, piece.columns, "t.", "t._cdc_exact", changes=rows.schema)
    terms = [f"{key} = s._cdc_key.k{index}" for index, key in enumerate(keys)]
    # Delta skips files only by conditions on the target table. So add the range of each key column.
    terms += _ranges_sql(keys, summary)
    condition = " AND ".join(terms)
    inserted = {name: f"s.{quote(name)}" for name in columns}
    updated = dict(inserted)
    for name in summary.unchanged:
        quoted = quote(name)
        updated[name] = f"IF(array_contains(s._cdc_missing, {literal(name)}), t.{quoted}, s.{quoted})"
    if "_cdc_exact" in current.columns:
        inserted["_cdc_exact"] = updated["_cdc_exact"] = "s._cdc_exact"
        if summary.unchanged:
            updated["_cdc_exact"] = _exact_sql("s._cdc_exact", "t._cdc_exact", "s._cdc_missing")
    if "_cdc_unchanged" in current.columns:
        unknown = "array_union(s._cdc_missing, s._cdc_moved)"
        inserted["_cdc_unchanged"] = f"IF(size({unknown}) > 0, {unknown}, NULL)"
        unknown = f"array_union(array_intersect(s._cdc_missing, {_absent_sql(current, summary.unchanged, 't.')}), s._cdc_moved)"
        updated["_cdc_unchanged"] = f"IF(size({unknown}) > 0, {unknown}, NULL)" if summary.unchanged else "NULL"
    is_new, when_gone = "NOT s._cdc_gone", "WHEN MATCHED AND s._cdc_gone THEN DELETE "
    if DELETED_AT in rows.columns:
        inserted[DELETED_AT] = updated[DELETED_AT] = f"s.{DELETED_AT}"
        kept = f"t.{DELETED_AT} = coalesce(t.{DELETED_AT}, s.{DELETED_AT})"
        is_new, when_gone = "s._cdc_has_row", f"WHEN MATCHED AND NOT s._cdc_has_row THEN UPDATE SET {kept} "
    if summary.count <= _BROADCAST_ROWS:
        rows = rows.hint("broadcast")
    with delta.temporary_view(rows, "replica_source") as source, delta.recording(spark, position):
        done: list[Row] = spark.sql(
            f"MERGE INTO {delta.table_name(path)} t USING {source} s ON {condition} "
            f"{when_gone}WHEN MATCHED THEN UPDATE SET {', '.join(f't.{quote(c)} = {v}' for c, v in updated.items())} "
            f"WHEN NOT MATCHED AND {is_new} THEN INSERT ({', '.join(map(quote, inserted))}) "
            f"VALUES ({', '.join(inserted.values())})"
        ).collect()
        return done

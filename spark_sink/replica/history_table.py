"""Keeps the stored history of a table: a Delta table with the versions that `replica.history.read_history` returns.

Each round takes the changes since the history's position, and commits once. The commit records the new position.

- Ordinary changes touch a few rows: they end the current versions of these, and add new ones. ordinary_history.py does this without
  Spark, and leaves some of them to a MERGE.
- Other changes touch all rows (TRUNCATE, a snapshot, another key, fills). Then the current versions are replaced. The versions that
  ended before stay as they are.
- A snapshot may come to the changelog after later changes have come to the history. Then the history goes back to the position of
  the snapshot: versions that began later are removed, versions that ended later are current again, and the changes from there on
  apply once more.

So a history is the same whether it was brought up to date in one round or in many.

A history needs only the changes after its position. So a purge of the changelog keeps these, and the history keeps what the purge
removes. upkeep/purge.py removes old versions from a history.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

from spark_sink.changelog.tables import changelogs_of
from spark_sink.delta import log as delta_log
from spark_sink.delta import sql as delta
from spark_sink.replica import reduction, row_keys
from spark_sink.replica.ends import ends_all
from spark_sink.replica.history import as_history, as_stored, first_known, history_schema, make_versions, own_names
from spark_sink.replica.ordinary_history import merge_without_spark
from spark_sink.replica.pieces import cut_pieces
from spark_sink.replica.replay import as_changes, changes_of
from spark_sink.schema.table import copies_until, has_key
from spark_sink.spark.sql import quote
from spark_sink.staging.log import Position
from spark_sink.warehouse import landed_snapshots, new_changelogs, purged_changes, stored_histories
from spark_sink.warehouse.errors import WarehouseError
from spark_sink.warehouse.stored_histories import first_properties, properties

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from spark_sink.replica.pieces import Piece
    from spark_sink.schema.table import Table, Version
    from spark_sink.warehouse.lock import TableLock
    from spark_sink.warehouse.stored_histories import HistoryFacts
    from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["bring", "rows_at"]


def bring(spark: SparkSession, house: Warehouse, table: Table, until: Position, lock: TableLock) -> None:
    """Bring a table's history to the position ``until`` of its changelog. Creates the history if it does not exist.

    Does nothing for a table without a key, and for one with an unfinished snapshot. Raises WarehouseError if changes that it needs
    have been purged, if another program has set the history back, or if the history forgets its position. The caller holds the
    right to write histories. ``lock`` is the lock of this process's pipeline.
    """
    path, known = house.history(table), stored_histories.facts(house, table)
    if known is not None:
        if known.is_restored and not known.is_noted:
            delta.set_properties(spark, path, properties(is_restored=True))
        _check(path, table, known)
    with lock.reading():
        versions = _versions(house, table)
    if not versions or merge_without_spark(house, table, versions, known, until):
        return
    with lock.reading():
        versions = _versions(house, table)
        if not versions:
            return
        # What follows may take long. It uses this version of the changelog, so that a snapshot may be landed meanwhile.
        changes = changelogs_of(spark, house).read(table)
    after_lsn = first_known(house, table, changes) if known is None else known.known_lsn(versions)
    pieces = list(cut_pieces(versions, after_lsn, until.lsn))
    if not pieces:
        return
    step = _Round(spark, path, table, versions, changes, after_lsn, Position(until.epoch, pieces[-1].until_lsn))
    if known is None:
        step.create(house)
        return
    if after_lsn < purged_changes.last_lsn(house, table) or known.lsn < new_changelogs.begun_lsn(house, table):
        raise WarehouseError(
            f"the history of {table} lacks changes that its changelog does not have any more",
            hint=f"move {path} away: a new history begins with what the changelog has",
        )
    if step.fit_columns():
        step.rewrite()
    elif after_lsn == known.lsn and len(pieces) == 1 and _touches_few(changes, pieces[0]):
        step.merge(pieces[0])
    else:
        step.replace_current()
    if step.copies != known.copies:
        delta.set_properties(spark, path, properties(copies=step.copies))


def _check(path: Path, table: Table, known: HistoryFacts) -> None:
    """Raise WarehouseError if a history can't go on."""
    anew = f"move {path} away: a new history begins with what the changelog has"
    if known.is_restored:
        raise WarehouseError(
            f"RESTORE has set the history of {table} back to an earlier version, and it lacks versions since", hint=anew
        )
    if known.lsn == 0:  # each history begins with a position; without it all changes would come again
        raise WarehouseError(f"the history of {table} has lost the place up to which it has the changes", hint=anew)
    if known.forgets_lsn:
        raise WarehouseError(
            f"the history of {table} has the property {delta_log.POSITION_RETENTION}, with which it forgets the place up to which"
            " it has the changes",
            hint=f"ALTER TABLE {delta.table_name(path)} UNSET TBLPROPERTIES ('{delta_log.POSITION_RETENTION}')",
        )


def _versions(house: Warehouse, table: Table) -> Sequence[Version]:
    """Return the versions of a table; none if its history can't go on now: it has no key, or an unfinished snapshot."""
    versions = house.versions(table)
    is_unfinished = any(unfinished == table for unfinished, _ in landed_snapshots.unfinished(house))
    return versions if has_key(versions) and not is_unfinished else ()


def rows_at(spark: SparkSession, house: Warehouse, table: Table, lsn: int, changes: DataFrame) -> DataFrame | None:
    """Return the rows of an LSN in the layout of the changelog ``changes``, from the stored history. None if it lacks them.

    The changelog has all changes up to ``lsn``. The rows stay the same, also after a purge of the history.
    """
    changelog_lsn = house.format.lsn(house.changelog(table)) or lsn  # read first: the history may go on
    with house.logs.newest(house.history(table)) as log:
        found = stored_histories.facts_in(log)
        if found is None or not found.has(lsn, house.versions(table), changelog_lsn):
            return None
        stored = delta.read_at(spark, log)
    return as_changes(_valid_at(stored, changes, lsn), changes.schema)


@dataclass(frozen=True, slots=True)
class _Round:
    """One round of one history: the changes after ``after_lsn``, up to ``until``. Each method but the first two commits once."""

    spark: SparkSession
    path: Path
    table: Table
    versions: Sequence[Version]
    changes: DataFrame
    after_lsn: int
    until: Position

    @property
    def copies(self) -> frozenset[int]:
        """The LSNs of the snapshots that the history knows after this round."""
        return copies_until(self.versions, self.until.lsn)

    def fit_columns(self) -> bool:
        """Add and widen columns as in the changelog; return True, and do nothing, if the history's own columns need other names."""
        state, wanted = delta.state(self.path), history_schema(self.changes.schema)
        assert state is not None
        if own_names(state.schema.names) != own_names(wanted.names):
            return True
        delta.widen(self.spark, self.path, state.schema, wanted)
        delta.add_columns(self.spark, self.path, state.schema, wanted)
        return False

    def create(self, house: Warehouse) -> None:
        """Create the history."""
        made, after_lsn = self._made(None), self.after_lsn
        if not after_lsn:
            # Before a snapshot with which the changelog begins, the rows are not known.
            end_lsn = F.col("_cdc_end_lsn")
            first = self.changes.agg(F.min(end_lsn).alias("lsn"), F.min_by("_cdc_op", end_lsn).alias("op")).collect()[0]
            after_lsn = first["lsn"] - 1 if first["op"] == "snapshot" else 0
        with delta.recording(self.spark, self.until):
            delta.create(self.path, made, first_properties(house, self.table, after_lsn, self.copies))

    def merge(self, piece: Piece) -> None:
        """End the current versions of the rows that the changes of a plain piece touch, and add the new versions."""
        part = changes_of(self.changes, piece)
        summary = reduction.summarize(part, piece.columns)
        stored = self._stored()
        current = as_stored(stored, self.changes.schema).where(F.col("_cdc_to_lsn").isNull())
        touched = reduction.touched_keys(part, piece.columns)
        current = current.join(touched, row_keys.key_struct(current, piece.columns) == F.col("_cdc_touched"), "left_semi")
        made = self._made(current)
        keys = row_keys.key_sql(stored.schema, piece.columns, "t.", "t._cdc_exact", changes=made.schema)
        own = own_names(made.columns)
        theirs = row_keys.key_sql(made.schema, piece.columns, "s.", "s._cdc_exact")
        terms = [f"{key} = {their}" for key, their in zip(keys, theirs, strict=True)]
        # Delta skips files only by conditions on the target table. So add the range of each key column.
        terms += [f"{keys[i]} BETWEEN {of_key[0]} AND {of_key[1]}" for i, of_key in enumerate(summary.ranges) if of_key is not None]
        terms += [f"t.{own['to_lsn']} IS NULL", f"t.{own['from_lsn']} = s.{own['from_lsn']}"]
        ends = ", ".join(f"t.{own[name]} = s.{own[name]}" for name in ("to_lsn", "valid_to", "is_current"))
        # Delta's INSERT * does not quote a backtick in a column's name.
        columns = [*map(quote, made.columns)]
        with delta.temporary_view(made, "history_source") as source, delta.recording(self.spark, self.until):
            self.spark.sql(
                f"MERGE INTO {delta.table_name(self.path)} t USING {source} s ON {' AND '.join(terms)} "
                f"WHEN MATCHED THEN UPDATE SET {ends} WHEN NOT MATCHED THEN INSERT ({', '.join(columns)}) "
                f"VALUES ({', '.join(f's.{column}' for column in columns)})"
            ).collect()

    def replace_current(self) -> None:
        """Replace the versions that are current at ``after_lsn``, and all later ones, by those that the changes make of them."""
        made = self._made(_valid_at(self._stored(), self.changes, self.after_lsn))
        to_lsn = own_names(made.columns)["to_lsn"]
        with self._recording():
            delta.replace(self.path, made, f"{to_lsn} IS NULL OR {to_lsn} > {self.after_lsn}")

    def rewrite(self) -> None:
        """Write the whole history anew: the table has got a column with the name of one of the history's."""
        stored = self._stored()
        ended = as_stored(stored, self.changes.schema).where(F.col("_cdc_to_lsn") <= self.after_lsn)
        made = self._made(_valid_at(stored, self.changes, self.after_lsn))
        rows = as_history(ended, self.changes.schema).unionByName(made).localCheckpoint()
        delta.end_clustering(self.spark, self.path, stored.columns)
        with self._recording():
            delta.overwrite(self.path, rows, own_names(stored.columns).values())

    def _stored(self) -> DataFrame:
        return delta.read(self.spark, self.path)

    def _made(self, current: DataFrame | None) -> DataFrame:
        """Return the versions that the changes make, and the ``current`` ones, some of which they end."""
        return make_versions(self.versions, self.table, self.changes, self.after_lsn, self.until.lsn, current)

    def _recording(self) -> AbstractContextManager[None]:
        """Let the commit record the position, unless the table is there already: Delta would skip the commit."""
        is_further = (delta_log.newest_lsn(self.path) or 0) < self.until.lsn
        return delta.recording(self.spark, self.until) if is_further else nullcontext()


def _touches_few(changes: DataFrame, piece: Piece) -> bool:
    """Tell whether the changes of a piece touch only rows with their keys."""
    everything = ends_all() | (F.col("_cdc_op") == "snapshot")
    return piece.is_plain and changes_of(changes, piece).where(everything).isEmpty()


def _valid_at(stored: DataFrame, changes: DataFrame, lsn: int) -> DataFrame:
    """Return the versions that are valid at an LSN, as current ones, in the layout of the changelog ``changes``."""
    rows = as_stored(stored, changes.schema)
    from_lsn, to_lsn = F.col("_cdc_from_lsn"), F.col("_cdc_to_lsn")
    nothing = {"_cdc_to_lsn": F.lit(None).cast("bigint"), "_cdc_to_time": F.lit(None).cast("timestamp")}
    return rows.where((from_lsn <= lsn) & (to_lsn.isNull() | (to_lsn > lsn))).withColumns(nothing)

"""Replica tables: a source table's current rows, made from its changelog and from nothing else.

With Delta Lake the changes that are new in the changelog are reduced to one row per key and merged in one commit, which
records how far the replica is: a commit made twice is skipped, and a replica that was deleted is made again from the
changelog. With Parquet the replica is ``view``, the same reduction over the whole changelog.

The rules (the changes of a key in the order of their positions):

- A snapshot is the whole table as it was there, whatever was before.
- Changes from a time without a key count by the key that came later, if they have its columns. Rows that have no value
  for a later key, because its columns came after them, are left out as such changes are: nothing would find them again.
- The last change decides: a row, or none. A change of the key is the end of the old key and the beginning of the new one.
- TRUNCATE ends all rows before it, and so does another table under the same name.
- A column that an update did not send (an unchanged TOAST value) has the value that it had before: from an earlier
  change, else from the replica; after a change of the key, from the row under its old key. Where nobody has it, because
  the row is older than the slot or the column was renamed since, it is NULL and its name is in ``_cdc_unchanged``, a
  column that the replica gets the first time it needs it. (A TOAST value itself is never NULL.)
- A value that its column can't hold is NULL and stands in ``_cdc_exact``, which the replica gets in the same way. The text goes
  where the value goes: it is found for a column that was not sent, too.
- A key's column that has had several types is matched over all of them, as text.
- Where the catalog says for certain what rows from before have in a new column (changelog/versions.py), they get that.
"""

from __future__ import annotations

import itertools
import json
import logging
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql.types import ArrayType, MapType, StringType, StructField, StructType

from spark_sink.changelog import tables as changelog
from spark_sink.delta import sql as delta
from spark_sink.replica import reduction, small_merge
from spark_sink.replica.fills import filled
from spark_sink.schema.table import Fill, Table, Version
from spark_sink.spark.sql import literal, quote
from spark_sink.staging.log import Position
from spark_sink.warehouse.warehouse import Warehouse, WarehouseError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pyspark.sql import Column, DataFrame, Row, SparkSession

    from spark_sink.replica.reduction import Key, Summary

__all__ = ["apply", "bring", "finish_snapshots", "properties", "register_views", "remake", "replay", "view", "without_unneeded"]

_logger = logging.getLogger(__name__)

_view_numbers = itertools.count()

_BROADCAST_ROWS = 20_000
"""So many changes are sent to where the replica's rows are. Spark can't tell that they are few: it knows files, not rows."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Changes that share one key: those with ``after_lsn`` < end LSN <= ``until_lsn``, in whole transactions.

    Or, where the key changes amid a transaction, those of that one with ``first_ordinal`` <= ordinal < ``end_ordinal``.
    """

    key: tuple[str, ...]
    columns: Key
    after_lsn: int
    until_lsn: int
    is_new_table: bool
    """Whether the rows so far are those of another table, which had this one's name before."""
    first_ordinal: int = 0
    end_ordinal: int | None = None
    fills: tuple[Fill, ...] = ()
    """What is done with the rows so far."""
    is_before_key: bool = False
    """Whether these are from a time without a key."""
    is_new_key: bool = False
    """Whether the rows so far may have no value for the key."""
    has_all: bool = False
    """Whether a snapshot came before: then the replica has every row that these changes can be of."""

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing to it but changes that share one key, each column of it of one type."""
        is_whole = not self.first_ordinal and self.end_ordinal is None
        has_one_type = all(len(names) == 1 for names in self.columns)
        return is_whole and has_one_type and not (self.is_new_table or self.is_new_key or self.fills or self.is_before_key)


def apply(spark: SparkSession, warehouse: Warehouse, table: Table, until: Position) -> None:
    """Bring a Delta replica from where it stands to ``until``; a table without a key gets none."""
    path = warehouse.replica(table)
    pieces = list(_pieces(warehouse.versions(table), delta.newest_lsn(path) or 0, until.lsn))
    if not pieces:
        return
    warehouse.check_changes(table, pieces[0].after_lsn)
    if _is_merged_here(warehouse, table, pieces, until):
        return
    changes = changelog.read(spark, warehouse, table)
    for until_lsn, together in itertools.groupby(pieces, lambda piece: piece.until_lsn):
        position = Position(until.epoch, until_lsn)
        first, *others = together
        if others or first.fills or (first.is_new_key and _has_keyless(spark, path, changes, first)):
            _apply_anew(spark, warehouse, table, changes, first.after_lsn, position)
        else:
            _apply_piece(spark, path, table, _part(changes, first), first, position)


def _is_merged_here(warehouse: Warehouse, table: Table, pieces: Sequence[_Piece], until: Position) -> bool:
    """Bring the replica there without Spark, if that can be done; return whether it was."""
    piece = pieces[0]
    if len(pieces) > 1 or not piece.is_plain:
        return False
    return small_merge.apply(
        warehouse.changelog(table),
        warehouse.replica(table),
        [names[0] for names in piece.columns],
        piece.after_lsn,
        Position(until.epoch, piece.until_lsn),
        lambda columns: properties(piece.key, columns),
        lambda wanted, grown: _check_growth(table, piece, wanted, grown),
    )


def bring(spark: SparkSession, warehouse: Warehouse, table: Table, until: Position) -> None:
    """Bring a Delta replica to ``until``, whether it is there or not."""
    has_snapshot = any(version.snapshot for version in warehouse.versions(table))
    if has_snapshot and not delta.exists(warehouse.replica(table)):
        remake(spark, warehouse, table, until)  # what was before the snapshot counts no more
    else:
        apply(spark, warehouse, table, until)


def remake(spark: SparkSession, warehouse: Warehouse, table: Table, position: Position) -> None:
    """Make a Delta replica anew, in one commit, of all that the changelog has: everything up to ``position``, if not more.

    A table without a key gets none. Nobody else writes the table meanwhile.
    """
    path, versions = warehouse.replica(table), warehouse.versions(table)
    keys = [version.key for version in versions if version.key]
    if not keys:
        return
    changes_lsn, state = delta.newest_lsn(warehouse.changelog(table)), delta.state(path)
    if changes_lsn is None:
        return
    reached = (warehouse.source().position, Position(position.epoch, changes_lsn))
    until = max(position, *filter(None, reached), key=lambda each: each.lsn)
    changes = changelog.read(spark, warehouse, table)
    rows = without_unneeded(replay(warehouse, table, changes, until_lsn=until.lsn))
    if state is not None:
        delta.widen(spark, path, state.schema, rows.schema)
    if state is None:
        with delta.recording(spark, until):
            delta.create(path, rows, properties(keys[-1], reduction.data_columns(changes.schema)))
    elif state.lsn < until.lsn:
        with delta.recording(spark, until):
            delta.overwrite(path, rows)
    else:
        delta.overwrite(path, rows)  # a commit that records what the table has already would be skipped


def finish_snapshots(spark: SparkSession, warehouse: Warehouse) -> None:
    """See to snapshots that ended in the middle: what is in the changelog comes to the replica, of others nothing is left."""
    from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

    for table, position in warehouse.unfinished_snapshots():
        if not changelog.exists(warehouse, table):
            warehouse.forget(table)
        elif warehouse.format == "delta":
            # An empty table's snapshot is a TRUNCATE; no transaction ends at that LSN.
            is_its = F.col("_cdc_op").isin("snapshot", "truncate") & (F.col("_cdc_end_lsn") == position.lsn)
            if not changelog.read(spark, warehouse, table).where(is_its).isEmpty():
                remake(spark, warehouse, table, position)
        warehouse.note_finished(table)


def view(spark: SparkSession, warehouse: str | Path, table: str) -> DataFrame:
    """Return the current rows of ``table`` ("schema.name") in the ``warehouse`` directory, as of now.

    A Delta replica is read; of a Parquet warehouse the changelog is, and reduced.
    """
    house = Warehouse.existing(warehouse)
    known = house.find(table)
    if house.format == "delta":
        return delta.read(spark, house.replica(known))
    changes = changelog.read(spark, house, known)
    return without_unneeded(replay(house, known, changes))


def replay(
    warehouse: Warehouse,
    table: Table,
    changes: DataFrame,
    base: DataFrame | None = None,
    *,
    after_lsn: int = 0,
    until_lsn: int = (1 << 63) - 1,
    is_checked: bool = False,
) -> DataFrame:
    """Return the rows that the changes in (after_lsn, until_lsn] leave, in the changelog's layout (`without_unneeded`).

    ``base`` are the rows of the replica as it stood at ``after_lsn``; those that no change touches are passed on as they are.
    With ``is_checked`` the rows are counted (`_check_growth`), for which they are made at once; changes from before the
    key always are, because nothing kept their rows apart.
    It begins with the last snapshot, if there is one. WarehouseError if changes that it needs have been purged.
    """
    from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

    taken = changes.where((F.col("_cdc_op") == "snapshot") & F.col("_cdc_end_lsn").between(after_lsn + 1, until_lsn))
    snapshot_lsn = taken.agg(F.max("_cdc_end_lsn")).collect()[0][0]
    if snapshot_lsn is not None:
        base, after_lsn = taken.where(F.col("_cdc_end_lsn") == snapshot_lsn), snapshot_lsn
    _check_kept(warehouse, table, changes, after_lsn if snapshot_lsn is None else snapshot_lsn - 1, until_lsn)
    rows = None if base is None else _as_changes(base, changes.schema)
    versions = warehouse.versions(table)
    if not any(version.key for version in versions):
        raise WarehouseError(f"{table} has no key, and so only a changelog")
    for piece in _pieces(versions, after_lsn, until_lsn):
        part = _part(changes, piece)
        untouched = None
        if rows is not None:
            # Otherwise each piece's plan holds those of all before it, several times.
            rows = rows.localCheckpoint()
        if rows is not None and not piece.is_new_table:
            if piece.fills:
                rows = filled(rows, piece.fills).localCheckpoint()
            if piece.is_new_key:
                rows = _with_key(rows, piece, table, "rows")
            if base is not None:
                rows, untouched = _split(rows, part, piece)
            part = rows.unionByName(part)
        rows = _as_changes(_current(part, piece, table, is_checked=is_checked), changes.schema)
        if untouched is not None:
            rows = rows.unionByName(untouched)
    # Without any change that counts the table is empty.
    return _as_changes(changes.limit(0), changes.schema) if rows is None else rows


def _check_kept(warehouse: Warehouse, table: Table, changes: DataFrame, after_lsn: int, until_lsn: int) -> None:
    """Raise WarehouseError if changes in (after_lsn, until_lsn] have been purged, unless a TRUNCATE ends all that came of them."""
    from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

    purged_lsn = warehouse.purged_lsn(table)
    if after_lsn < purged_lsn:
        is_kept = F.col("_cdc_end_lsn").between(purged_lsn + 1, until_lsn)
        if changes.where((F.col("_cdc_op") == "truncate") & is_kept).isEmpty():
            warehouse.check_changes(table, after_lsn)


def _split(rows: DataFrame, changes: DataFrame, piece: _Piece) -> tuple[DataFrame, DataFrame | None]:
    """Divide rows into those with a key that some change touches, and the others; a TRUNCATE touches all."""
    from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

    if not changes.where(F.col("_cdc_op") == "truncate").isEmpty():
        return rows, None
    touched = reduction.touched_keys(changes, piece.columns)
    key = reduction.key_struct(rows, piece.columns)
    return (
        rows.join(touched, key == F.col("_cdc_touched"), "left_semi"),
        rows.join(touched, key == F.col("_cdc_touched"), "left_anti"),
    )


def register_views(spark: SparkSession, warehouse: str | Path) -> list[str]:
    """Make a temporary view ``<schema>.<table>`` (one identifier, quote it) of each replica; return their names."""
    house = Warehouse.existing(warehouse)
    names = []
    for table in house.tables():
        versions = house.versions(table)
        if any(version.key for version in versions):
            view(spark, house.root, str(table)).createOrReplaceTempView(quote(str(table)))
            names.append(str(table))
    return names


def _pieces(versions: Sequence[Version], after_lsn: int, until_lsn: int) -> Iterator[_Piece]:
    """Cut the changes in (after_lsn, until_lsn] where the key or the table behind the name changes.

    Changes from a time without a key are reduced by the key that the table got later; until it gets one, they wait.
    """
    # Transactions amid which the key changes are by themselves: a replica is at the end of a transaction, not within one.
    mixed = sorted({version.end_lsn for version in versions if version.ordinal})
    edges = sorted({after_lsn, until_lsn, *(edge for lsn in mixed for edge in (lsn - 1, lsn) if after_lsn < edge < until_lsn)})
    for start_lsn, end_lsn in pairwise(edges):
        yield from _pieces_between(versions, start_lsn, end_lsn)


def _pieces_between(versions: Sequence[Version], after_lsn: int, until_lsn: int) -> Iterator[_Piece]:
    """Cut changes among which either no key changes amid a transaction, or which are one transaction."""
    for index, version in enumerate(versions):
        following = versions[index + 1 :]
        keyed = next((v for v in (version, *following) if v.key and v.relation_id == version.relation_id), None)
        if keyed is None:
            continue
        begin = (version.end_lsn, version.ordinal) if index else (0, 0)
        end = (following[0].end_lsn, following[0].ordinal) if following else (until_lsn + 1, 0)
        begin, end = max(begin, (after_lsn + 1, 0)), min(end, (until_lsn + 1, 0))
        if begin >= end:
            continue
        is_begin = index > 0 and begin == (version.end_lsn, version.ordinal)
        yield _Piece(
            key=keyed.key,
            columns=_key_columns(versions, keyed),
            after_lsn=begin[0] - 1,
            until_lsn=end[0] if end[1] else end[0] - 1,
            is_new_table=is_begin and versions[index - 1].relation_id != version.relation_id,
            first_ordinal=begin[1],
            end_ordinal=end[1] or None,
            fills=version.fills if is_begin else (),
            is_before_key=not version.key,
            is_new_key=not version.key or (is_begin and _is_new_key(versions[index - 1], version)),
            has_all=any(before.snapshot and before.relation_id == version.relation_id for before in versions[: index + 1]),
        )


def _is_new_key(before: Version, version: Version) -> bool:
    """Tell whether rows under the version before may have no value for this one's key."""
    return before.key != version.key or any(fill.column in version.columns for fill in version.fills)


def _key_columns(versions: Sequence[Version], version: Version) -> Key:
    """Return, per column of the version's key, the changelog's columns that have held it, this version's first."""
    found = []
    for name, column in zip(version.key, version.columns, strict=True):
        same = [dict(zip(v.key, v.columns, strict=True)).get(name) for v in reversed(versions)]
        found.append(tuple(dict.fromkeys([column, *(other for other in same if other is not None)])))
    return tuple(found)


def _part(changes: DataFrame, piece: _Piece) -> DataFrame:
    from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

    wanted = (F.col("_cdc_end_lsn") > piece.after_lsn) & (F.col("_cdc_end_lsn") <= piece.until_lsn)
    if piece.first_ordinal:
        wanted &= F.col("_cdc_ordinal") >= piece.first_ordinal
    if piece.end_ordinal is not None:
        wanted &= F.col("_cdc_ordinal") < piece.end_ordinal
    return changes.where(wanted)


def _with_key(changes: DataFrame, piece: _Piece, table: Table, what: str) -> DataFrame:
    """Leave out changes or rows that have no value for a later key, whose columns came with it; say of ``what`` how many."""
    kept = reduction.with_key(changes, piece.columns)
    left_out = changes.count() - kept.count()
    if left_out:
        _logger.warning(
            "table %s: %d %s from before its key was (%s) have no value for that, and are in the changelog alone; for the "
            "replica: cdcpipe-spark snapshot --table %s",
            table,
            left_out,
            what,
            ", ".join(piece.key),
            table,
        )
    return kept


def _has_keyless(spark: SparkSession, path: Path, changes: DataFrame, piece: _Piece) -> bool:
    """Tell whether the replica has rows that have no value for the key."""
    if not delta.exists(path):
        return False
    rows = _as_changes(delta.read(spark, path), changes.schema)
    return bool(reduction.with_key(rows, piece.columns).count() < rows.count())


def _summarize(changes: DataFrame, piece: _Piece, table: Table) -> Summary:
    summary = reduction.summarize(changes, piece.columns)
    if summary.keyless:
        raise WarehouseError(
            f"{summary.keyless} changes of {table} have no value for its key ({', '.join(piece.key)})",
            hint="its columns are younger than these changes; the changelog has all of it",
        )
    return summary


def _apply_anew(
    spark: SparkSession, warehouse: Warehouse, table: Table, changes: DataFrame, after_lsn: int, until: Position
) -> None:
    """Bring the replica over what can't be merged in one commit, and so is written anew in one.

    That is a transaction amid which the key changes, and what begins with rows from before being filled.
    """
    path = warehouse.replica(table)
    base = delta.read(spark, path) if delta.exists(path) else None
    made = replay(warehouse, table, changes, base, after_lsn=after_lsn, until_lsn=until.lsn, is_checked=True)
    rows = without_unneeded(made)
    if base is not None:
        delta.widen(spark, path, base.schema, rows.schema)
    with delta.recording(spark, until):
        if base is not None:
            delta.overwrite(path, rows)
        else:
            key = next(version.key for version in reversed(warehouse.versions(table)) if version.end_lsn <= until.lsn)
            delta.create(path, rows, properties(key, reduction.data_columns(rows.schema)))


def _apply_piece(spark: SparkSession, path: Path, table: Table, changes: DataFrame, piece: _Piece, position: Position) -> None:
    """Merge the changes of one piece into the replica, recording ``position``."""
    if piece.is_before_key:
        changes = _with_key(changes, piece, table, "changes")
    summary = _summarize(changes, piece, table)
    columns = reduction.data_columns(changes.schema)
    rows = reduction.reduce(changes, piece.columns, columns, summary)
    state = delta.state(path)
    if state is not None:
        delta.widen(spark, path, state.schema, changes.select(*map(quote, columns)).schema)
    if state is None or summary.truncated_at is not None or piece.is_new_table:
        existing = [] if state is None else [name for name in _OPTIONAL if name in state.schema.names]
        rows = _laid_out(rows, columns, summary, existing)
        with delta.recording(spark, position):
            if state is not None:
                delta.overwrite(path, rows)
            else:
                delta.create(path, rows, properties(piece.key, columns))
        if piece.is_before_key and summary.truncated_at is None:
            _check_growth(table, piece, summary.growth, delta.read(spark, path).count())
        return
    wanted = [changes.schema[name] for name in columns]
    if summary.exact:
        wanted.append(_OPTIONAL["_cdc_exact"])
    delta.add_columns(spark, path, state.schema, StructType(wanted))
    current = delta.read(spark, path)
    if summary.has_partial_moves:
        rows = _fill_moved(rows, current, piece, summary)
    if summary.unchanged and "_cdc_unchanged" not in current.columns:
        first = json.loads(state.properties.get(_FIRST_COLUMNS, "[]"))
        later = [name for name in summary.unchanged if name not in first]
        if _has_unknown(rows, current, piece, later):
            delta.add_columns(spark, path, current.schema, StructType([_OPTIONAL["_cdc_unchanged"]]))
            current = delta.read(spark, path)
    for done in _merge(spark, path, rows, current, piece, columns, summary, position):
        _check_growth(table, piece, summary.growth, done["num_inserted_rows"] - done["num_deleted_rows"])


def _check_growth(table: Table, piece: _Piece, wanted: int, grown: int) -> None:
    """Name a table whose rows are fewer than inserts and deletes make them: some had the key of another.

    They are more where changes meet rows that the replica did not have: those from before the slot, and those that were left out.
    After a snapshot it has all, so rows have come to the table without a change: then it is named, too.
    """
    if grown > wanted and piece.has_all:
        _logger.warning(
            "table %s: %d rows that were changed or deleted were not in the replica: they came to the table without a change, as "
            "those of a partition that is attached do. The replica may lack more: cdcpipe-spark snapshot --table %s",
            table,
            grown - wanted,
            table,
        )
    if grown < wanted:
        _logger.warning(
            "table %s: by its key (%s) %d rows that came were there already, and were merged with those. Either that did not tell "
            "its rows apart then, or the replica was not what the table was. A new beginning: cdcpipe-spark snapshot --table %s",
            table,
            ", ".join(piece.key),
            wanted - grown,
            table,
        )


_FIRST_COLUMNS = "cdcpipe.first_columns"
"""The property with the columns that a replica had from the beginning: in the others a row may lack a value that it has."""


def properties(key: Sequence[str], columns: Sequence[str]) -> dict[str, str]:
    """Return the properties of a replica that begins with these columns."""
    names = {"cdcpipe.key": json.dumps(key), _FIRST_COLUMNS: json.dumps(columns)}
    return names | {"delta.enableDeletionVectors": "true"}


_OPTIONAL = {
    "_cdc_exact": StructField("_cdc_exact", MapType(StringType(), StringType())),
    "_cdc_unchanged": StructField("_cdc_unchanged", ArrayType(StringType())),
}
"""The columns that a replica gets when it needs them."""


def _laid_out(rows: DataFrame, columns: Sequence[str], summary: Summary, optional: Sequence[str]) -> DataFrame:
    """Return reduced rows, with nothing to merge them into, as rows of a replica that has the ``optional`` columns."""
    from pyspark.sql import functions as F  # noqa: N812

    rows = rows.where(~F.col("_cdc_gone"))
    unknown = F.array_union("_cdc_missing", "_cdc_moved")
    needed = {"_cdc_exact": bool(summary.exact), "_cdc_unchanged": False}
    if summary.unchanged and "_cdc_unchanged" not in optional:
        needed["_cdc_unchanged"] = not rows.where(F.size(unknown) > 0).isEmpty()
    kept = [name for name in _OPTIONAL if needed[name] or name in optional]
    rows = rows.withColumn("_cdc_unchanged", F.when(F.size(unknown) > 0, unknown))
    return rows.select(*(F.col(quote(name)) for name in (*columns, *kept)))


def _fill_moved(rows: DataFrame, current: DataFrame, piece: _Piece, summary: Summary) -> DataFrame:
    """Give rows that came from another key the values that the replica has under that key."""
    from pyspark.sql import functions as F  # noqa: N812

    has_texts = "_cdc_exact" in current.columns
    origin = current.select(
        reduction.key_struct(current, piece.columns).alias("_cdc_at"),
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
    """Return those of the columns of which a replica's row has neither a value nor an exact text."""
    from pyspark.sql import functions as F  # noqa: N812

    return F.expr(_absent_sql(rows, names))


def _absent_sql(rows: DataFrame, names: Sequence[str], row: str = "") -> str:
    has_texts = "_cdc_exact" in rows.columns
    parts = []
    for name in names:
        text = f" AND {row}_cdc_exact[{literal(name)}] IS NULL" if has_texts else ""
        parts.append(f"IF({row}{quote(name)} IS NULL{text}, {literal(name)}, NULL)")
    return f"array_compact(CAST(array({', '.join(parts)}) AS ARRAY<STRING>))"


def _exact_sql(exact: str, before: str, names: str) -> str:
    """Return, as SQL, a row's exact texts with those that it had before of the columns ``names``, an array."""
    kept = f"map_filter({before}, (name, _) -> array_contains({names}, name))"
    return f"IF(size({kept}) > 0, map_concat(coalesce({exact}, CAST(map() AS MAP<STRING, STRING>)), {kept}), {exact})"


def _has_unknown(rows: DataFrame, current: DataFrame, piece: _Piece, later: Sequence[str]) -> bool:
    """Tell whether some value is neither in the changes nor in the replica.

    A row that the replica has, it has with all columns but the ``later`` ones: only those are looked at, they may be large.
    """
    from pyspark.sql import functions as F  # noqa: N812

    is_moved = F.size("_cdc_moved") > 0
    incomplete = rows.where((F.size("_cdc_missing") > 0) | is_moved).select("_cdc_key", "_cdc_missing", "_cdc_moved")
    absent = _absent(current, later).alias("_cdc_absent")
    there = current.select(reduction.key_struct(current, piece.columns).alias("_cdc_key"), absent)
    unknown = incomplete.join(there, "_cdc_key", "left").where(
        is_moved | F.col("_cdc_absent").isNull() | F.arrays_overlap("_cdc_missing", "_cdc_absent")
    )
    return not unknown.isEmpty()


def _merge(
    spark: SparkSession,
    path: Path,
    rows: DataFrame,
    current: DataFrame,
    piece: _Piece,
    columns: Sequence[str],
    summary: Summary,
    position: Position,
) -> list[Row]:
    """Merge reduced rows into the replica, recording ``position``; return what MERGE reports, nothing if it was done before."""
    keys = reduction.key_sql(current.schema, piece.columns, "t.", "t._cdc_exact")
    terms = [f"{key} = s._cdc_key.k{index}" for index, key in enumerate(keys)]
    # Delta leaves out files by what is said of the target alone.
    terms += [f"{keys[i]} BETWEEN {of_key[0]} AND {of_key[1]}" for i, of_key in enumerate(summary.ranges) if of_key is not None]
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
    if summary.count <= _BROADCAST_ROWS:
        rows = rows.hint("broadcast")
    source = f"cdcpipe_replica_source_{next(_view_numbers)}"
    rows.createOrReplaceTempView(source)
    try:
        with delta.recording(spark, position):
            done: list[Row] = spark.sql(
                f"MERGE INTO {delta.table_name(path)} t USING {source} s ON {condition} "
                "WHEN MATCHED AND s._cdc_gone THEN DELETE "
                f"WHEN MATCHED THEN UPDATE SET {', '.join(f't.{quote(c)} = {v}' for c, v in updated.items())} "
                f"WHEN NOT MATCHED AND NOT s._cdc_gone THEN INSERT ({', '.join(map(quote, inserted))}) "
                f"VALUES ({', '.join(inserted.values())})"
            ).collect()
            return done
    finally:
        spark.catalog.dropTempView(source)


def _current(changes: DataFrame, piece: _Piece, table: Table, *, is_checked: bool) -> DataFrame:
    """Return the rows that some changes leave."""
    from pyspark.sql import functions as F  # noqa: N812

    if piece.is_before_key:
        changes = _with_key(changes, piece, table, "changes")
    summary = _summarize(changes, piece, table)
    rows = reduction.reduce(changes, piece.columns, reduction.data_columns(changes.schema), summary)
    rows = rows.where(~F.col("_cdc_gone")).withColumn("_cdc_unchanged", F.array_union("_cdc_missing", "_cdc_moved"))
    if (is_checked or piece.is_before_key) and summary.truncated_at is None:
        rows = rows.localCheckpoint()
        _check_growth(table, piece, summary.growth, rows.count())
    return rows


def _as_changes(rows: DataFrame, schema: StructType) -> DataFrame:
    """Return a replica's or reduced rows in a changelog's layout, as updates before every change: what is unknown stays unsent."""
    from pyspark.sql import functions as F  # noqa: N812

    first = {"_cdc_op": F.lit("update"), "_cdc_epoch": F.lit(0), "_cdc_end_lsn": F.lit(0), "_cdc_ordinal": F.lit(0)}
    names = (*reduction.data_columns(schema), *_OPTIONAL)
    kept = {name: F.col(quote(name)) for name in names if name in rows.columns} | first
    return rows.select(*(kept.get(field.name, F.lit(None)).cast(field.dataType).alias(field.name) for field in schema.fields))


def without_unneeded(rows: DataFrame) -> DataFrame:
    """Leave of a changelog's layout the table's columns, and those of ``_cdc_exact`` and ``_cdc_unchanged`` that say something."""
    from pyspark.sql import functions as F  # noqa: N812

    unknown = F.when(F.size("_cdc_unchanged") > 0, F.col("_cdc_unchanged"))
    exact = F.when(F.size("_cdc_exact") > 0, F.col("_cdc_exact"))
    used = rows.agg(F.count(exact).alias("_cdc_exact"), F.count(unknown).alias("_cdc_unchanged")).collect()[0]
    kept = [name for name in _OPTIONAL if used[name]]
    columns = reduction.data_columns(rows.schema)
    rows = rows.withColumns({"_cdc_exact": exact, "_cdc_unchanged": unknown})
    return rows.select(*(F.col(quote(name)) for name in (*columns, *kept)))

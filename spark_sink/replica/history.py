"""Returns all versions of a table's rows, each with the range of positions and times in which it was valid. Writes nothing.

This is what data warehouses call a slowly changing dimension of type 2. The versions are made from the changelog alone, with the
rules of the replica (replica/merge.py): the rows that are valid at an LSN are those of `as_of.read_as_of` there.

- A version begins with the commit of a transaction, and ends with the next one that changes the row, its key included. What a
  transaction changes again is no version, because no other transaction has ever seen it.
- TRUNCATE, DROP TABLE, another table with the name, and a snapshot end all versions. After a snapshot each row has a new version.
- A value that ALTER TABLE gave to existing rows is put into the current versions and begins none.
- A row from before the beginning of the changelog has a version from its first change on, or from its snapshot.
"""

from __future__ import annotations

from functools import reduce as fold
from typing import TYPE_CHECKING, Final

from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it
from pyspark.sql.types import BooleanType, LongType, StructField, StructType, TimestampType

from spark_sink.changelog.tables import changelogs_of
from spark_sink.replica import reduction
from spark_sink.replica.checks import keyed_changes, keyed_versions, leave_out_keyless
from spark_sink.replica.ends import all_ends, ends_all, first_time
from spark_sink.replica.fills import filled
from spark_sink.replica.layout import OPTIONAL
from spark_sink.replica.pieces import cut_pieces
from spark_sink.replica.replay import LAST_LSN, as_changes, changes_of
from spark_sink.schema.types import split_schema
from spark_sink.source.typed import OLD_PREFIX
from spark_sink.spark import refused_settings
from spark_sink.spark.sql import quote
from spark_sink.warehouse import purged_changes
from spark_sink.warehouse.warehouse import Warehouse

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from spark_sink.replica.pieces import Piece
    from spark_sink.replica.reduction import Summary
    from spark_sink.schema.table import Table, Version

__all__ = ["as_history", "as_stored", "first_known", "history_schema", "make_versions", "names_beside", "own_names", "read_history"]

_FROM: Final = ("_cdc_from_lsn", "_cdc_from_time")
"""Where a version begins: the end LSN of the transaction, and its commit time."""
_RANGE: Final = (*_FROM, "_cdc_to_lsn", "_cdc_to_time")
_OWN: Final = ("valid_from", "valid_to", "is_current", "from_lsn", "to_lsn")
"""The columns that a history has besides the table's; a column that has the name of one of the table's begins with ``_cdc_``."""
_UNCHANGED: Final = "_cdc_unchanged"


def read_history(spark: SparkSession, warehouse: str | Path, table: str) -> DataFrame:
    """Return every version of the rows of ``table`` ("schema.name").

    The columns are those that the table has in its changelog, and these:

    - ``valid_from``, ``valid_to``: the commit times between which it was valid; ``valid_to`` is NULL for a current version;
    - ``is_current``: whether it is valid now;
    - ``from_lsn``, ``to_lsn``: the same as positions, the end LSNs of the two transactions. It was valid at an LSN with
      ``from_lsn <= lsn AND (lsn < to_lsn OR to_lsn IS NULL)``;
    - ``_cdc_exact`` and ``_cdc_unchanged``, as in a replica.

    If the table has a column with one of these names, the history's column has ``_cdc_`` before its name.

    Raises InvalidArgumentsError if the warehouse does not have the table, WarehouseError if the table has no key, or if a purge has
    removed changes that no later snapshot or TRUNCATE makes up for. Raises InitError for a session whose settings would skip or
    change values.

    Example: ``read_history(spark, "warehouse", "public.fruit").where("id = 7").orderBy("from_lsn")``
    """
    refused_settings.refuse_to_read(spark.conf.get)
    house = Warehouse.existing(warehouse)
    known = house.find(table)
    keyed_versions(house, known)
    changes = changelogs_of(spark, house).read(known)
    versions = keyed_versions(house, known, changes)
    return make_versions(versions, known, changes, first_known(house, known, changes), LAST_LSN)


def make_versions(
    versions: Sequence[Version], table: Table, changes: DataFrame, after_lsn: int, until_lsn: int, stored: DataFrame | None = None
) -> DataFrame:
    """Return the versions that the changes in (after_lsn, until_lsn] begin or end, in the layout of `read_history`.

    ``stored`` has the versions that are current at ``after_lsn``, as `as_stored` returns them. They are in the result, too: those
    that end have their end.
    """
    ended: list[DataFrame] = []
    current = None if stored is None else as_changes(stored, changes.schema, _RANGE)
    for piece in cut_pieces(versions, after_lsn, until_lsn):
        part = changes_of(changes, piece)
        if current is not None:
            current = _carried(current, ended, part, piece, table)
        made = _versions(part, current, piece, table).localCheckpoint()
        is_ended = F.col("_cdc_to_lsn").isNotNull()
        ended.append(made.where(is_ended))
        current = as_changes(made.where(~is_ended), changes.schema, _RANGE)
    laid_out = [as_history(each, changes.schema) for each in (*ended, *([] if current is None else [current]))]
    return fold(lambda a, b: a.unionByName(b), laid_out or [as_history(_without_range(changes.limit(0)), changes.schema)])


def as_stored(versions: DataFrame, schema: StructType) -> DataFrame:
    """Return versions from the layout of `read_history` in that of a changelog with this ``schema``, with the range of each."""
    own = own_names(versions.columns)
    range_of = dict(zip((own[name] for name in ("from_lsn", "valid_from", "to_lsn", "valid_to")), _RANGE, strict=True))
    kept = (name for name in versions.columns if name != own["is_current"])
    return as_changes(versions.select(*(F.col(quote(name)).alias(range_of.get(name, name)) for name in kept)), schema, _RANGE)


def own_names(columns: Collection[str]) -> dict[str, str]:
    """Return what the history's own columns are called among the ``columns`` of a history: ``{"valid_to": "_cdc_valid_to"}``."""
    return {name: f"_cdc_{name}" if f"_cdc_{name}" in columns else name for name in _OWN}


def first_known(house: Warehouse, table: Table, changes: DataFrame) -> int:
    """Return the LSN after which the changelog has all changes that its rows are made of."""
    purged_lsn = purged_changes.last_lsn(house, table)
    if not purged_lsn:
        return 0
    begins = ends_all() | (F.col("_cdc_op") == "snapshot")
    first = changes.where(begins & (F.col("_cdc_end_lsn") > purged_lsn)).agg(F.min("_cdc_end_lsn")).collect()[0][0]
    if first is None:
        purged_changes.check(house, table, 0)
    return int(first) - 1


def _carried(current: DataFrame, ended: list[DataFrame], part: DataFrame, piece: Piece, table: Table) -> DataFrame | None:
    """Return the current versions at the beginning of a piece. Those that end there are added to ``ended``."""
    if piece.is_new_table:
        ended.append(_ended(current, part, piece))
        return None
    if piece.fills:
        current = filled(current, piece.fills).localCheckpoint()
    if piece.is_new_key:
        lost = reduction.with_keys(current, piece.columns).where(reduction.lacks_key(piece.columns))
        ended.append(_ended(lost.select(*map(quote, current.columns)), part, piece))
        current = leave_out_keyless(current, piece, table)
    return current


def _ended(rows: DataFrame, part: DataFrame, piece: Piece) -> DataFrame:
    """Return versions that end where the piece ``part`` begins."""
    time = first_time(part.where(F.col("_cdc_end_lsn") == piece.after_lsn + 1))
    ends = {"_cdc_to_lsn": F.lit(piece.after_lsn + 1).cast("bigint"), "_cdc_to_time": time}
    # Within a transaction in which the key changes, a version may begin and end.
    return rows.withColumns(ends).where(F.col("_cdc_from_lsn") < F.col("_cdc_to_lsn"))


def _without_range(changes: DataFrame) -> DataFrame:
    kinds = ("bigint", "timestamp") * 2
    return changes.withColumns({name: F.lit(None).cast(kind) for name, kind in zip(_RANGE, kinds, strict=True)})


def _versions(part: DataFrame, current: DataFrame | None, piece: Piece, table: Table) -> DataFrame:
    """Return the versions that the changes of a piece make, and the ``current`` ones, with the range of each."""
    barriers = all_ends(part)
    rows = _without_range(part)
    rows = rows if current is None else current.unionByName(rows)
    rows, summary = keyed_changes(rows, piece, table)
    events = reduction.events_of(reduction.with_keys(rows, piece.columns), summary)
    events = events.withColumn("_cdc_segment", F.size(F.filter(barriers, lambda each: each["at"] < F.col("_cdc_position"))))
    events = _with_known(events, summary)
    following = Window.partitionBy("_cdc_key", "_cdc_segment").orderBy("_cdc_position")
    after = F.coalesce(
        F.lead(F.struct(F.col("_cdc_end_lsn").alias("lsn"), F.col("_cdc_commit_time").alias("time"))).over(following),
        F.get(barriers, F.col("_cdc_segment"))["until"],
    )
    events = events.withColumns(
        {
            "_cdc_from_lsn": F.coalesce("_cdc_from_lsn", "_cdc_end_lsn"),
            "_cdc_from_time": F.when(F.col("_cdc_from_lsn").isNull(), F.col("_cdc_commit_time")).otherwise(F.col("_cdc_from_time")),
            "_cdc_to_lsn": after["lsn"],
            "_cdc_to_time": after["time"],
        }
    )
    lasts = F.col("_cdc_to_lsn").isNull() | (F.col("_cdc_to_lsn") > F.col("_cdc_from_lsn"))
    return _with_values(events.where(~F.col("_cdc_gone") & lasts), part.schema, summary)


def _with_known(events: DataFrame, summary: Summary) -> DataFrame:
    """Add for the N-th column that some update did not send its value at each event, as ``_cdc_known_N``; null if unknown."""
    if not summary.unchanged:
        return events
    so_far = Window.partitionBy("_cdc_key", "_cdc_segment").orderBy("_cdc_position").rowsBetween(Window.unboundedPreceding, 0)
    begins = reduction.begins_row() & ~F.col("_cdc_gone")
    events = events.withColumn("_cdc_life", F.sum(begins.cast("int")).over(so_far))
    life = ("_cdc_key", "_cdc_segment", "_cdc_life")
    within = Window.partitionBy(*life).orderBy("_cdc_position").rowsBetween(Window.unboundedPreceding, 0)
    known = {
        f"_cdc_known_{i}": F.last(F.when(at.isNotNull(), reduction.held(name, summary)), ignorenulls=True).over(within)
        for i, (name, at) in enumerate(reduction.known_at(summary.unchanged))
    }
    events = events.withColumns(known)
    return _with_inherited(events, life, list(known)) if summary.has_partial_moves else events


def _with_inherited(events: DataFrame, life: Sequence[str], names: Sequence[str]) -> DataFrame:
    """Give a row after an update of its key the unsent values that it had with the old key.

    Each round doubles the number of changes of the key that are looked through.
    """
    events = events.localCheckpoint()
    lives = events.groupBy(*life).agg(
        F.max("_cdc_origin").alias("parent"),
        F.max(F.when(F.col("_cdc_origin").isNotNull(), F.col("_cdc_position"))).alias("since"),
        F.max(F.when(F.col("_cdc_gone"), F.col("_cdc_position"))).alias("until"),
        *(F.max_by(name, F.when(F.col(name).isNotNull(), F.col("_cdc_position"))).alias(name) for name in names),
    )
    lives = lives.withColumns({f"{name}_before": F.lit(None).cast(lives.schema[name].dataType) for name in names})
    lives = lives.localCheckpoint()
    while not lives.where(F.col("parent").isNotNull()).isEmpty():
        child, parent = lives.alias("c"), lives.alias("p")
        same = (F.col("c.parent") == F.col("p._cdc_key")) & (F.col("c.since") == F.col("p.until"))
        lives = child.join(parent, same, "left").select(
            *(f"c.{name}" for name in (*life, *names, "until")),
            F.col("p.parent").alias("parent"),
            F.col("p.since").alias("since"),
            *(F.coalesce(f"c.{name}_before", f"p.{name}", f"p.{name}_before").alias(f"{name}_before") for name in names),
        )
        lives = lives.localCheckpoint()
    inherited = events.join(lives.select(*life, *(f"{name}_before" for name in names)), list(life), "left")
    return inherited.withColumns({name: F.coalesce(name, f"{name}_before") for name in names})


def _with_values(events: DataFrame, schema: StructType, summary: Summary) -> DataFrame:
    """Return versions with the table's columns, ``_cdc_exact``, ``_cdc_unchanged`` and their range."""
    known = {name: F.col(f"_cdc_known_{i}") for i, name in enumerate(summary.unchanged)}
    exact = F.map_filter("_cdc_exact", lambda name, _: ~name.startswith(OLD_PREFIX))
    texts = {name: value["_cdc_text"] for name, value in known.items() if name in summary.exact}
    if texts:
        exact = reduction.with_texts(exact, texts)
    lost = {name: reduction.is_lost(name, value, F.col(_UNCHANGED), summary) for name, value in known.items()}
    unknown = [F.when(value.isNull() | lost[name], F.lit(name)) for name, value in known.items()]
    values = [(known[name][name] if name in known else F.col(quote(name))).alias(name) for name in reduction.data_columns(schema)]
    return events.select(
        *values,
        F.when(F.size(exact) > 0, exact).alias("_cdc_exact"),
        F.array_compact(F.array(*unknown).cast("array<string>")).alias(_UNCHANGED),
        *_RANGE,
    )


def history_schema(schema: StructType) -> StructType:
    """Return the columns of the history of a table whose changelog has this ``schema``."""
    columns = split_schema(schema)[0]
    kinds = (TimestampType(), TimestampType(), BooleanType(), LongType(), LongType())
    own = [StructField(name, kind) for name, kind in zip(names_beside(columns.names), kinds, strict=True)]
    return StructType([*columns.fields, *own, *OPTIONAL.values()])


def names_beside(columns: Sequence[str]) -> list[str]:
    """Return what a history's own columns are called beside these columns of the table."""
    taken = {name.lower() for name in columns}
    return [f"_cdc_{name}" if name in taken else name for name in _OWN]


def as_history(versions: DataFrame, schema: StructType) -> DataFrame:
    """Return versions with the columns that `read_history` promises, for a changelog with this ``schema``."""
    columns = reduction.data_columns(schema)
    is_current = F.col("_cdc_to_lsn").isNull()
    own = (F.col("_cdc_from_time"), F.col("_cdc_to_time"), is_current, F.col("_cdc_from_lsn"), F.col("_cdc_to_lsn"))
    return versions.select(
        *map(quote, columns),
        *(value.alias(name) for name, value in zip(names_beside(columns), own, strict=True)),
        F.when(F.size("_cdc_exact") > 0, F.col("_cdc_exact")).alias("_cdc_exact"),
        F.when(F.size(_UNCHANGED) > 0, F.col(_UNCHANGED)).alias(_UNCHANGED),
    )

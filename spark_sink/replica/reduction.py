"""Reduces the changes of one table to one row per key: data frames in, a data frame out. Writes nothing.

The rules are in replica/merge.py. A change is a row of a changelog. A row of a replica counts as an update at LSN 0. A reduced row
has

    _cdc_key       struct k0, k1, ...: the key, for matching
    _cdc_gone      whether the key has no row any more
    the columns    their values
    _cdc_exact     the texts of values that their columns can't hold; null if there are none
    _cdc_missing   names of the columns whose value is in none of the changes: the replica's row with the same key has it
    _cdc_moved     the same for a row whose key has changed: the replica's row with the key ``_cdc_origin`` has it
    _cdc_unknown   names of the columns that the last change left out, and that are NULL in the changes before: nobody has the value

With ``keeps_deleted`` a key that has no row any more keeps its last one, and a reduced row also has

    _cdc_deleted_at   when the row was deleted: the commit time; null if the row exists
    _cdc_has_row      whether the changes have a row of this key. Otherwise they only delete it: the replica's row has the values

An *incarnation* is the time during which one row has one key. It begins with an insert, with an update of the key, or before the
first of these changes. The value of an unsent column is searched in the changes of the same incarnation, then in the incarnation
before the change of the key, and so on. An insert begins another row, so nothing before it has a value that it lacks. (It may lack
one: if an update brings a row into a row filter, the server sends an insert, without the TOAST values that have not changed.)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce as fold
from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

from spark_sink.replica.ends import POSITION, all_ends, end_position, ends_all
from spark_sink.replica.row_keys import differs_sql, is_integer, key_sql, struct_of
from spark_sink.schema.types import split_schema
from spark_sink.source.typed import OLD_PREFIX
from spark_sink.spark.sql import quote

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from pyspark.sql import Column, DataFrame, Row
    from pyspark.sql.types import StructType

    from spark_sink.replica.pieces import Key

__all__ = [
    "Summary",
    "begins_row",
    "data_columns",
    "events_of",
    "exact_names",
    "growth",
    "held",
    "is_lost",
    "known_at",
    "lacks_key",
    "reduce",
    "summarize",
    "touched_keys",
    "with_key",
    "with_keys",
    "with_texts",
]


@dataclass(frozen=True, slots=True)
class Summary:
    """Facts about some changes that `reduce` needs. One or two passes over a few of their columns find them."""

    count: int
    truncated_at: tuple[int, int] | None
    """The position of the last TRUNCATE or DROP TABLE. No change at or before it has a row."""
    unchanged: tuple[str, ...]
    """The columns that some update did not send."""
    has_moves: bool
    """Whether an update changed a key."""
    has_partial_begins: bool
    """Whether a change that begins an incarnation (`begins_row`) did not send a column."""
    has_partial_moves: bool
    """Whether one of these is an update of the key: only then an earlier row has the value. An insert has no earlier row."""
    exact: tuple[str, ...]
    """The columns with a value in ``_cdc_exact``."""
    keyless: int
    """How many changes lack a value of the key."""
    partial_old_keys: int
    """How many updates have only a part of the key that their row had before (`partial_old_key`)."""
    growth: int
    """The number of inserts minus the number of deletes, also before a TRUNCATE or DROP TABLE. See `growth`."""
    ranges: tuple[tuple[int, int] | None, ...] = ()
    """For each column of the key its least and its greatest value, if it is an integer."""


def data_columns(schema: StructType) -> list[str]:
    """Return the table's own columns."""
    return list(split_schema(schema)[0].names)


def without_marks(rows: DataFrame, gone: Collection[str]) -> DataFrame:
    """Leave out what ``_cdc_unchanged`` and ``_cdc_exact`` say about columns that a replica does not have."""
    if not gone:
        return rows
    unchanged = F.array_except("_cdc_unchanged", F.array(*map(F.lit, sorted(gone))))
    exact = F.map_filter("_cdc_exact", lambda name, _: ~name.isin(sorted(gone)))
    return rows.withColumns({"_cdc_unchanged": unchanged, "_cdc_exact": exact})


def exact_names() -> Column:
    """Return an aggregate for the columns with a value in ``_cdc_exact``. Those of old rows have names like ``_cdc_old.NAME``."""
    return F.array_sort(F.array_distinct(F.flatten(F.collect_set(F.map_keys("_cdc_exact")))))


def with_keys(changes: DataFrame, key: Key) -> DataFrame:
    """Add ``_cdc_new_key``, ``_cdc_old_key`` (structs) and ``_cdc_is_move``."""
    # The old key comes from the old key or row. A delete's row itself is the old one, even if the server sent no separate old row.
    after, before = key_sql(changes.schema, key), key_sql(changes.schema, key, OLD_PREFIX, exact_prefix=OLD_PREFIX)
    new, old, differs = struct_of(after), struct_of(before), F.expr(differs_sql(before, after))
    return changes.withColumns(
        {
            "_cdc_new_key": new,
            "_cdc_old_key": F.when((F.col("_cdc_op") == "delete") & F.col("_cdc_old").isNull(), new).otherwise(old),
            "_cdc_is_move": (F.col("_cdc_op") == "update") & F.col("_cdc_old").isNotNull() & differs,
        }
    )


def begins_row() -> Column:
    """Return an expression: whether a change from `with_keys` begins an incarnation. An update of the key also ends one."""
    return F.col("_cdc_op").isin("insert", "snapshot") | F.col("_cdc_is_move")


def touched_keys(changes: DataFrame, key: Key) -> DataFrame:
    """Return every key that the changes affect, once, in the column ``_cdc_touched``, to compare with `key_struct`."""
    both = F.array_compact(F.array("_cdc_old_key", "_cdc_new_key"))
    return with_keys(changes, key).select(F.explode(both).alias("_cdc_touched")).distinct()


def lacks_key(key: Key) -> Column:
    """Return an expression: whether a change from `with_keys` lacks a value of the key."""
    used = F.when(F.col("_cdc_op") == "delete", F.col("_cdc_old_key")).otherwise(F.col("_cdc_new_key"))
    return ~ends_all() & _has_null(used, key)


def partial_old_key(key: Key) -> Column:
    """Return an expression: whether a change from `with_keys` is an update whose old key lacks a value. It may be of any row."""
    has_old = (F.col("_cdc_op") == "update") & F.col("_cdc_old").isNotNull()
    return has_old & _has_null(F.col("_cdc_old_key"), key) & ~lacks_key(key)


def _has_null(struct: Column, key: Key) -> Column:
    return fold(lambda a, b: a | b, (struct.getField(f"k{i}").isNull() for i in range(len(key))))


def with_key(changes: DataFrame, key: Key) -> DataFrame:
    """Return the changes that have a value for each column of the key. An update that takes it from a row becomes a delete."""
    lacks = lacks_key(key)
    ends = lacks & F.col("_cdc_is_move") & ~_has_null(F.col("_cdc_old_key"), key)
    kept = with_keys(changes, key).where(~lacks | ends)
    kept = kept.withColumn("_cdc_op", F.when(ends, F.lit("delete")).otherwise(F.col("_cdc_op")))
    return kept.select(*map(quote, changes.columns))


def summarize(changes: DataFrame, key: Key) -> Summary:
    """Find the facts about the changes that ``reduce`` needs."""
    keyed = with_keys(changes, key)
    leaves_out = F.size(F.coalesce(F.col("_cdc_unchanged"), F.array())) > 0
    integers = [index for index, names in enumerate(key) if is_integer(changes.schema, names)]
    values = {i: [F.col(side).getField(f"k{i}") for side in ("_cdc_new_key", "_cdc_old_key")] for i in integers}
    # Only numbers and flags in this pass: Spark aggregates them fast. Lists of names take several times as long.
    row = keyed.agg(
        F.count("*").alias("count"),
        F.count_if(ends_all()).alias("truncates"),
        F.count_if(leaves_out).alias("partial"),
        F.count_if(F.size(F.coalesce(F.col("_cdc_exact"), F.create_map())) > 0).alias("inexact"),
        F.max("_cdc_is_move").alias("has_moves"),
        F.max(begins_row() & leaves_out).alias("has_partial_begins"),
        F.max(F.col("_cdc_is_move") & leaves_out).alias("has_partial_moves"),
        F.count_if(lacks_key(key)).alias("keyless"),
        F.count_if(partial_old_key(key)).alias("partial_old_keys"),
        _growth().alias("growth"),
        *(F.min(F.least(*both)).alias(f"least_{index}") for index, both in values.items()),
        *(F.max(F.greatest(*both)).alias(f"greatest_{index}") for index, both in values.items()),
    ).collect()[0]
    has_names = row["truncates"] or row["partial"] or row["inexact"]
    truncated_at, unchanged, exact = _names(changes) if has_names else (None, (), ())
    return Summary(
        count=row["count"],
        truncated_at=truncated_at,
        unchanged=unchanged,
        has_moves=bool(row["has_moves"]),
        has_partial_begins=bool(row["has_partial_begins"]),
        has_partial_moves=bool(row["has_partial_moves"]),
        exact=tuple(name for name in exact if not name.startswith(OLD_PREFIX)),
        keyless=row["keyless"],
        partial_old_keys=row["partial_old_keys"],
        growth=row["growth"],
        ranges=tuple(_range(row, index) if index in integers else None for index in range(len(key))),
    )


def growth(changes: DataFrame, summary: Summary) -> int:
    """Return the number of inserts minus the number of deletes, after the last TRUNCATE or DROP TABLE if there is one.

    With one, Spark reads the changes once more. So only a check of the rows asks for this.
    """
    if summary.truncated_at is None:
        return summary.growth
    return int(_after(changes, summary.truncated_at).agg(_growth()).collect()[0][0])


def _growth() -> Column:
    is_before, is_delete = F.col("_cdc_end_lsn") == 0, F.col("_cdc_op") == "delete"  # a deleted row of the replica is a delete
    begins = F.col("_cdc_op").isin("insert", "snapshot") | (is_before & ~is_delete)
    return F.count_if(begins) - F.count_if(is_delete & ~is_before)


def _after(changes: DataFrame, end: tuple[int, int]) -> DataFrame:
    """Return the changes after a position that `end_position` tells."""
    numbers = zip(POSITION, end, strict=True)
    return changes.where(
        F.struct(*POSITION) > F.struct(*(F.lit(number).cast(changes.schema[name].dataType) for name, number in numbers))
    )


def _names(changes: DataFrame) -> tuple[tuple[int, int] | None, tuple[str, ...], tuple[str, ...]]:
    """Return parts of a summary: the position of the last TRUNCATE, the names of unsent columns and of columns with exact texts."""
    row = changes.agg(
        F.max(F.when(ends_all(), end_position())).alias("truncated_at"),
        F.array_sort(F.array_distinct(F.flatten(F.collect_set("_cdc_unchanged")))).alias("unchanged"),
        exact_names().alias("exact"),
    ).collect()[0]
    truncated_at = None if row["truncated_at"] is None else tuple(row["truncated_at"])
    return truncated_at, tuple(row["unchanged"] or ()), tuple(row["exact"] or ())


def _range(row: Row, index: int) -> tuple[int, int] | None:
    least = row[f"least_{index}"]
    return None if least is None else (least, row[f"greatest_{index}"])


def reduce(changes: DataFrame, key: Key, columns: Sequence[str], summary: Summary, *, keeps_deleted: bool = False) -> DataFrame:
    """Return one row per key that occurs in the changes after the last TRUNCATE; with ``keeps_deleted``, in all changes."""
    if summary.truncated_at is not None and not keeps_deleted:
        changes = _after(changes, summary.truncated_at)
    events = events_of(with_keys(changes, key), summary)
    if keeps_deleted:
        events = _with_deletion(events, all_ends(changes) if summary.truncated_at is not None else None)
    if summary.has_partial_begins:
        return _reduce_chains(events, columns, summary)

    # Here each incarnation that begins has all values. So a value in the changes of a key belongs to its last incarnation, or the
    # key has no row any more.
    row, known = _row(columns, summary), known_at(summary.unchanged)
    # Group by the fields of the key: Spark sorts rows for this, and sorts more slowly by a struct.
    fields = {f"_cdc_key_{i}": F.col("_cdc_key").getField(f"k{i}") for i in range(len(key))}
    reduced = (
        events.withColumns(fields)
        .groupBy(*fields)
        .agg(
            *_last_row(row, events),
            *(F.max_by(held(name, summary), position).alias(f"_cdc_known_{i}") for i, (name, position) in enumerate(known)),
        )
    )
    reduced = reduced.withColumn("_cdc_key", F.struct(*(F.col(name).alias(f"k{i}") for i, name in enumerate(fields))))
    return _finish(reduced, columns, summary)


def events_of(keyed: DataFrame, summary: Summary) -> DataFrame:
    """Return an event for each key in a change: ``_cdc_key``, ``_cdc_position``, ``_cdc_gone``, ``_cdc_origin`` (the old key)."""
    events = keyed.where(~ends_all()).withColumn("_cdc_position", F.struct(*POSITION))
    gone = F.col("_cdc_op") == "delete"
    if not summary.has_moves:
        return events.withColumns(
            {
                "_cdc_key": F.when(gone, F.col("_cdc_old_key")).otherwise(F.col("_cdc_new_key")),
                "_cdc_gone": gone,
                "_cdc_origin": F.lit(None).cast(keyed.schema["_cdc_new_key"].dataType),
            }
        )
    nobody = F.lit(None).cast(keyed.schema["_cdc_new_key"].dataType)

    def event(key: str, gone: bool, origin: Column) -> Column:
        return F.struct(F.col(key).alias("_cdc_key"), F.lit(gone).alias("_cdc_gone"), origin.alias("_cdc_origin"))

    both = F.array(event("_cdc_old_key", True, nobody), event("_cdc_new_key", False, F.col("_cdc_old_key")))
    return events.select(
        "*",
        F.inline(
            F.when(F.col("_cdc_is_move"), both)
            .when(gone, F.array(event("_cdc_old_key", True, nobody)))
            .otherwise(F.array(event("_cdc_new_key", False, nobody)))
        ),
    )


def _with_deletion(events: DataFrame, ends: Column | None) -> DataFrame:
    """Add to each event when its row was deleted: by the event itself, or by the first of the ``ends`` after it (`all_ends`)."""
    by_end = F.lit(None).cast("timestamp")
    if ends is not None:
        by_end = F.get(F.filter(ends, lambda each: each["at"] >= F.col("_cdc_position")), F.lit(0))["until"]["time"]
    return events.withColumn("_cdc_deleted_at", F.when(F.col("_cdc_gone"), F.col("_cdc_commit_time")).otherwise(by_end))


def _has_values() -> Column:
    """Return an expression: whether an event has the values of its row. A deleted row of the replica has them, too."""
    return ~F.col("_cdc_gone") | (F.col("_cdc_end_lsn") == 0)


def _last_row(row: Column, events: DataFrame) -> list[Column]:
    """Return aggregates for the last row of a key, and, where deleted rows are kept, for when it was deleted."""
    if "_cdc_deleted_at" not in events.columns:
        return [F.max_by(row, "_cdc_position").alias("_cdc_row")]
    last = F.max_by(row, F.when(_has_values(), F.col("_cdc_position")))
    return [last.alias("_cdc_row"), F.max_by("_cdc_deleted_at", "_cdc_position").alias("_cdc_deleted_at")]


def _row(columns: Sequence[str], summary: Summary) -> Column:
    """Return an expression for the parts of a row that the last change of a key decides."""
    exact = F.lit(None).cast("map<string,string>")
    if summary.exact:
        exact = F.map_filter("_cdc_exact", lambda name, _: ~name.startswith(OLD_PREFIX))
        exact = F.when(F.size(exact) > 0, exact)
    left_out = ["_cdc_unchanged"] if summary.unchanged else []
    return F.struct("_cdc_gone", exact.alias("_cdc_exact"), *left_out, *(quote(name) for name in columns))


def known_at(unchanged: Sequence[str]) -> list[tuple[str, Column]]:
    """Return for each column that updates may leave out: the position of an event that has a value for it, else null."""
    left_out = F.coalesce(F.col("_cdc_unchanged"), F.array().cast("array<string>"))
    return [(name, F.when(_has_values() & ~F.array_contains(left_out, name), F.col("_cdc_position"))) for name in unchanged]


def held(name: str, summary: Summary) -> Column:
    """Return a struct with a change's value of a column that other changes leave out, and its exact text if any change has one."""
    texts = [F.col("_cdc_exact").getItem(name).alias("_cdc_text")] if name in summary.exact else []
    return F.struct(quote(name), *texts)


def is_lost(name: str, known: Column, left_out: Column, summary: Summary) -> Column:
    """Return an expression: whether the value that is ``known`` of a column (`held`) is NULL, and ``left_out`` has its name.

    Only a value that is not NULL is left out. So the NULL is from before the column, and the value is not known.
    """
    lost = known.isNotNull() & known.getField(name).isNull() & F.array_contains(left_out, name)
    return lost & known.getField("_cdc_text").isNull() if name in summary.exact else lost


def with_texts(exact: Column, texts: Mapping[str, Column]) -> Column:
    """Return a row's exact texts, with ``texts`` replacing those of some columns; null if there are none."""
    own = F.map_filter(F.coalesce(exact, F.create_map().cast("map<string,string>")), lambda name, _: ~name.isin(*texts))
    pairs = [part for name, text in texts.items() for part in (F.lit(name), text)]
    merged = F.map_concat(own, F.map_filter(F.create_map(*pairs), lambda _, text: text.isNotNull()))
    return F.when(F.size(merged) > 0, merged)


def _finish(reduced: DataFrame, columns: Sequence[str], summary: Summary) -> DataFrame:
    """Put reduced rows into their final layout.

    ``_cdc_row`` is the last change, ``_cdc_known_N`` the value of the N-th unsent column.
    """
    row, keeps_deleted = F.col("_cdc_row"), "_cdc_deleted_at" in reduced.columns
    gone = F.col("_cdc_deleted_at").isNotNull() if keeps_deleted else row.getField("_cdc_gone")
    has_row = row.isNotNull() if keeps_deleted else ~row.getField("_cdc_gone")
    known = {name: F.col(f"_cdc_known_{i}") for i, name in enumerate(summary.unchanged)}
    exact = row.getField("_cdc_exact")
    texts = {name: field.getField("_cdc_text") for name, field in known.items() if name in summary.exact}
    if texts:
        exact = with_texts(exact, texts)
    values = [(known[name].getField(name) if name in known else row.getField(name)).alias(name) for name in columns]
    absent = (F.when(field.isNull() & has_row, F.lit(name)) for name, field in known.items())
    lacking = F.array_compact(F.array(*absent).cast("array<string>"))
    nothing = F.array().cast("array<string>")
    lost = {name: is_lost(name, field, row.getField("_cdc_unchanged"), summary) for name, field in known.items()}
    unknown = F.array_compact(F.array(*(F.when(each & has_row, F.lit(name)) for name, each in lost.items())).cast("array<string>"))
    if "_cdc_origin" in reduced.columns:
        is_moved = ~F.col("_cdc_origin").eqNullSafe(F.col("_cdc_key"))
        origin = F.col("_cdc_origin")
        missing, moved = F.when(is_moved, nothing).otherwise(lacking), F.when(is_moved, lacking).otherwise(nothing)
    else:
        origin, missing, moved = F.col("_cdc_key"), lacking, nothing
    return reduced.select(
        "_cdc_key",
        gone.alias("_cdc_gone"),
        *values,
        exact.alias("_cdc_exact"),
        missing.alias("_cdc_missing"),
        moved.alias("_cdc_moved"),
        unknown.alias("_cdc_unknown"),
        origin.alias("_cdc_origin"),
        *(["_cdc_deleted_at", has_row.alias("_cdc_has_row")] if keeps_deleted else []),
    )


def _reduce_chains(events: DataFrame, columns: Sequence[str], summary: Summary) -> DataFrame:
    """Reduce changes if one of them begins an incarnation and leaves a column out."""
    names = [f"_cdc_known_{i}" for i in range(len(summary.unchanged))]
    begins = begins_row() & ~F.col("_cdc_gone")
    so_far = Window.partitionBy("_cdc_key").orderBy("_cdc_position").rowsBetween(Window.unboundedPreceding, 0)
    events = events.withColumn("_cdc_begin", F.max(F.when(begins, F.col("_cdc_position"))).over(so_far))
    aggregates = _last_row(_row(columns, summary), events)
    lasts = ["_cdc_row", "_cdc_deleted_at"][: len(aggregates)]
    incarnations = events.groupBy("_cdc_key", "_cdc_begin").agg(
        *aggregates,
        F.max("_cdc_position").alias("_cdc_end"),
        F.max_by("_cdc_origin", F.when(begins, F.col("_cdc_position"))).alias("_cdc_parent"),
        *(F.max_by(held(name, summary), at).alias(names[i]) for i, (name, at) in enumerate(known_at(summary.unchanged))),
    )
    # An incarnation without a begin in these changes was there before, with its own key. One that began with an insert has no
    # origin: what it lacks is nowhere.
    incarnations = incarnations.withColumn("_cdc_origin", F.when(F.col("_cdc_begin").isNull(), F.col("_cdc_key")))
    # Each round doubles the length of the chains that are resolved. So the number of rounds is the logarithm of the longest chain.
    incarnations = incarnations.withColumn("_cdc_parent_end", F.when(F.col("_cdc_parent").isNotNull(), F.col("_cdc_begin")))
    incarnations = incarnations.localCheckpoint()
    while not incarnations.where(F.col("_cdc_parent").isNotNull()).isEmpty():
        child, parent = incarnations.alias("c"), incarnations.alias("p")
        same = (F.col("c._cdc_parent") == F.col("p._cdc_key")) & (F.col("c._cdc_parent_end") == F.col("p._cdc_end"))
        incarnations = child.join(parent, same, "left").select(
            "c._cdc_key",
            "c._cdc_begin",
            *(f"c.{name}" for name in lasts),
            "c._cdc_end",
            *(F.coalesce(f"c.{name}", f"p.{name}").alias(name) for name in names),
            F.coalesce("c._cdc_origin", "p._cdc_origin").alias("_cdc_origin"),
            F.col("p._cdc_parent"),
            F.col("p._cdc_parent_end"),
        )
        incarnations = incarnations.localCheckpoint()
    everything = F.struct(*lasts, "_cdc_origin", *names)
    last = incarnations.groupBy("_cdc_key").agg(F.max_by(everything, "_cdc_end").alias("_cdc_last"))
    return _finish(last.select("_cdc_key", "_cdc_last.*"), columns, summary)

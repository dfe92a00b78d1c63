"""Tells which changes end all rows before them: TRUNCATE, DROP TABLE, a snapshot. Writes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

from spark_sink.schema.types import ENDS

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Row

__all__ = ["POSITION", "all_ends", "end_position", "ends_all", "exact_time", "first_time"]

POSITION: Final = ("_cdc_end_lsn", "_cdc_ordinal")
"""The columns whose order is the order of the changes. Epochs do not count: a log that was lost begins with the first one again."""

_LAST_ORDINAL: Final = (1 << 31) - 1


def ends_all() -> Column:
    """Return an expression: whether a change ends all rows before it (TRUNCATE, DROP TABLE)."""
    return F.col("_cdc_op").isin(*ENDS)


def end_position() -> Column:
    """Return an expression for the last position that such a change ends.

    A DROP TABLE stands before the change with the same position, which is one of a new table with the name.
    """
    lsn, ordinal = POSITION
    return F.struct(lsn, F.when(F.col("_cdc_op") == "drop", F.col(ordinal) - 1).otherwise(F.col(ordinal)).alias(ordinal))


def exact_time(micros: int | None) -> Column:
    """Return a literal for a time in microseconds since 1970.

    A time that passes through Python as a ``datetime`` without a zone is an hour wrong in the hour in which the clocks go back.
    """
    return F.timestamp_micros(F.lit(micros).cast("bigint"))


def first_time(changes: DataFrame) -> Column:
    """Return a literal for the first commit time of these changes; NULL if there are none."""
    return exact_time(changes.agg(F.unix_micros(F.min("_cdc_commit_time"))).collect()[0][0])


def all_ends(changes: DataFrame) -> Column:
    """Return a literal: the places where all rows end, in order, as an array of ``(at, until)``.

    ``at`` is the last position that ends; ``until`` has the LSN and the time at which it ends.
    """
    until = F.struct(F.col("_cdc_end_lsn").alias("lsn"), F.col("_cdc_commit_time").alias("time"))
    ends = changes.where(ends_all()).select(end_position().alias("at"), until.alias("until"))
    # A snapshot's rows replace all rows before the first of them. Their ordinals may be negative (snapshot/chunk.py), so the end is
    # the last place of the LSN before.
    before = (F.col("_cdc_end_lsn") - 1).alias("_cdc_end_lsn"), F.lit(_LAST_ORDINAL).alias("_cdc_ordinal")
    snapshots = (
        changes.where(F.col("_cdc_op") == "snapshot")
        .groupBy("_cdc_end_lsn")
        .agg(F.min("_cdc_commit_time").alias("_cdc_commit_time"))
        .select(F.struct(*before).alias("at"), until.alias("until"))
    )
    found = ends.unionByName(snapshots)
    kind = found.schema.simpleString().replace("struct<", "array<struct<", 1) + ">"
    micros = F.struct("until.lsn", F.unix_micros("until.time").alias("micros")).alias("until")
    rows = found.orderBy("at").select("at", micros).collect()
    return F.array(*(_literal(row["at"], row["until"]) for row in rows)).cast(kind)


def _literal(at: Row, until: Row) -> Column:
    until_place = F.struct(F.lit(until["lsn"]), exact_time(until["micros"]))
    return F.struct(F.struct(*map(F.lit, at)).alias("at"), until_place.alias("until"))

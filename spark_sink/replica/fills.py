"""Fills a new column of earlier rows with the value that the catalog has for them (`schema.table.Fill`). Writes nothing."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import ArrayType, DecimalType, IntegralType, TimestampType

from cdcpipe.types.arrow.casts import convert_text
from spark_sink.spark.sql import literal, quote

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType

    from spark_sink.schema.table import Fill

__all__ = ["constant", "constant_sql", "filled"]


def filled(rows: DataFrame, fills: Sequence[Fill]) -> DataFrame:
    """Return rows in a changelog's layout with all fills applied at once, because two columns may have swapped their names.

    A mark for an unsent value, and an exact text in ``_cdc_exact``, move to the column's new name, too.
    """
    names = [fill.column for fill in fills]
    unchanged = F.coalesce(F.col("_cdc_unchanged"), F.array().cast("array<string>"))
    exact = F.coalesce(F.col("_cdc_exact"), F.create_map().cast("map<string,string>"))
    values, unsent, texts = {}, [], []
    for fill in fills:
        kind = rows.schema[fill.column].dataType
        if fill.source is not None:
            value, is_unsent = F.col(quote(fill.source)).cast(kind), F.array_contains(unchanged, fill.source)
            text = exact.getItem(fill.source)
            if fill.or_own:
                is_there = value.isNotNull() | text.isNotNull() | is_unsent
                own = _through(F.col(quote(fill.column)), kind, rows.schema[fill.source].dataType)
                value = F.when(is_there, value).otherwise(own)
                text = F.when(is_there, text).otherwise(exact.getItem(fill.column))
                is_unsent |= ~is_there & F.array_contains(unchanged, fill.column)
            values[fill.column] = value
            unsent.append(F.when(is_unsent, F.lit(fill.column)))
            texts.append((fill.column, text))
        else:
            values[fill.column], text = map(F.expr, constant_sql(fill.value, kind))
            texts.append((fill.column, text))
    not_filled = F.array_except(unchanged, F.array(*map(F.lit, names)))
    also_unsent = F.array_compact(F.array(*unsent).cast("array<string>"))
    kept = F.map_filter(exact, lambda name, _: ~name.isin(names))
    added = F.map_filter(F.create_map(*(part for name, text in texts for part in (F.lit(name), text))), lambda _, v: v.isNotNull())
    lists = {"_cdc_unchanged": F.array_union(not_filled, also_unsent), "_cdc_exact": F.map_concat(kept, added)}
    return rows.withColumns(values | lists)


def _through(value: Column, kind: DataType, narrower: DataType) -> Column:
    """Return a value of type ``kind`` as PostgreSQL has it after ALTER TABLE to the narrower type, and back.

    It rounds to an integer; Spark would cut off. NULL for a value that the narrower type can't hold: PostgreSQL had none.
    """
    if isinstance(narrower, IntegralType) and not isinstance(kind, IntegralType):
        value = F.round(value) if isinstance(kind, DecimalType) else F.rint(value)
    return value.try_cast(narrower).cast(kind)


def constant_sql(text: str | None, kind: DataType) -> tuple[str, str]:
    """Return SQL for the value of PostgreSQL's text in this type, and for its exact text, NULL if the type holds the value.

    Only SQL gives the same value in every session. ``F.lit`` takes a datetime for one of the session's zone and of the Julian
    calendar, and refuses a date before the year 1000.
    """
    value, exact = constant(text, kind)
    return _literal(value.as_py(), kind), "CAST(NULL AS STRING)" if exact is None else literal(exact)


def constant(text: str | None, kind: DataType) -> tuple[pa.Scalar, str | None]:
    """Return the value of PostgreSQL's text in this type, and its exact text, None if the type holds the value."""
    arrow = to_arrow_type(kind, timezone="UTC")
    if text is None:
        return pa.scalar(None, arrow), None
    converted = convert_text(pa.array([text]), arrow)
    return converted.array[0], text if len(converted.exact_rows) else None


def _literal(value: Any, kind: DataType) -> str:
    """Write a value as SQL that gives the same value in every session."""
    if isinstance(kind, ArrayType) and value is not None:
        inner = f"array({', '.join(_literal(each, kind.elementType) for each in value)})"
    elif isinstance(value, bytes):
        inner = f"X'{value.hex()}'"
    elif isinstance(kind, TimestampType) and value is not None:
        since = value - datetime(1970, 1, 1, tzinfo=UTC)
        inner = f"timestamp_micros({since // timedelta(microseconds=1)}L)"
    else:
        inner = "NULL" if value is None else literal(str(value))
    return f"CAST({inner} AS {kind.simpleString()})"

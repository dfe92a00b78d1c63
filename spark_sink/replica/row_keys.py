"""The key of a row, as SQL and as expressions: how the keys of two rows are compared.

A value of a key is compared as text if its type has values that only PostgreSQL has, or if the column has had several types.
Changes and replicas have the same texts, whatever the time zone of the session: a user may have given it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it
from pyspark.sql.types import ArrayType, TimestampType

from spark_sink.spark.sql import literal, quote
from spark_sink.spark.value_text import utc_text, value_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType, StructType

    from spark_sink.replica.pieces import Key

__all__ = ["differs_sql", "is_integer", "key_sql", "key_struct", "struct_of"]

_INEXACT = ("date", "timestamp", "timestamp_ntz", "decimal", "array")
"""Types with values that only PostgreSQL has (infinity, BC, NaN, a matrix). In a key their values are compared as text."""

_INTEGERS = ("byte", "short", "integer", "long")


def _is_text(schema: StructType, names: tuple[str, ...]) -> bool:
    """Tell whether a column of a key is compared as text, because it has had several types, or an inexact one."""
    return len(names) > 1 or schema[names[0]].dataType.typeName() in _INEXACT


def is_integer(schema: StructType, names: tuple[str, ...]) -> bool:
    """Tell whether a column of a key is compared as an integer."""
    return not _is_text(schema, names) and schema[names[0]].dataType.typeName() in _INTEGERS


def key_sql(
    schema: StructType,
    key: Key,
    row: str = "",
    exact: str = "_cdc_exact",
    exact_prefix: str = "",
    changes: StructType | None = None,
) -> list[str]:
    """Return SQL for the columns of a row's key, to compare with the fields of ``_cdc_key``.

    ``row`` qualifies its columns, like ``t.``. ``exact`` is the map of its exact texts. A replica may lack columns of another type
    that are gone (`schema.table.gone_columns`), and another program may have made its columns wider. So for a replica, ``changes``
    is the schema of the changes that have ``_cdc_key``: a value of another type would have another text.
    """
    found, types = [], schema if changes is None else changes
    for names in key:
        if _is_text(types, names):
            there = [name for name in names if name in schema.names]
            forms = [_text(_cast(row + quote(name), schema, types, name), types[name].dataType, names) for name in there]
            if "_cdc_exact" in schema.names:
                forms += [f"{exact}[{literal(exact_prefix + name)}]" for name in names]
            found.append(f"coalesce({', '.join(forms)})")
        else:
            found.append(row + quote(names[0]))
    return found


def _cast(value: str, schema: StructType, types: StructType, name: str) -> str:
    """Return SQL for a value of a column of ``schema`` in its type of ``types``. A value that this type can't hold becomes NULL."""
    kind = types[name].dataType
    return value if schema[name].dataType == kind else f"try_cast({value} AS {kind.simpleString()})"


def _text(value: str, kind: DataType, names: tuple[str, ...]) -> str:
    if isinstance(kind, TimestampType):
        # Of several types: the text without the zone meets that of a `timestamp_ntz`. Of one: a number, which takes less time.
        return utc_text(value) if len(names) > 1 else f"CAST(unix_micros({value}) AS STRING)"
    text = value_text(value, kind, is_joined=True) if isinstance(kind, ArrayType) else None
    return f"CAST({value} AS STRING)" if text is None else text


def struct_of(fields: Sequence[str]) -> Column:
    """Return an expression for a key: a struct of the fields ``k0``, ``k1``, … with the values of `key_sql`."""
    return F.struct(*(F.expr(sql).alias(f"k{index}") for index, sql in enumerate(fields)))


def key_struct(rows: DataFrame, key: Key, changes: StructType | None = None) -> Column:
    """Return an expression for the key of a replica's rows, to compare with ``_cdc_key``. For ``changes`` see `key_sql`."""
    return struct_of(key_sql(rows.schema, key, changes=changes))


def differs_sql(before: Sequence[str], after: Sequence[str]) -> str:
    """Return SQL: whether a row's old key differs from its new one. Both have the SQL of `key_sql`.

    An old key may lack values (`partial_old_key`). Only those that it has can tell that the key has changed.
    """
    return " OR ".join(f"({old} IS NOT NULL AND NOT ({old} <=> {new}))" for old, new in zip(before, after, strict=True))

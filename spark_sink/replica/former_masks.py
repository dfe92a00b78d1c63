"""Gives rows from before a copy the masks that changed before it. Writes nothing.

With ``--deletes soft`` a copy does not have the deleted rows: they stay as the replica, or the changelog, has them. If the masks of
the table have changed since (warehouse/mask_settings.py), these rows still have the values from before.
"""

from __future__ import annotations

from functools import reduce as fold
from operator import or_
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it
from pyspark.sql.types import StringType

from cdcpipe.lsn import LSN
from cdcpipe.masks import NULL, REDACT, Masks
from spark_sink.replica.reduction import data_columns
from spark_sink.schema.masking import REDACTED
from spark_sink.schema.table import Table, copies_until
from spark_sink.schema.types import plain_name
from spark_sink.source.typed import OLD_PREFIX
from spark_sink.spark.sql import quote
from spark_sink.warehouse.errors import undamaged
from spark_sink.warehouse.table_names import mask_names
from spark_sink.warehouse.warehouse import masks_path, noted_masks

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import StructField

    from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["changed_kinds", "with_new_masks"]


def with_new_masks(warehouse: Warehouse, table: Table, rows: DataFrame, copied_lsn: int) -> DataFrame:
    """Return rows in a changelog's layout, of the time before a snapshot, without values that a changed mask hides.

    The snapshots up to ``copied_lsn`` are in these rows: if one of them had the masks already, so have the rows. With ``redact`` a
    value is ``***``. With ``hash`` it is NULL, as with ``null``: PostgreSQL's text of the value is not known, and a value that is a
    hash already cannot be told from another one.
    """
    names = data_columns(rows.schema)
    kinds = changed_kinds(warehouse, table, {plain_name(name) for name in names}, copied_lsn)
    if not kinds:
        return rows
    masked: dict[str, list[StructField]] = {}
    for name in names:
        if plain_name(name) in kinds:
            masked.setdefault(plain_name(name), []).append(rows.schema[name])
    values: dict[str, Column] = {}
    for name, fields in masked.items():
        values |= {field.name: F.lit(None).cast(field.dataType) for field in fields}
        texts = [field.name for field in fields if field.dataType == StringType()]
        if kinds[name] == REDACT and texts:
            values[texts[0]] = F.when(fold(or_, map(_is_there, fields)), F.lit(REDACTED))
    hidden = [prefix + name for name in values for prefix in ("", OLD_PREFIX)]
    return rows.withColumns(values | {"_cdc_exact": F.map_filter("_cdc_exact", lambda name, _: ~name.isin(hidden))})


def _is_there(field: StructField) -> Column:
    """Return an expression: whether a row has a value, or an exact text, in this column."""
    text = F.col("_cdc_exact").getItem(field.name)
    return F.col(quote(field.name)).isNotNull() | F.coalesce(text.isNotNull(), F.lit(False))


def changed_kinds(warehouse: Warehouse, table: Table, columns: Collection[str], copied_lsn: int) -> Mapping[str, str]:
    """Return the columns, as PostgreSQL calls them, with a mask that rows of before may lack, and the mask."""
    noted = noted_masks(warehouse.root).get("changes", [])
    with undamaged(masks_path(warehouse.root)):  # one of a version that did not note the tables, too
        changes = [each for each in noted if _matters(warehouse, table, each, copied_lsn)]
    found: dict[str, str] = {}
    if not changes:
        return found
    for name in mask_names(warehouse, [table])[table]:
        kinds = warehouse.masks.kinds(*name, columns)
        for change in changes:
            then = Masks.of(change["masks"]).kinds(*name, columns)
            for column, kind in kinds.items():
                if kind != then.get(column):
                    found[column] = kind if found.get(column, kind) == kind else NULL
    return found


def _matters(warehouse: Warehouse, table: Table, change: Mapping[str, Any], copied_lsn: int) -> bool:
    """Tell whether rows that have the snapshots up to this LSN may be from before this change of the masks."""
    until = [int(LSN.parse(each["until"])) for each in change["tables"] if Table.from_json(each) == table]
    copied = copies_until(warehouse.versions(table), copied_lsn)
    return bool(until) and max(copied, default=0) <= max(until)

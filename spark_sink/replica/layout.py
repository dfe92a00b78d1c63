"""The properties of a replica, and the columns that it gets only when it needs them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it
from pyspark.sql.types import ArrayType, MapType, StringType, StructField

from spark_sink.schema.types import DELETED_AT
from spark_sink.warehouse.formats import SPARK

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyspark.sql import DataFrame

    from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["OPTIONAL", "existing_rows", "first_columns", "replica_properties"]


FIRST_COLUMNS = "cdcpipe.first_columns"
"""The property with the columns that a replica had at its beginning. In a later column, earlier rows may lack their value."""


def replica_properties(warehouse: Warehouse, key: Sequence[str], columns: Sequence[str]) -> dict[str, str]:
    """Return the properties of a new replica with these columns."""
    names = {"cdcpipe.key": json.dumps(key), FIRST_COLUMNS: json.dumps(columns)}
    return names | ({"delta.enableDeletionVectors": "true"} if warehouse.readers == SPARK else {})


OPTIONAL = {
    "_cdc_exact": StructField("_cdc_exact", MapType(StringType(), StringType())),
    "_cdc_unchanged": StructField("_cdc_unchanged", ArrayType(StringType())),
}
"""The columns that a replica gets when it needs them for the first time."""


def existing_rows(rows: DataFrame) -> DataFrame:
    """Return a replica's rows without those that were deleted."""
    return rows.where(F.col(DELETED_AT).isNull()).drop(DELETED_AT) if DELETED_AT in rows.columns else rows


def first_columns(properties: Mapping[str, str]) -> list[str]:
    """Return the columns that a replica with these properties had at its beginning."""
    found: list[str] = json.loads(properties.get(FIRST_COLUMNS, "[]"))
    return found

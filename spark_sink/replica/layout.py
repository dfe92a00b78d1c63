"""The properties of a replica, and the columns that it gets only when it needs them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from pyspark.sql.types import ArrayType, MapType, StringType, StructField

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["OPTIONAL", "first_columns", "replica_properties"]


FIRST_COLUMNS = "cdcpipe.first_columns"
"""The property with the columns that a replica had at its beginning. In a later column, earlier rows may lack their value."""


def replica_properties(key: Sequence[str], columns: Sequence[str]) -> dict[str, str]:
    """Return the properties of a new replica with these columns."""
    names = {"cdcpipe.key": json.dumps(key), FIRST_COLUMNS: json.dumps(columns)}
    return names | {"delta.enableDeletionVectors": "true"}


OPTIONAL = {
    "_cdc_exact": StructField("_cdc_exact", MapType(StringType(), StringType())),
    "_cdc_unchanged": StructField("_cdc_unchanged", ArrayType(StringType())),
}
"""The columns that a replica gets when it needs them for the first time."""


def first_columns(properties: Mapping[str, str]) -> list[str]:
    """Return the columns that a replica with these properties had at its beginning."""
    found: list[str] = json.loads(properties.get(FIRST_COLUMNS, "[]"))
    return found

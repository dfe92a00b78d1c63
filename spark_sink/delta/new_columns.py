"""Adds columns to a Delta table without Spark, in one commit.

    add(path, StructType([StructField("price", DecimalType(10, 2))]))      # True: the table has this column now

Files stay as they are: a column that a file lacks is NULL in its rows.
"""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

from pyspark.sql.types import StructField, StructType

from spark_sink.delta import file_table
from spark_sink.delta.rows import UnsupportedError
from spark_sink.delta.schema import MAPPING_MODE, MAX_COLUMN_ID, mapped, needed_features

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from spark_sink.delta.log import TableLog

__all__ = ["add"]


def add(path: Path, wanted: StructType) -> bool:
    """Add the wanted columns, and fields of structs, that the table lacks. Returns whether there were any.

    Changes nothing and raises UnsupportedError, or DeltaError for a feature of the table that this client does not support, if only
    Spark can do this. One reason is a column whose name needs column mapping, in a table without it.
    """
    return file_table.redefine(path, "ADD COLUMNS", lambda log: _extended(log, wanted), needed_features(wanted))


def _extended(log: TableLog, wanted: StructType) -> Mapping[str, Any]:
    if "columnMapping" in needed_features(wanted) - log.features("writerFeatures"):
        raise UnsupportedError("columns that need column mapping")
    metadata = log.metadata
    properties = dict(metadata.get("configuration", {}))
    mode = properties.get(MAPPING_MODE, "none")
    if mode not in {"none", "name"}:
        raise UnsupportedError(f"column mapping by {mode}")
    numbers = itertools.count(int(properties.get(MAX_COLUMN_ID, 0)) + 1)
    schema = json.loads(metadata["schemaString"])
    if not _extend(schema, wanted, numbers if mode == "name" else None):
        return metadata
    if mode == "name":
        properties[MAX_COLUMN_ID] = str(next(numbers) - 1)
    return {**metadata, "schemaString": json.dumps(schema), "configuration": properties}


def _extend(struct: dict[str, Any], wanted: StructType, numbers: itertools.count[int] | None) -> bool:
    """Append the fields that a struct of the schema lacks, also to structs in it. Returns whether there were any."""
    there = {field["name"]: field for field in struct["fields"]}
    spellings = {name.lower() for name in there}
    is_changed = False
    for field in wanted:
        if field.name in there:
            inner = there[field.name]["type"]
            if isinstance(field.dataType, StructType) and isinstance(inner, dict):
                is_changed |= _extend(inner, field.dataType, numbers)
        elif field.name.lower() in spellings:
            raise UnsupportedError("a column whose name differs from another one only in case")  # Delta's error says which
        else:
            added = StructType([StructField(field.name, field.dataType)])
            struct["fields"] += (added if numbers is None else mapped(added, numbers)).jsonValue()["fields"]
            is_changed = True
    return is_changed

"""The columns of a Delta table as its log has them, as Spark's types: as the table calls them, and as its files do."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.types import StructType

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["PHYSICAL_NAME", "columns", "physical_columns"]

PHYSICAL_NAME: Final = "delta.columnMapping.physicalName"


def columns(metadata: Mapping[str, Any]) -> StructType:
    """Return the columns that a ``metaData`` action defines."""
    return _struct(metadata, lambda field: field["name"])


def physical_columns(metadata: Mapping[str, Any]) -> StructType:
    """Return them by the names that they have in the table's files."""
    return _struct(metadata, lambda field: field["metadata"].get(PHYSICAL_NAME, field["name"]))


def _struct(metadata: Mapping[str, Any], name: Callable[[dict[str, Any]], str]) -> StructType:
    return StructType.fromJson(_renamed(json.loads(metadata["schemaString"]), name))


def _renamed(kind: Any, name: Callable[[dict[str, Any]], str]) -> Any:
    """Return a type with other names for fields of structs, and without what is said of them besides."""
    if not isinstance(kind, dict):
        return kind
    if kind["type"] == "struct":
        fields = [each | {"name": name(each), "type": _renamed(each["type"], name), "metadata": {}} for each in kind["fields"]]
        return kind | {"fields": fields}
    return kind | {key: _renamed(kind[key], name) for key in ("elementType", "keyType", "valueType") if key in kind}

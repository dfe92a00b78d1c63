"""The columns of a Delta table, from its log: with their names in the table or in its files, in Spark's types or in Arrow's."""

from __future__ import annotations

import json
import uuid
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_metadata, to_arrow_schema
from pyspark.sql.types import ArrayType, DataType, MapType, StructField, StructType, TimestampNTZType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    _Describe = Callable[[dict[str, Any]], tuple[str, dict[str, Any]]]

__all__ = [
    "COLUMN_ID",
    "INDEXED_COLUMNS",
    "MAPPING_MODE",
    "MAX_COLUMN_ID",
    "PHYSICAL_NAME",
    "arrow_schema",
    "columns",
    "mapped",
    "needed_features",
    "physical_columns",
]

MAPPING_MODE: Final = "delta.columnMapping.mode"
"""The property that turns on column mapping, with the value ``name``. Files then have other names for the columns."""
MAX_COLUMN_ID: Final = "delta.columnMapping.maxColumnId"
"""The property with the greatest number of a column."""
_UNFIT: Final = frozenset(" ,;{}()\n\t=.")
"""Characters that need column mapping: Delta refuses them in files, and Arrow takes a dot for the path of a struct's field."""
INDEXED_COLUMNS: Final = 32
"""Delta Lake keeps the least and the greatest value per file for this many first columns, unless a property says otherwise."""
COLUMN_ID: Final = "delta.columnMapping.id"
PHYSICAL_NAME: Final = "delta.columnMapping.physicalName"
_FIELD_ID: Final = "PARQUET:field_id"


def needed_features(schema: DataType) -> set[str]:
    """Return the features of Delta's protocol without which a table can't have these columns. Most tables need none.

    A reader that does not know a feature of a table refuses the table. So a table gets a feature only when it needs it.

    Example: ``id int, "unit price" decimal, at timestamp_ntz`` needs ``{"columnMapping", "timestampNtz"}``.
    """
    found = set()
    for name, kind in _parts(schema):
        if not _UNFIT.isdisjoint(name):
            found.add("columnMapping")
        if isinstance(kind, TimestampNTZType):
            found.add("timestampNtz")
    return found


def _parts(kind: DataType) -> Iterator[tuple[str, DataType]]:
    """Yield the fields of a type, and the fields, elements, keys and values in them; the name is empty for what has none."""
    if isinstance(kind, StructType):
        inner = [(field.name, field.dataType) for field in kind]
    elif isinstance(kind, ArrayType):
        inner = [("", kind.elementType)]
    elif isinstance(kind, MapType):
        inner = [("", kind.keyType), ("", kind.valueType)]
    else:
        inner = []
    for name, each in inner:
        yield name, each
        yield from _parts(each)


def mapped(kind: Any, numbers: Iterator[int]) -> Any:
    """Return a type whose fields, and the fields of structs in it, have a number and a name for the files, for column mapping."""
    if isinstance(kind, StructType):
        fields = []
        for field in kind:
            metadata = {COLUMN_ID: next(numbers), PHYSICAL_NAME: f"col-{uuid.uuid4()}"}
            fields.append(StructField(field.name, mapped(field.dataType, numbers), field.nullable, metadata))
        return StructType(fields)
    if isinstance(kind, ArrayType):
        return ArrayType(mapped(kind.elementType, numbers), kind.containsNull)
    if isinstance(kind, MapType):
        return MapType(mapped(kind.keyType, numbers), mapped(kind.valueType, numbers), kind.valueContainsNull)
    return kind


def columns(metadata: Mapping[str, Any]) -> StructType:
    """Return the columns that a ``metaData`` action defines."""
    return _struct(metadata, lambda field: (field["name"], {}))


def physical_columns(metadata: Mapping[str, Any]) -> StructType:
    """Return these columns with their names in the table's files, each with its number (`COLUMN_ID`) if it has one."""
    return _struct(metadata, _physical)


def _physical(field: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    known = field["metadata"]
    return known.get(PHYSICAL_NAME, field["name"]), {COLUMN_ID: known[COLUMN_ID]} if COLUMN_ID in known else {}


def arrow_schema(physical: StructType) -> pa.Schema:
    """Return the columns of a table's files as an Arrow schema.

    If the columns have numbers, Delta's protocol requires them in the files, as Parquet's field ids.
    """
    return pa.schema([_numbered(field) for field in to_arrow_schema(physical, timezone="UTC")])


def _numbered(field: pa.Field) -> pa.Field:
    number = (from_arrow_metadata(field.metadata) or {}).get(COLUMN_ID)
    ids = None if number is None else {_FIELD_ID: str(number)}
    return pa.field(field.name, _numbered_type(field.type), field.nullable, ids)


def _numbered_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_struct(kind):
        return pa.struct([_numbered(field) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(_numbered(kind.value_field))
    if pa.types.is_map(kind):
        return pa.map_(_numbered(kind.key_field), _numbered(kind.item_field))
    return kind


def _struct(metadata: Mapping[str, Any], describe: _Describe) -> StructType:
    return StructType.fromJson(_described(json.loads(metadata["schemaString"]), describe))


def _described(kind: Any, describe: _Describe) -> Any:
    """Return a type whose struct fields have the names and the metadata that ``describe`` returns."""
    if not isinstance(kind, dict):
        return kind
    if kind["type"] == "struct":
        fields = []
        for each in kind["fields"]:
            name, metadata = describe(each)
            fields.append(each | {"name": name, "type": _described(each["type"], describe), "metadata": metadata})
        return kind | {"fields": fields}
    return kind | {key: _described(kind[key], describe) for key in ("elementType", "keyType", "valueType") if key in kind}

"""Gives columns of a Delta table a wider type without Spark, in one commit.

    widen(path, StructType([StructField("id", LongType())]))      # True: id was an integer

Files stay as they are: readers convert the values of older files. Delta's protocol calls this type widening (PROTOCOL.md, "Type
Widening"). The table's definition says of each column what types it had.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.types import (
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StructType,
    TimestampNTZType,
)

from spark_sink.delta import file_table
from spark_sink.delta.rows import UnsupportedError
from spark_sink.delta.schema import columns, needed_features

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from spark_sink.delta.log import TableLog

__all__ = ["ENABLED", "is_wider", "widen"]

ENABLED: Final = "delta.enableTypeWidening"
"""The property that turns on type widening, with the value ``true``."""
_CHANGES: Final = "delta.typeChanges"
_INTEGERS: Final = (ByteType, ShortType, IntegerType, LongType)


def widen(path: Path, wanted: StructType) -> bool:
    """Give columns, and fields of structs, the types that they have in ``wanted``. Returns whether one has got another type.

    From then on, other programs must support type widening to read the table.

    Changes nothing and raises UnsupportedError for a change that Delta's protocol does not allow, or a change of an array's or a
    map's elements, and DeltaError for a feature of the table that this client does not support.
    """
    features = {"typeWidening"} | (needed_features(wanted) - {"columnMapping"})
    return file_table.redefine(path, "CHANGE COLUMNS", lambda log: _widened(log, wanted), features)


def _widened(log: TableLog, wanted: StructType) -> Mapping[str, Any]:
    schema = json.loads(log.metadata["schemaString"])
    if not _widen(schema, columns(log.metadata), wanted):
        return log.metadata
    properties = {**log.metadata.get("configuration", {}), ENABLED: "true"}
    return {**log.metadata, "schemaString": json.dumps(schema), "configuration": properties}


def _widen(struct: dict[str, Any], present: StructType, wanted: StructType) -> bool:
    """Change the types of a struct's fields, also of structs in it. Returns whether there was one to change."""
    is_changed = False
    for field, now in zip(struct["fields"], present, strict=True):
        kind = wanted[now.name].dataType if now.name in wanted.names else now.dataType
        if isinstance(kind, StructType) and isinstance(now.dataType, StructType):
            is_changed |= _widen(field["type"], now.dataType, kind)
        elif kind != now.dataType:
            before, after = now.dataType.jsonValue(), kind.jsonValue()
            if not is_wider(kind, now.dataType):
                raise UnsupportedError(f"a change of the type {now.dataType.typeName()} to {kind.typeName()}")
            changes = [*field["metadata"].get(_CHANGES, ()), {"toType": after, "fromType": before}]
            field |= {"type": after, "metadata": {**field["metadata"], _CHANGES: changes}}
            is_changed = True
    return is_changed


def is_wider(wide: DataType, narrow: DataType) -> bool:
    """Tell whether Delta's protocol allows to change the type ``narrow`` to ``wide`` (PROTOCOL.md, "Supported Type Changes")."""
    match narrow, wide:
        case ((ByteType() | ShortType() | IntegerType() | LongType()), (ByteType() | ShortType() | IntegerType() | LongType())):
            return _INTEGERS.index(type(narrow)) < _INTEGERS.index(type(wide))
        case ((ByteType() | ShortType() | IntegerType() | FloatType()), DoubleType()):
            return True
        case DateType(), TimestampNTZType():
            return True
        case ((ByteType() | ShortType() | IntegerType() | LongType()), DecimalType()):
            return bool(wide.precision - wide.scale >= (20 if isinstance(narrow, LongType) else 10))
        case DecimalType(), DecimalType():
            has_room = wide.scale >= narrow.scale and wide.precision - wide.scale >= narrow.precision - narrow.scale
            return bool(has_room and wide != narrow)
    return False

"""Delta tables whose files we write: a commit adds files to a table, and records up to where the table has its changes.

Commits are written as Delta's protocol has them (PROTOCOL.md, "Delta Log Entries"). Delta's own way to commit takes half a
second of a core, because it makes sure of what all of the table looks like; here nothing of the table is read, and rows are only
added, so a commit may follow any other. What must not have come in between is another definition of the table, or a commit that
records what this one does.

A file that no commit has added is not part of the table: Delta's VACUUM removes it.
"""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.types import ArrayType, MapType, StructField, StructType

from spark_sink.delta import APPLICATION, newest_lsn, write_commit
from spark_sink.warehouse import WarehouseError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from pyspark.sql import SparkSession

    from spark_sink.parquet_file import WrittenFile
    from spark_sink.staging import Position

__all__ = ["ChangedError", "FileTable", "commit", "define", "open_table"]

_KNOWN_FEATURES: Final = {
    "appendOnly",
    "changeDataFeed",
    "clustering",
    "columnMapping",
    "deletionVectors",
    "domainMetadata",
    "invariants",
    "timestampNtz",
    "typeWidening",
    "typeWidening-preview",
    "v2Checkpoint",
    "vacuumProtocolCheck",
}
"""Features of a table that ask nothing more of who adds files than is done here."""

_ID, _PHYSICAL_NAME, _MAX_ID = (f"delta.columnMapping.{name}" for name in ("id", "physicalName", "maxColumnId"))


class ChangedError(Exception):
    """The table's definition has been changed: files in its old columns were not added."""


@dataclass(slots=True)
class FileTable:
    """A table as of a commit; ``version`` goes on with each of ours."""

    path: Path
    version: int
    """The newest commit that is known; -1 for a table that its first commit will make."""
    schema: StructType
    physical: StructType
    """The columns as its files have them."""
    lsn: int
    """Up to where it has its changes; 0 for none."""
    definition: tuple[Mapping[str, Any], ...] = ()
    """What a new table's first commit has to say."""


def open_table(spark: SparkSession, path: Path) -> FileTable:
    """Return the table as it is now; WarehouseError for one that asks for more than is done here."""
    jvm, session = spark._jvm, spark._jsparkSession  # noqa: SLF001 - the only way to the log
    snapshot = jvm.org.apache.spark.sql.delta.DeltaLog.forTableWithSnapshot(session, str(path))._2()  # noqa: SLF001
    metadata = json.loads(snapshot.metadata().json())["metaData"]
    protocol = json.loads(snapshot.protocol().json())["protocol"]
    unknown = set(protocol.get("writerFeatures", ())) - _KNOWN_FEATURES
    if unknown or metadata.get("partitionColumns"):
        problem = f"the feature {min(unknown)}" if unknown else "partitions"
        raise WarehouseError(
            f"the Delta table {path} has {problem}, and cdcpipe can't add to such a table",
            hint="ALTER TABLE ... DROP FEATURE, or let the table be made anew",
        )
    schema = json.loads(metadata["schemaString"])
    return FileTable(
        path,
        snapshot.version(),
        _schema(schema),
        _physical(schema),
        newest_lsn(spark, path) or 0,
    )


def _renamed(kind: Any, name: Callable[[dict[str, Any]], str]) -> Any:
    """Return a type, as Delta's metadata has it, with other names for fields of structs, and without what it says of them."""
    if not isinstance(kind, dict):
        return kind
    if kind["type"] == "struct":
        fields = [each | {"name": name(each), "type": _renamed(each["type"], name), "metadata": {}} for each in kind["fields"]]
        return kind | {"fields": fields}
    return kind | {key: _renamed(kind[key], name) for key in ("elementType", "keyType", "valueType") if key in kind}


def _schema(struct: dict[str, Any]) -> StructType:
    """Return a table's columns."""
    return StructType.fromJson(_renamed(struct, lambda field: field["name"]))


def _physical(struct: dict[str, Any]) -> StructType:
    """Return the columns of a table's files."""
    return StructType.fromJson(_renamed(struct, lambda field: field["metadata"][_PHYSICAL_NAME]))


def define(path: Path, schema: StructType, properties: Mapping[str, str], like: FileTable | None = None) -> FileTable:
    """Return a table that will be there with its first commit.

    Its columns may be some of those of another new table, ``like``: then files of that one can be files of this one, too. (What
    a file has besides the table's columns is nobody's, as it is after DROP COLUMN.)
    """
    if like is None:
        numbers = iter(range(1, 1 << 31))
        mapped = _mapped(schema, numbers)
        greatest = next(numbers) - 1
    else:
        metadata = like.definition[-1]["metaData"]
        there = StructType.fromJson(json.loads(metadata["schemaString"]))
        mapped = StructType([there[name] for name in schema.names])
        greatest = int(metadata["configuration"][_MAX_ID])
    configuration = {
        # Any name may be a column's, a column may go and come back.
        "delta.columnMapping.mode": "name",
        _MAX_ID: str(greatest),
        **properties,
    }
    metadata = {
        "id": str(uuid.uuid4()),
        "format": {"provider": "parquet", "options": {}},
        "schemaString": json.dumps(mapped.jsonValue()),
        "partitionColumns": [],
        "configuration": configuration,
        "createdTime": time.time_ns() // 1_000_000,
    }
    # A later column may be the first timestamp without time zone; Delta does not turn the feature on for an existing table.
    reader = ["columnMapping", "timestampNtz"]
    if properties.get("delta.enableDeletionVectors") == "true":
        reader.append("deletionVectors")
    writer = [*reader, "appendOnly", "invariants"]
    protocol = {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": reader, "writerFeatures": writer}
    return FileTable(path, -1, schema, _physical(mapped.jsonValue()), 0, ({"protocol": protocol}, {"metaData": metadata}))


def _mapped(kind: Any, numbers: Any) -> Any:
    """Give each field, and the fields of structs in it, a number and a name for the files."""
    if isinstance(kind, StructType):
        fields = []
        for field in kind:
            metadata = {_ID: next(numbers), _PHYSICAL_NAME: f"col-{uuid.uuid4()}"}
            fields.append(StructField(field.name, _mapped(field.dataType, numbers), field.nullable, metadata))
        return StructType(fields)
    if isinstance(kind, ArrayType):
        return ArrayType(_mapped(kind.elementType, numbers), kind.containsNull)
    if isinstance(kind, MapType):
        return MapType(_mapped(kind.keyType, numbers), _mapped(kind.valueType, numbers), kind.valueContainsNull)
    return kind


def commit(table: FileTable, files: Iterable[WrittenFile], position: Position, *, is_reached: bool = True) -> None:
    """Make files that lie in the table's directory part of it, in one commit.

    With ``is_reached`` it records that the table has all changes up to ``position`` then.
    ChangedError if the table is no longer defined as it was when it was opened; WarehouseError if somebody else has recorded a
    position since.
    """
    now_ms = time.time_ns() // 1_000_000
    files = list(files)
    information = {
        "timestamp": now_ms,
        "operation": "WRITE",
        "operationParameters": {"mode": "Append", "partitionBy": "[]"},
        "isBlindAppend": True,
        "operationMetrics": {
            "numFiles": str(len(files)),
            "numOutputRows": str(sum(file.rows for file in files)),
            "numOutputBytes": str(sum(file.size for file in files)),
        },
        "userMetadata": str(position),
        "engineInfo": "cdcpipe",
    }
    actions: list[Mapping[str, Any]] = [{"commitInfo": information}, *table.definition]
    if is_reached:
        actions.append({"txn": {"appId": APPLICATION, "version": position.lsn, "lastUpdated": now_ms}})
    names = set(table.physical.names)
    for file in files:
        added = {"path": file.name, "partitionValues": {}, "size": file.size, "modificationTime": now_ms, "dataChange": True}
        actions.append({"add": added | {"stats": json.dumps(file.statistics(names))}})
    text = "".join(json.dumps(action) + "\n" for action in actions)
    table.version = write_commit(table.path, text, table.version + 1, lambda other: _check(table, other))
    table.definition = ()
    if is_reached:
        table.lsn = position.lsn


def _check(table: FileTable, commit: Path) -> None:
    """Raise unless ours may follow a commit of somebody else's."""
    for line in commit.read_text().splitlines():
        action = json.loads(line)
        if "metaData" in action or "protocol" in action:
            raise ChangedError
        if action.get("txn", {}).get("appId") == APPLICATION:
            raise WarehouseError(
                f"somebody else writes changes to {table.path}", hint="a warehouse has one cdcpipe-spark run: stop the other"
            )

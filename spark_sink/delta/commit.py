"""Delta tables whose files we write: a commit adds files to a table, and records up to where the table has its changes.

Commits are written as Delta's protocol has them (PROTOCOL.md, "Delta Log Entries"). Delta's own way to commit takes half a
second of a core, because it makes sure of what all of the table looks like; here nothing of the table is read. Where rows are only
added, a commit may follow any other. What must not have come in between is another definition of the table, or a commit that
records what this one does. Where files are replaced, nothing must have.

A file that no commit has added is not part of the table: Delta's VACUUM removes it.
"""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.sql.types import ArrayType, MapType, StructField, StructType

from cdcpipe.errors import CdcpipeError
from spark_sink.delta.log import APPLICATION, TableLog, commit_path
from spark_sink.delta.schema import COLUMN_ID, COLUMN_MAPPING, PHYSICAL_NAME, arrow_schema, columns, physical_columns
from spark_sink.files import places as storage
from spark_sink.files.parquet import Layout, exact_number

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from pathlib import Path

    from spark_sink.delta.log import Mark
    from spark_sink.files.parquet import WrittenFile

__all__ = [
    "KNOWN_FEATURES",
    "ChangedError",
    "DeltaError",
    "FileTable",
    "Replaced",
    "commit",
    "define",
    "defined",
    "of_log",
    "open_table",
]

KNOWN_FEATURES: Final = {
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

_MAX_ID: Final = "delta.columnMapping.maxColumnId"


_DEFINITIONS: Final = ("metaData", "protocol", "domainMetadata")
"""The actions that say how files of a table are to be written."""


class DeltaError(CdcpipeError):
    """The table asks for more than this client does, or its log is not what it was."""


class ChangedError(Exception):
    """The table has been changed meanwhile: nothing was committed."""


@dataclass(frozen=True, slots=True)
class Replaced:
    """A file of which rows go: those in its new deletion ``vector``, or without one the whole file."""

    file: Mapping[str, Any]
    """The action that added it."""
    vector: Mapping[str, Any] | None = None


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
    clustering: tuple[str, ...] = ()
    """The columns by which its rows are clustered, by the names in its files."""

    def layout(self, *, without: Collection[str] = ()) -> Layout:
        """Return how a file of the table looks; it may lack columns that it has nothing for."""
        fields = zip(self.schema.names, arrow_schema(self.physical), strict=True)
        wanted = [(name, field) for name, field in fields if name not in without]
        names, fields_of_file = zip(*wanted, strict=True) if wanted else ((), ())
        return Layout(tuple(names), pa.schema(list(fields_of_file)), self.clustering)


def open_table(path: Path) -> FileTable:
    """Return the table as it is now; DeltaError for one that asks for more than is done here."""
    log = TableLog(path).refresh()
    if (obstacle := log.obstacle("writerFeatures", KNOWN_FEATURES)) is not None:
        raise DeltaError(
            f"the Delta table {path} has {obstacle}, and cdcpipe can't add to such a table",
            hint="ALTER TABLE ... DROP FEATURE, or let the table be made anew",
        )
    return of_log(log)


def of_log(log: TableLog) -> FileTable:
    """Return the table as its log has it; whether it asks for more than is done here is not looked at."""
    known, physical = columns(log.metadata), physical_columns(log.metadata)
    return FileTable(log.path, log.version, known, physical, log.lsn or 0, clustering=log.clustering)


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
        **COLUMN_MAPPING,
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
    return defined(path, ({"protocol": protocol}, {"metaData": metadata}))


def defined(path: Path, definition: Sequence[Mapping[str, Any]]) -> FileTable:
    """Return a table that `define` has defined, of what its first commit has to say."""
    metadata = definition[-1]["metaData"]
    return FileTable(path, -1, columns(metadata), physical_columns(metadata), 0, tuple(definition))


def _mapped(kind: Any, numbers: Any) -> Any:
    """Give each field, and the fields of structs in it, a number and a name for the files."""
    if isinstance(kind, StructType):
        fields = []
        for field in kind:
            metadata = {COLUMN_ID: next(numbers), PHYSICAL_NAME: f"col-{uuid.uuid4()}"}
            fields.append(StructField(field.name, _mapped(field.dataType, numbers), field.nullable, metadata))
        return StructType(fields)
    if isinstance(kind, ArrayType):
        return ArrayType(_mapped(kind.elementType, numbers), kind.containsNull)
    if isinstance(kind, MapType):
        return MapType(_mapped(kind.keyType, numbers), _mapped(kind.valueType, numbers), kind.valueContainsNull)
    return kind


def commit(
    table: FileTable,
    files: Iterable[WrittenFile],
    mark: Mark,
    *,
    is_reached: bool = True,
    replaced: Sequence[Replaced] | None = None,
) -> None:
    """Make files that lie in the table's directory part of it, in one commit.

    With ``is_reached`` it records that the table has all changes up to ``mark`` then. With ``replaced`` other files go.
    ChangedError if the table is no longer defined as it was when it was opened, if its log does not go back so far, or with
    ``replaced`` if there is any commit that was not known; DeltaError if somebody else has recorded a position since.
    """
    now_ms = time.time_ns() // 1_000_000
    files = list(files)
    information = {
        "timestamp": now_ms,
        "operation": "WRITE" if replaced is None else "MERGE",
        "operationParameters": {"mode": "Append", "partitionBy": "[]"} if replaced is None else {},
        "isBlindAppend": replaced is None,
        "operationMetrics": {
            "numFiles": str(len(files)),
            "numOutputRows": str(sum(file.rows for file in files)),
            "numOutputBytes": str(sum(file.size for file in files)),
        },
        "userMetadata": str(mark),
        "engineInfo": "cdcpipe",
    }
    actions: list[Mapping[str, Any]] = [{"commitInfo": information}, *table.definition]
    if is_reached:
        actions.append({"txn": {"appId": APPLICATION, "version": mark.lsn, "lastUpdated": now_ms}})
    for each in replaced or ():
        actions += _replacing(each, now_ms)
    names = set(table.physical.names)
    for file in files:
        added = {"path": file.name, "partitionValues": {}, "size": file.size, "modificationTime": now_ms, "dataChange": True}
        actions.append({"add": added | {"stats": json.dumps(file.statistics(names))}})
    text = "".join(json.dumps(action) + "\n" for action in actions)
    version = _write(table.path, text, table.version + 1, lambda other: _check(table, other, replaced is not None))
    if version and not commit_path(table.path, version - 1).exists():
        # The table is further than that, and its log no longer has how it came there (delta_log.shorten): nobody would read this.
        commit_path(table.path, version).unlink()
        raise ChangedError
    table.version = version
    table.definition = ()
    if is_reached:
        table.lsn = mark.lsn


def _replacing(replaced: Replaced, now_ms: int) -> list[Mapping[str, Any]]:
    """Return what a commit says of a file of which rows go."""
    file = replaced.file
    removed = {name: file[name] for name in ("path", "partitionValues", "size", "deletionVector") if name in file}
    removed |= {"deletionTimestamp": now_ms, "dataChange": True, "extendedFileMetadata": True}
    if replaced.vector is None:
        return [{"remove": removed}]
    # Least and greatest value may be those of rows that are gone.
    statistics = json.loads(file["stats"], parse_float=exact_number) | {"tightBounds": False}
    added = {**file, "deletionVector": replaced.vector, "dataChange": True, "stats": json.dumps(statistics)}
    return [{"remove": removed}, {"add": added}]


def _check(table: FileTable, commit: Path, is_alone: bool) -> None:
    """Raise unless ours may follow a commit of somebody else's."""
    actions = [json.loads(line) for line in storage.read_lines(commit)]
    if any(action.get("txn", {}).get("appId") == APPLICATION for action in actions):
        raise DeltaError(
            f"somebody else writes changes to {table.path}", hint="a warehouse has one cdcpipe-spark run: stop the other"
        )
    if is_alone or any(kind in action for action in actions for kind in _DEFINITIONS):
        raise ChangedError


def _write(path: Path, text: str, version: int, check: Callable[[Path], None]) -> int:
    """Make ``text`` the table's next commit, whole or not at all, durable with the files that lie there; return its number.

    That is ``version``, or the first after it that nobody has taken; ``check`` is called with each commit that is there.
    """
    storage.make_directory(path / "_delta_log")
    for directory in (path, path.parent):
        storage.sync_directory(directory)
    while True:
        name = commit_path(path, version)
        try:
            storage.put_if_absent(name, text.encode())
        except FileExistsError:
            check(name)
            version += 1
        else:
            return version

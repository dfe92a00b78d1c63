"""Defines and opens Delta tables, and commits files to them, without Spark.

A commit adds or replaces files, and records how far the table has its changes. It follows Delta's protocol (PROTOCOL.md, "Delta Log
Entries"). Delta's own commit takes half a second of a core, because it checks the state of the whole table. A commit here reads
nothing of the table. If it only adds rows, it may follow any other commit, except one that redefines the table, and one that has
recorded a position meanwhile. If it replaces files, no other commit may come in between.

A file that no commit has added is not part of the table. Delta's VACUUM removes it.
"""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.sql.types import StructType

from cdcpipe.errors import CdcpipeError
from cdcpipe.retry import RetryPolicy
from spark_sink.delta.log import APPLICATION, POSITION_RETENTION, TableLog, commit_path
from spark_sink.delta.schema import (
    MAPPING_MODE,
    MAX_COLUMN_ID,
    arrow_schema,
    columns,
    mapped,
    needed_features,
    physical_columns,
)
from spark_sink.files import places
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
    "another_process",
    "columns_with_nulls",
    "commit",
    "define",
    "defined",
    "of_log",
    "open_table",
    "redefine",
    "replace_files",
]

KNOWN_FEATURES: Final = {
    "appendOnly",
    "changeDataFeed",
    "checkpointProtection",
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
"""Features of a table for which a program that adds files need not do more than this module does."""

_REDEFINITIONS: Final = RetryPolicy(attempts=10)

_DEFINITIONS: Final = ("metaData", "protocol", "domainMetadata")
"""The actions that determine how to write files of a table."""


class DeltaError(CdcpipeError):
    """The table has a feature that this client does not support, or another program has committed changes to it."""


class ChangedError(Exception):
    """Another program has changed the table meanwhile. Nothing was committed."""


@dataclass(frozen=True, slots=True)
class Replaced:
    """A file that loses rows: those in its new deletion ``vector``; without a vector, all of them."""

    file: Mapping[str, Any]
    """The action that added the file."""
    vector: Mapping[str, Any] | None = None


@dataclass(slots=True)
class FileTable:
    """A table as of a commit. Each commit of ours updates ``version``."""

    path: Path
    version: int
    """The newest known commit; -1 for a table that its first commit will create."""
    schema: StructType
    physical: StructType
    """The columns with their names in the files."""
    lsn: int
    """The LSN up to which the table has its changes; 0 for none."""
    definition: tuple[Mapping[str, Any], ...] = ()
    """For a new table: the actions of its first commit that define it."""
    clustering: tuple[str, ...] = ()
    """The columns by which its rows are clustered, by the names in its files."""
    properties: Mapping[str, str] = field(default_factory=dict)

    def layout(self, *, without: Collection[str] = ()) -> Layout:
        """Return the layout of a file of the table, without the columns ``without``, which are null in all its rows."""
        fields = zip(self.schema.names, arrow_schema(self.physical), strict=True)
        wanted = [(name, field) for name, field in fields if name not in without]
        names, fields_of_file = zip(*wanted, strict=True) if wanted else ((), ())
        return Layout(tuple(names), pa.schema(list(fields_of_file)), self.clustering)


def open_table(path: Path) -> FileTable:
    """Return the table as it is now. Raises DeltaError if it has a feature that this client does not support."""
    log = TableLog(path).refresh()
    _check_supported(log)
    return of_log(log)


def _check_supported(log: TableLog) -> None:
    if (obstacle := log.obstacle("writerFeatures", KNOWN_FEATURES)) is not None:
        way_out = (
            f"ALTER TABLE ... UNSET TBLPROPERTIES ('{POSITION_RETENTION}')"
            if obstacle.endswith(POSITION_RETENTION)
            else "undo what gave it to the table (ALTER TABLE ... DROP CONSTRAINT, UNSET TBLPROPERTIES), then ALTER TABLE ... DROP "
            "FEATURE ... TRUNCATE HISTORY"
        )
        raise DeltaError(
            f"the Delta table {log.path} has {obstacle}, and cdcpipe can't write to such a table",
            hint=f"{way_out}. Do not remove a changelog: nothing else has its changes",
        )


def of_log(log: TableLog) -> FileTable:
    """Return the table that a log describes. Does not check whether this client supports all its features."""
    known, physical = columns(log.metadata), physical_columns(log.metadata)
    properties = log.metadata.get("configuration", {})
    return FileTable(log.path, log.version, known, physical, log.lsn or 0, clustering=log.clustering, properties=properties)


def columns_with_nulls(log: TableLog, names: Iterable[str]) -> list[str]:
    """Return those of the columns that may have NULL in some row, as far as the statistics of the table's files tell.

    Another program may have written anything as statistics.
    """
    table = of_log(log)
    of_files = dict(zip(table.schema.names, table.physical.names, strict=True))
    counts = [*map(_null_counts, log.files)]
    return [name for name in names if any(count.get(of_files[name]) != 0 for count in counts)]


def _null_counts(file: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        statistics = json.loads(file.get("stats") or "{}")
    except ValueError:
        return {}
    found = statistics.get("nullCount") if isinstance(statistics, dict) else None
    return found if isinstance(found, dict) else {}


def define(path: Path, schema: StructType, properties: Mapping[str, str], like: FileTable | None = None) -> FileTable:
    """Return a new table, which its first commit will create.

    It may have columns of another new table, ``like``. Then files of that table can also be files of this one: a column that they
    lack is NULL. (Readers ignore columns of a file that the table does not have, as after DROP COLUMN.)
    """
    features = needed_features(schema)
    configuration = dict(properties)
    if like is not None:
        shared = like.definition[-1]["metaData"]
        there = StructType.fromJson(json.loads(shared["schemaString"]))
        mapping = {name: shared["configuration"][name] for name in (MAPPING_MODE, MAX_COLUMN_ID) if name in shared["configuration"]}
        if mapping:
            features |= {"columnMapping"}
            numbers = iter(range(int(mapping[MAX_COLUMN_ID]) + 1, 1 << 31))
            others = mapped(StructType([field for field in schema if field.name not in there.names]), numbers)
            schema = StructType([(there if name in there.names else others)[name] for name in schema.names])
            mapping[MAX_COLUMN_ID] = str(next(numbers) - 1)
        configuration |= mapping
    elif "columnMapping" in features:
        numbers = iter(range(1, 1 << 31))
        schema = mapped(schema, numbers)
        configuration |= {MAPPING_MODE: "name", MAX_COLUMN_ID: str(next(numbers) - 1)}
    if properties.get("delta.enableDeletionVectors") == "true":
        features.add("deletionVectors")
    metadata = {
        "id": str(uuid.uuid4()),
        "format": {"provider": "parquet", "options": {}},
        "schemaString": json.dumps(schema.jsonValue()),
        "partitionColumns": [],
        "configuration": configuration,
        "createdTime": time.time_ns() // 1_000_000,
    }
    protocol: dict[str, Any] = {"minReaderVersion": 1, "minWriterVersion": 2}
    if features:
        protocol = _listed_features(features, {*features, "appendOnly", "invariants"})
    return defined(path, ({"protocol": protocol}, {"metaData": metadata}))


def defined(path: Path, definition: Sequence[Mapping[str, Any]]) -> FileTable:
    """Return a table that `define` has defined before, from its ``definition``."""
    metadata = definition[-1]["metaData"]
    known, physical = columns(metadata), physical_columns(metadata)
    return FileTable(path, -1, known, physical, 0, tuple(definition), properties=metadata["configuration"])


def commit(
    table: FileTable,
    files: Iterable[WrittenFile],
    mark: Mark,
    *,
    is_reached: bool = True,
    replaced: Sequence[Replaced] | None = None,
) -> None:
    """Add files, which are in the table's directory, to the table, in one commit. ``replaced`` are files that lose rows.

    With ``is_reached`` the commit records that the table has all changes up to ``mark``, also in Delta's ``userMetadata``.

    Raises ChangedError if the table was redefined since it was opened, if its log does not go back so far, or, with ``replaced``,
    if there is any newer commit. Raises DeltaError if another program has recorded a position since.
    """
    now_ms = time.time_ns() // 1_000_000
    files = list(files)
    metrics = {
        "numFiles": str(len(files)),
        "numOutputRows": str(sum(file.rows for file in files)),
        "numOutputBytes": str(sum(file.size for file in files)),
    }
    operation, parameters = ("WRITE", {"mode": "Append", "partitionBy": "[]"}) if replaced is None else ("MERGE", {})
    more: dict[str, Any] = {"isBlindAppend": replaced is None, "operationMetrics": metrics}
    if is_reached:
        more["userMetadata"] = str(mark)  # not of a copy, which may land before or long after the changes up to its position
    actions = [_information(operation, now_ms, parameters, **more), *table.definition]
    if is_reached:
        actions.append({"txn": {"appId": APPLICATION, "version": mark.lsn, "lastUpdated": now_ms}})
    for each in replaced or ():
        actions += _replacing(each, now_ms)
    actions += [{"add": _added(file, table, now_ms)} for file in files]
    version = _write(table.path, actions, table.version + 1, lambda other: _check(table, other, replaced is not None))
    if version and not commit_path(table.path, version - 1).exists():
        # The table is further than this version, and its log was shortened meanwhile (delta_log.shorten). No reader would see this
        # commit, so take it back.
        commit_path(table.path, version).unlink()
        raise ChangedError
    table.version = version
    table.definition = ()
    if is_reached:
        table.lsn = mark.lsn


def replace_files(log: TableLog, table: FileTable, files: Sequence[Mapping[str, Any]], written: WrittenFile) -> None:
    """Put a file with the same rows in the place of others, in one commit that changes no rows. Hold the right to write meanwhile.

    ``files`` are the actions that have added them. ``log`` and ``table`` are as of that time. Raises ChangedError, and commits
    nothing, if one of the files has left the table, if the table has been redefined, or if another program commits at this moment;
    DeltaError, if ``written`` has not as many rows.
    """
    count = sum(int(json.loads(file["stats"])["numRecords"]) for file in files)
    if written.rows != count:
        raise DeltaError(f"{written.rows} rows were written to {log.path / written.name}, but the files to replace have {count}")
    protocol = log.protocol
    now = of_log(log.refresh())
    there = {str(file["path"]) for file in log.files if not file.get("deletionVector")}
    is_redefined = (now.schema, now.physical, log.protocol) != (table.schema, table.physical, protocol)
    if is_redefined or not {str(file["path"]) for file in files} <= there:
        raise ChangedError
    now_ms = time.time_ns() // 1_000_000
    metrics = {"numRemovedFiles": str(len(files)), "numAddedFiles": "1"}
    actions = [_information("OPTIMIZE", now_ms, {"predicate": "[]"}, isBlindAppend=False, operationMetrics=metrics)]
    actions += [{"remove": {**_removed(file, now_ms), "dataChange": False}} for file in files]
    actions.append({"add": {**_added(written, table, now_ms), "dataChange": False}})
    _write(log.path, actions, log.version + 1, _refuse)


def redefine(path: Path, operation: str, change: Callable[[TableLog], Mapping[str, Any]], features: Collection[str] = ()) -> bool:
    """Replace the action that defines the table's columns and properties by what ``change`` returns for its log, in one commit.

    The commit also gives the table those of the ``features`` that it lacks. They are features of Delta's protocol for readers and
    writers.

    Returns False, and commits nothing, if there is no table or ``change`` returns an equal action. Raises DeltaError if the table
    has a feature that this client does not support, and ChangedError if other programs commit again and again.
    """

    def attempt() -> bool:
        log = TableLog(path).refresh()
        metadata = change(log) if log.version >= 0 else log.metadata
        if metadata == log.metadata:
            return False
        _check_supported(log)
        actions = [_information(operation, time.time_ns() // 1_000_000, {}), {"metaData": metadata}]
        if not log.features("writerFeatures").issuperset(features):
            actions.append({"protocol": _protocol(log, features)})
        _write(path, actions, log.version + 1, _refuse)
        return True

    return _REDEFINITIONS.call(attempt, ChangedError)


def _protocol(log: TableLog, features: Collection[str]) -> dict[str, Any]:
    """Return the table's protocol with more features, which concern readers and writers."""
    return _listed_features(*(log.features(kind).union(features) for kind in ("readerFeatures", "writerFeatures")))


def _listed_features(readers: Collection[str], writers: Collection[str]) -> dict[str, Any]:
    """Return the protocol of a table with these features."""
    return {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": sorted(readers), "writerFeatures": sorted(writers)}


def _information(operation: str, now_ms: int, parameters: Mapping[str, str], **more: Any) -> Mapping[str, Any]:
    """Return the first action of a commit. By ``engineInfo``, `delta.log.table_end` knows the commits of this client."""
    done = {"timestamp": now_ms, "operation": operation, "operationParameters": parameters, **more}
    return {"commitInfo": {**done, "engineInfo": APPLICATION}}


def _refuse(_: Path) -> None:
    raise ChangedError


def _replacing(replaced: Replaced, now_ms: int) -> list[Mapping[str, Any]]:
    """Return the actions of a commit for a file that loses rows."""
    file = replaced.file
    removed = _removed(file, now_ms)
    if replaced.vector is None:
        return [{"remove": removed}]
    # The bounds are not tight any more: the least and the greatest value may be in removed rows.
    statistics = json.loads(file["stats"], parse_float=exact_number) | {"tightBounds": False}
    added = {**file, "deletionVector": replaced.vector, "dataChange": True, "stats": json.dumps(statistics)}
    return [{"remove": removed}, {"add": added}]


def _removed(file: Mapping[str, Any], now_ms: int) -> dict[str, Any]:
    """Return the action that removes a file, given the one that added it."""
    removed = {name: file[name] for name in ("path", "partitionValues", "size", "deletionVector") if name in file}
    return removed | {"deletionTimestamp": now_ms, "dataChange": True, "extendedFileMetadata": True}


def _added(file: WrittenFile, table: FileTable, now_ms: int) -> dict[str, Any]:
    """Return the action that adds a file to the table."""
    added = {"path": file.name, "partitionValues": {}, "size": file.size, "modificationTime": now_ms, "dataChange": True}
    return added | {"stats": json.dumps(file.statistics(set(table.physical.names)))}


def another_process(path: Path) -> DeltaError:
    """Return the error for a changelog or replica that another process has brought further meanwhile."""
    hint = "only one cdcpipe-spark run may use a warehouse: stop the other"
    return DeltaError(f"another process writes changes to {path}", hint=hint)


def _check(table: FileTable, commit: Path, is_alone: bool) -> None:
    """Raise an error if our commit must not follow the commit ``commit`` of another program."""
    actions = [json.loads(line) for line in places.read_lines(commit)]
    if any(action.get("txn", {}).get("appId") == APPLICATION for action in actions):
        raise another_process(table.path)
    if is_alone or any(kind in action for action in actions for kind in _DEFINITIONS):
        raise ChangedError


def _write(path: Path, actions: Iterable[Mapping[str, Any]], version: int, check: Callable[[Path], None]) -> int:
    """Write ``actions`` atomically as the table's next commit, and return its number. It and its files' names are durable.

    The number is ``version``, or the first free one after it. Calls ``check`` with each commit that exists already.
    """
    text = "".join(json.dumps(action) + "\n" for action in actions)
    places.make_directory(path / "_delta_log")
    for directory in (path, path.parent):
        places.sync_directory(directory)
    while True:
        name = commit_path(path, version)
        try:
            places.put_if_absent(name, text.encode())
        except FileExistsError:
            check(name)
            version += 1
        else:
            return version

"""The data source ``cdcpipe``: a staging directory as a batch or a stream of Spark rows.

    spark_sink.register_source(spark)
    spark.read.format("cdcpipe").option("table", "public.orders").load("/var/lib/cdc/staging")

| option | meaning |
|---|---|
| `path` | the staging directory; without `server` it must have the same path on all executors |
| `server` | the `path` of a `server.SegmentServer` in the driver, from which executors get segments |
| `table` | `schema.name`, each part quoted as in SQL if it has a dot or a quote: typed rows of this table |
| `view` | `messages`: a row per logical message; `segments`: a row per segment |
| | with neither `table` nor `view`: the envelope, the same columns for every table |
| `start`, `end` | positions, `EPOCH:LSN`: a batch reads (start, end], a stream begins at start |
| `max_bytes_per_trigger` | the most bytes of segments in one micro-batch of a stream, which has at least one segment |
| `types` | `exact` (default) or `native`: see schema/types.py |
| `max_partition_bytes` | a larger segment is read by several tasks; default 128 MiB. One task reads several small segments |

A typed row has these columns:

- the table's columns (schema/types.py): the new row; for a delete the sent part of the old row; for a truncate all null;
- ``_cdc_op``, then the position of the change: ``_cdc_epoch``, ``_cdc_end_lsn``, ``_cdc_ordinal``;
- ``_cdc_xid`` and ``_cdc_commit_time`` of the transaction;
- ``_cdc_unchanged``: the columns whose TOAST value the server did not send; empty if there are none, never null;
- ``_cdc_old``: the old row, or the key columns that were sent; null if the server sent no old row;
- ``_cdc_exact``: a map from column to text, for values that the column's type cannot hold. The column is null there. A key
  ``_cdc_old.NAME`` is for a value of the old row. The map is empty if there are none, never null.

The names of columns in ``_cdc_unchanged`` and ``_cdc_exact`` are Spark's.

A row of a logical message has these columns (the stream has messages if pgoutput's option ``messages`` is on):

- ``prefix``, ``content`` (the bytes as the server sent them), ``transactional``;
- its place among the changes: ``_cdc_epoch``, ``_cdc_end_lsn``, ``_cdc_ordinal``;
- ``_cdc_lsn``: its own LSN, which pg_logical_emit_message returned; it is unique;
- ``_cdc_xid`` and ``_cdc_commit_time`` of its transaction; null for a message outside of transactions.

A message comes before the change with the same end LSN and ordinal. Several messages at one place are ordered by ``_cdc_lsn``. So
``_cdc_end_lsn, _cdc_ordinal, _cdc_lsn`` (nulls last) orders changes and messages together. A message outside of transactions stays
even if the transaction that wrote it rolls back. Its ``_cdc_end_lsn`` equals its ``_cdc_lsn``, at which no transaction ends; it
comes after every transaction that had committed by then. Its ordinal is 0.

If the user gives a schema, each relation's columns go where `types.assign_columns` says; a column without a place raises an error.
A stream keeps one schema for its life. To follow a table whose columns change, stream the segments and read each batch.

Spark has no metrics for a Python source. So the JSON text of ``sources[0].latestOffset`` in a stream's progress has them, beside
the end of the log: ``batchRows`` (changes and logical messages of all tables) and ``batchBytes`` (size of the segments) of the
micro-batch, ``lagBytes`` (WAL from its end to the end of the log) and ``lagSeconds`` (age of the oldest transaction in that WAL).

The rows come in no particular order. Their order is (epoch, end LSN, ordinal).

Spark creates a reader in another process, calls ``initialOffset`` more than once, calls ``commit`` late or never, and does not
always call ``stop``. Nothing here depends on these calls. ``partitions`` uses only the offsets and the files. So a batch that runs
again is the same batch, and a missing segment raises StagingError.
"""

from __future__ import annotations

import functools
import hashlib
import re
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxBytes, SupportsTriggerAvailableNow
from pyspark.sql.types import (
    ArrayType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
)

import cdcpipe
import spark_sink
from cdcpipe.error_texts import without_values
from cdcpipe.errors import InvalidArgumentsError
from spark_sink.files.local import local_directory
from spark_sink.files.temporary import directory_of_process
from spark_sink.schema.table import EXACT, TYPES
from spark_sink.schema.types import CHANGE_FIELDS, MESSAGE_SCHEMA, as_typed, merge_columns, typed_schema
from spark_sink.source.contents import count_rows
from spark_sink.source.offsets import OFFSET_FORMAT, read_offset
from spark_sink.source.server import SegmentAddress, name_of
from spark_sink.source.slices import Slice, divide, read_relations
from spark_sink.staging.commit_times import CommitTimes
from spark_sink.staging.log import Position, Segment, StagingError, list_segments, log_end
from spark_sink.staging.log_view import LogView

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pyspark.sql import SparkSession

    from cdcpipe.pgoutput.messages import Relation

__all__ = ["CdcpipeDataSource", "quote_table", "register", "relations_in"]

FORMAT_NAME: Final = "cdcpipe"

SEGMENTS_SCHEMA: Final = StructType(
    [
        StructField("epoch", IntegerType()),
        StructField("start_lsn", LongType()),
        StructField("end_lsn", LongType()),
        StructField("path", StringType()),
        StructField("size", LongType()),
    ]
)
ENVELOPE_SCHEMA: Final = StructType(
    [
        *CHANGE_FIELDS,
        StructField("_cdc_unchanged", ArrayType(StringType())),
        StructField("table_schema", StringType()),
        StructField("table_name", StringType()),
        StructField("relation_id", LongType()),
        StructField("new", MapType(StringType(), StringType())),
        StructField("old", MapType(StringType(), StringType())),
    ]
)

_VIEWS: Final = {"messages": MESSAGE_SCHEMA, "segments": SEGMENTS_SCHEMA}

_DEFAULT_PARTITION_BYTES: Final = 128 << 20
_TOGETHER_BYTES: Final = 16 << 20
"""One task reads several segments, up to this size together. Otherwise each small segment would make a task and a file."""

T = TypeVar("T")


_supplied: set[str] = set()
"""The ids of the Spark applications to which `register` has sent our sources."""


def register(spark: SparkSession) -> None:
    """Register ``format("cdcpipe")`` in a session.

    Sends the sources of cdcpipe and spark_sink to the executors as a zip file. So all Python workers run this code, and cdcpipe
    need not be installed on their machines. They need pyspark, pyarrow and numpy, and PYSPARK_PYTHON set before the session starts.
    """
    from spark_sink.spark import session  # not for executors, which import this module

    application = spark.sparkContext.applicationId
    if application not in _supplied:
        spark.sparkContext.addPyFile(str(_source_archive()))
        _supplied.add(application)
    # Spark looks the name up in the active session. If another session were active, Spark would find that session's data source.
    with session.active(spark):
        spark.dataSource.register(CdcpipeDataSource)


def quote_table(namespace: str, name: str) -> str:
    """Return the value of the option ``table`` for a table, whatever its name."""
    return ".".join(part if re.fullmatch(r'[^."]+', part) else '"' + part.replace('"', '""') + '"' for part in (namespace, name))


class CdcpipeDataSource(DataSource):  # type: ignore[misc]  # pyspark is not analysed
    """The data source that Spark creates for ``format("cdcpipe")``; see the module's docstring."""

    @classmethod
    def name(cls) -> str:
        """Return the name for ``format(…)``."""
        return FORMAT_NAME

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        self._options = _Options.parse(dict(options))

    def schema(self) -> StructType:
        """Return the schema that applies if the user gives none."""
        return self._options.schema()

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of a batch."""
        return _BatchReader(self._options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """Return the reader of a stream."""
        return _StreamReader(self._options, schema)


@dataclass(frozen=True, slots=True)
class _Options:
    """The checked options. They are pickled for other processes, so they have plain values only."""

    root: str
    table: tuple[str, str] | None = None
    view: str | None = None
    start: Position | None = None
    end: Position | None = None
    max_bytes_per_trigger: int | None = None
    max_partition_bytes: int = _DEFAULT_PARTITION_BYTES
    server: str | None = None
    types: str = EXACT

    @classmethod
    def parse(cls, options: dict[str, str]) -> _Options:
        """Check the options. Raises InvalidArgumentsError for an option that is unknown or has a bad value."""
        left = {key.lower(): value for key, value in options.items()}
        root = left.pop("path", None)
        table, view = left.pop("table", None), left.pop("view", None)
        if not root:
            _invalid("path", "is missing: the staging directory")
        # An absolute path, because executors have another working directory.
        root = str(local_directory(root, "the staging directory"))
        if view is not None and view not in _VIEWS:
            _invalid("view", f"can only be {' or '.join(map(repr, _VIEWS))}")
        if view is not None and table is not None:
            _invalid("table", "cannot be given with 'view'")
        parsed = cls(
            root=root,
            table=None if table is None else _parse_table(table),
            view=view,
            start=_parse_option(left, "start", Position.parse),
            end=_parse_option(left, "end", Position.parse),
            max_bytes_per_trigger=_parse_option(left, "max_bytes_per_trigger", _parse_size),
            server=left.pop("server", None),
            types=left.pop("types", EXACT),
            max_partition_bytes=_parse_option(left, "max_partition_bytes", _parse_size) or _DEFAULT_PARTITION_BYTES,
        )
        if parsed.types not in TYPES:
            _invalid("types", f"can only be {' or '.join(map(repr, TYPES))}")
        for key in left:
            _invalid(key, "is not known")
        return parsed

    def schema(self) -> StructType:
        """Return the schema that applies if the user gives none."""
        if self.view is not None:
            return _VIEWS[self.view]
        if self.table is None:
            return ENVELOPE_SCHEMA
        found = relations_in(Path(self.root), self.start, self.end)
        versions = [relation for relation in found if (relation.namespace, relation.name) == self.table]
        if not versions:
            msg = f"{self.root} has no change of table {quote_table(*self.table)} in the requested range"
            raise StagingError(msg, hint="is the table in the publication, and has it changed? If so, give a schema")
        return typed_schema(merge_columns(None, (as_typed(version, self.types) for version in versions)))

    def partitions(self, start: Position | None, end: Position | None) -> list[InputPartition]:
        """Plan a batch of (start, end]."""
        planned = _plan(Path(self.root), start, end, None if self.server is None else SegmentAddress.read(self.server))
        if self.view == "segments":
            rows = [(s.epoch, s.start_lsn, s.end_lsn, str(s.path), s.size()) for s, _ in planned]
            return [_SegmentRows(rows)] if rows else []
        together_bytes = min(_TOGETHER_BYTES, self.max_partition_bytes)
        sized = ((piece, segment.size()) for segment, piece in planned)
        return [_Part(pieces) for pieces in divide(sized, self.max_partition_bytes, together_bytes)]

    def read(self, partition: InputPartition, schema: StructType) -> Iterator[pa.RecordBatch]:
        """Read a partition that `partitions` planned. Runs in an executor."""
        # Imported here, because a stream of segments, which the tables are made from, starts a process that reads no rows.
        from spark_sink.source.envelope import EnvelopeReader
        from spark_sink.source.messages import MessageReader
        from spark_sink.source.typed import TypedReader

        match partition:
            case _SegmentRows():
                yield partition.to_batch(schema)
            case _Part(pieces) if self.view == "messages":
                for piece in pieces:
                    yield from MessageReader(piece, schema).read()
            case _Part(pieces) if self.table is not None:
                for piece in pieces:
                    yield from TypedReader(piece, {self.table: None}, schema, self.types).read()
            case _Part(pieces):
                for piece in pieces:
                    yield from EnvelopeReader(piece, schema).read()
            case _ if type(partition) is InputPartition:  # Spark passes this for an empty list of partitions
                return
            case _:
                # Another version of this code planned the partition. Reading nothing here would lose its rows.
                msg = f"this version of cdcpipe does not know partitions of the kind {type(partition).__name__}"
                raise StagingError(msg, hint="the driver and the executors must run the same version")


def _invalid(option: str, problem: str) -> NoReturn:
    msg = f"option {option!r} of format {FORMAT_NAME!r} {problem}"
    raise InvalidArgumentsError(msg)


def _parse_option(left: dict[str, str], name: str, parse: Callable[[str], T]) -> T | None:
    """Remove an option from ``left`` and return its parsed value; None if it is not there."""
    text = left.pop(name, None)
    if text is None:
        return None
    try:
        return parse(text)
    except ValueError as ex:
        _invalid(name, f"cannot be read: {ex}")


def _parse_size(text: str) -> int:
    size = int(text)
    if size <= 0:
        msg = f"not a number of bytes above 0: {text}"
        raise ValueError(msg)
    return size


_IDENTIFIER: Final = r'[^."]+|"(?:[^"]|"")+"'


def _parse_table(text: str) -> tuple[str, str]:
    """Read ``schema.name``."""
    match = re.fullmatch(rf"({_IDENTIFIER})\.({_IDENTIFIER})", text)
    if match is None:
        _invalid("table", f'must be schema.name, each part quoted with " if it has a dot or a quote, not {text!r}')
    namespace, name = (p[1:-1].replace('""', '"') if p.startswith('"') else p for p in match.groups())
    return namespace, name


@dataclass
class _Part(InputPartition):  # type: ignore[misc]  # pyspark is not analysed
    """The slices that one task reads. They are pickled for the executors, so they have plain values only."""

    pieces: list[Slice]


@dataclass
class _SegmentRows(InputPartition):  # type: ignore[misc]  # pyspark is not analysed
    """The rows of the segments view. They are made when the batch is planned."""

    rows: list[tuple[int, int, int, str, int]]

    def to_batch(self, schema: StructType) -> pa.RecordBatch:
        columns = dict(zip(SEGMENTS_SCHEMA.names, zip(*self.rows, strict=True), strict=True))
        arrow_schema = to_arrow_schema(schema, timezone="UTC")
        return pa.record_batch([pa.array(columns[f.name], f.type) for f in arrow_schema], schema=arrow_schema)


def _plan(
    root: Path, start: Position | None, end: Position | None, address: SegmentAddress | None = None
) -> list[tuple[Segment, Slice]]:
    """Return the segments that have transactions of (start, end], each with the slice to read. Raises StagingError for a gap."""
    if end is not None:
        if start is not None and start.lsn >= end.lsn:
            return []
        list_segments(root, end)  # raises StagingError if the log does not reach `end`
    segments = list_segments(root, start)
    if end is not None:
        segments = [segment for segment in segments if segment.start_lsn < end.lsn]
    return [
        (
            segment,
            Slice(
                str(segment.path) if address is None else name_of(segment.path),
                segment.epoch,
                segment.start_lsn if start is None else max(segment.start_lsn, start.lsn),
                segment.end_lsn if end is None else min(segment.end_lsn, end.lsn),
                address=address,
            ),
        )
        for segment in segments
    ]


def relations_in(root: Path, start: Position | None = None, end: Position | None = None) -> list[Relation]:
    """Return the relations that the segments of (start, end] describe, each version once, in order."""
    found: list[Relation] = []
    for segment, _ in _plan(root, start, end):
        for relation in read_relations(segment.path):
            if relation not in found:
                found.append(relation)
    return found


class _BatchReader(DataSourceReader):  # type: ignore[misc]  # pyspark is not analysed
    def __init__(self, options: _Options, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> Sequence[InputPartition]:
        return self._options.partitions(self._options.start, self._options.end)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        with without_values():
            yield from self._options.read(partition, self._schema)


class _StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc]  # pyspark is not analysed
    """The reader of a stream. Its offsets are positions: ``{"format": 1, "position": "1:0/171F388"}``.

    Spark compares offsets as text, so each position has exactly one spelling.

    Without the option ``start``, the offsets also have ``begin``, the position at which the stream began. Spark does not record it,
    and asks again for it if it runs the first micro-batch again. By then the log may begin later.
    """

    def __init__(self, options: _Options, schema: StructType) -> None:
        if options.end is not None:
            _invalid("end", "is for batches only: a stream has no end")
        self._options = options
        self._schema = schema
        self._root = Path(options.root)
        self._log = LogView(self._root)
        self._target: Position | None = None
        self._batch = (Position(0, 0), Position(0, 0))
        """Start and end of the newest planned batch."""

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        if self._options.start is not None:
            return _offset(self._options.start)
        segments = list_segments(self._root)
        return _offset(segments[0].start if segments else log_end(self._root) or Position(0, 0))

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        limit = self._options.max_bytes_per_trigger
        return ReadAllAvailable() if limit is None else ReadMaxBytes(limit)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 - Spark's name
        begin = position = read_offset(start)
        segments = self._log.segments(position)
        if self._target is not None:
            segments = [segment for segment in segments if segment.end_lsn <= self._target.lsn]
        left = limit.max_bytes if isinstance(limit, ReadMaxBytes) else None
        for number, segment in enumerate(segments):
            if left is not None:
                left -= segment.size()
                if left < 0 and number > 0:
                    break
            position = segment.end
        self._batch = begin, position
        first = start.get("begin")
        if first is None and self._options.start is None and position != begin:
            first = str(begin if begin.lsn else segments[0].start)
        return _offset(position, first)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        self._target = log_end(self._root) or Position(0, 0)

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802 - Spark's name
        """Return the end of the log, with the metrics of the newest planned batch: Spark has no metrics for a Python source."""
        end = self._log.end()
        if end is None:
            return None
        start, until = self._batch
        segments = self._log.segments(start) if end.lsn > start.lsn else []
        batch = [segment for segment in segments if segment.start_lsn < until.lsn]
        left = CommitTimes(segments).oldest_after(until.lsn)
        return _offset(end) | {
            "batchRows": count_rows(batch, start.lsn),
            "batchBytes": sum(segment.size() for segment in batch),
            "lagBytes": max(0, end.lsn - until.lsn),
            "lagSeconds": 0.0 if left is None else round(max(0.0, time.time() - left), 3),
        }

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        begin = read_offset(start)
        if self._options.start is None and "begin" in end and "begin" not in start:  # the first micro-batch
            begin = Position.parse(end["begin"])
        return self._options.partitions(begin, read_offset(end))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        with without_values():
            yield from self._options.read(partition, self._schema)


def _offset(position: Position, begin: str | None = None) -> dict[str, Any]:
    return ({} if begin is None else {"begin": begin}) | {"format": OFFSET_FORMAT, "position": str(position)}  # keys sorted


@functools.cache
def _source_archive() -> Path:
    """Zip the sources of cdcpipe and spark_sink, and return the path. The file name depends on the contents."""
    files = [
        (path, f"{package.__name__}/{path.relative_to(root).as_posix()}")
        for package in (cdcpipe, spark_sink)
        for root in map(Path, package.__path__)
        for path in sorted(root.rglob("*.py"))
    ]
    contents = [(name, path.read_bytes()) for path, name in files]
    digest = hashlib.sha256(b"".join(name.encode() + b"\0" + content for name, content in contents)).hexdigest()
    archive = directory_of_process() / f"cdcpipe-sources-{digest[:16]}.zip"
    with zipfile.ZipFile(archive, "w") as target:
        for name, content in contents:
            target.writestr(name, content)
    return archive

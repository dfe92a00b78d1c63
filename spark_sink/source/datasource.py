"""The data source ``cdcpipe``: a staging directory as a batch or a stream of Spark rows.

    spark_sink.source.register(spark)
    spark.read.format("cdcpipe").option("table", "public.orders").load("/var/lib/cdc/staging")

| option | meaning |
|---|---|
| `path` | the staging directory; executors read it too, so it must be at the same place for all, unless there is a |
| `server` | the `path` of a segment_server.SegmentServer in the driver, from which executors get what they read |
| `table` | `schema.name`, each part quoted as in SQL where it has a dot or a quote: typed rows of this table |
| `view` | `messages`: a row per logical message. `segments`: a row per segment |
| | neither `table` nor `view`: the envelope, the same columns for every table |
| `start`, `end` | positions, `EPOCH:LSN`: a batch reads (start, end], a stream begins at start |
| `max_bytes_per_trigger` | a stream's micro-batch takes no more segments than have this many bytes, but at least one |
| `types` | `exact` (default) or `native`: see schema/types.py |
| `max_partition_bytes` | a larger segment is read in several tasks; default 128 MiB. Small ones are read together in one |

A typed row has the table's columns (schema/types.py; the new row, for a delete what was sent of the old one, for a truncate
nothing), ``_cdc_op``, the position ``_cdc_epoch``, ``_cdc_end_lsn``, ``_cdc_ordinal``, then ``_cdc_xid``, ``_cdc_commit_time``,
``_cdc_unchanged`` (the columns whose TOAST value was not sent: empty, never null), ``_cdc_old`` (the old row, or of the key
what was sent; null if nothing was) and ``_cdc_exact`` (column -> text of the values that the column's type cannot hold,
which are null there; ``_cdc_old.NAME`` for one in the old row; empty, never null). The names in both are Spark's.

A row of a logical message (the stream has them with pgoutput's option ``messages``) has ``prefix``, ``content`` (its bytes as
they are), ``transactional``, then ``_cdc_epoch``, ``_cdc_end_lsn``, ``_cdc_ordinal``, ``_cdc_lsn`` (its own LSN, which
pg_logical_emit_message returned: no other has the same), and its transaction's ``_cdc_xid`` and ``_cdc_commit_time``, null if
it has none. Its place is before the change with the same end LSN and ordinal; of several messages there the LSN tells which is
first. So over changes and messages together ``_cdc_end_lsn, _cdc_ordinal, _cdc_lsn`` is the order, nulls last. One that is not
transactional is there whatever becomes of the transaction that wrote it, at a place of its own: its ``_cdc_end_lsn`` is its
``_cdc_lsn``, which is no transaction's and is behind all that had committed by then; its ordinal is 0.

A schema given by the user is kept to: each relation's columns go where `types.assign_columns` says, and what finds no place
is an error. A stream has one schema for its life; to follow a table that changes, stream the segments and read each batch.

Spark has no metrics for a source in Python. So a stream's progress has them in the JSON text of ``sources[0].latestOffset``, beside
the log's end: ``batchRows`` and ``batchBytes`` of the micro-batch (changes and logical messages of all tables; the size of its
segments), ``lagBytes``, WAL from its end to the log's, and ``lagSeconds``, the age of the oldest transaction there.

The rows come in no particular order: (epoch, end LSN, ordinal) is the order.

Spark makes a reader in a process of its own, calls ``initialOffset`` more than once, ``commit`` late or never and ``stop`` not
reliably: nothing here depends on them. ``partitions`` looks at nothing but the offsets and the files, so a batch that is
run again is the same batch; a segment that is not there any more is a StagingError.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import re
import shutil
import tempfile
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
from cdcpipe.errors import InvalidArgumentsError
from spark_sink.files.local import local_directory
from spark_sink.schema.table import EXACT, TYPES
from spark_sink.schema.types import CHANGE_FIELDS, MESSAGE_SCHEMA, as_typed, merge_columns, typed_schema
from spark_sink.source.contents import count_rows
from spark_sink.source.envelope import EnvelopeReader
from spark_sink.source.messages import MessageReader
from spark_sink.source.offsets import OFFSET_FORMAT, read_offset
from spark_sink.source.server import Origin, name_of
from spark_sink.source.slices import Slice, divide, read_relations
from spark_sink.source.typed import TypedReader
from spark_sink.staging.commit_times import CommitTimes
from spark_sink.staging.log import LogView, Position, Segment, StagingError, list_segments, log_end

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pyspark.sql import SparkSession

    from cdcpipe.pgoutput.messages import Relation

__all__ = ["CdcpipeDataSource", "quote_table", "register", "relation_versions", "tables_in"]

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
"""Segments are read in one task up to this size: one that is sealed every second would make a task, and a file, of a few rows."""

T = TypeVar("T")


_supplied: set[str] = set()
"""The Spark applications that have our sources."""


def register(spark: SparkSession) -> None:
    """Make ``format("cdcpipe")`` known to a session.

    The sources of cdcpipe and spark_sink are sent along as a zip file, so that the Python workers and executors, on any
    machine, run this code, whether it is installed there or not. They need pyspark, pyarrow and numpy; nothing has to be
    set up before the session starts but PYSPARK_PYTHON.
    """
    from spark_sink.spark import session  # not for executors, which import this module

    application = spark.sparkContext.applicationId
    if application not in _supplied:
        spark.sparkContext.addPyFile(str(_source_archive()))
        _supplied.add(application)
    # Spark looks the name up in the active session: another one's would be taken for somebody else's data source.
    with session.active(spark):
        spark.dataSource.register(CdcpipeDataSource)


def quote_table(namespace: str, name: str) -> str:
    """Return the value of the option ``table`` for a table, whatever its name."""
    return ".".join(part if re.fullmatch(r'[^."]+', part) else '"' + part.replace('"', '""') + '"' for part in (namespace, name))


def relation_versions(path: Path | str, table: str, start: Position | None = None, end: Position | None = None) -> list[Relation]:
    """Return how the table looked in the segments of (start, end], each version once, in order; empty if it is not there."""
    wanted = _parse_table(table)
    relations = _relations(Path(path), start, end)
    return [relation for relation in relations if (relation.namespace, relation.name) == wanted]


def tables_in(
    path: Path | str, start: Position | None = None, end: Position | None = None
) -> dict[tuple[str, str], list[Relation]]:
    """Return the tables, by schema and name, that the segments of (start, end] describe, each with its versions in order."""
    tables: dict[tuple[str, str], list[Relation]] = {}
    for relation in _relations(Path(path), start, end):
        tables.setdefault((relation.namespace, relation.name), []).append(relation)
    return tables


class CdcpipeDataSource(DataSource):  # type: ignore[misc]  # pyspark is not analysed
    """What Spark makes of ``format("cdcpipe")``; see the module's docstring."""

    @classmethod
    def name(cls) -> str:
        """Return what stands in ``format(…)``."""
        return FORMAT_NAME

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        self._options = _Options.parse(dict(options))

    def schema(self) -> StructType:
        """Return the schema where the user gives none."""
        return self._options.schema()

    def reader(self, schema: StructType) -> DataSourceReader:
        """Read as a batch."""
        return _BatchReader(self._options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """Read as a stream."""
        return _StreamReader(self._options, schema)


@dataclass(frozen=True, slots=True)
class _Options:
    """The options, checked. Goes to other processes by pickle: plain values only."""

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
        """Raise InvalidArgumentsError for an option that is unknown or cannot be read."""
        left = {key.lower(): value for key, value in options.items()}
        root = left.pop("path", None)
        table, view = left.pop("table", None), left.pop("view", None)
        if not root:
            _invalid("path", "is missing: the staging directory")
        # Executors have another working directory.
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
        """Return the schema where the user gives none."""
        if self.view is not None:
            return _VIEWS[self.view]
        if self.table is None:
            return ENVELOPE_SCHEMA
        versions = relation_versions(self.root, quote_table(*self.table), self.start, self.end)
        if not versions:
            msg = f"{self.root} has no change of table {quote_table(*self.table)} in the range asked for"
            raise StagingError(msg, hint="is the table in the publication, and was it changed since? else give a schema")
        return typed_schema(merge_columns(None, (as_typed(version, self.types) for version in versions)))

    def partitions(self, start: Position | None, end: Position | None) -> list[InputPartition]:
        """Plan a batch of (start, end]."""
        planned = _plan(Path(self.root), start, end, None if self.server is None else Origin.read(self.server))
        if self.view == "segments":
            rows = [(s.epoch, s.start_lsn, s.end_lsn, str(s.path), s.size()) for s, _ in planned]
            return [_SegmentRows(rows)] if rows else []
        together_bytes = min(_TOGETHER_BYTES, self.max_partition_bytes)
        sized = ((piece, segment.size()) for segment, piece in planned)
        return [_Part(pieces) for pieces in divide(sized, self.max_partition_bytes, together_bytes)]

    def read(self, partition: InputPartition, schema: StructType) -> Iterator[pa.RecordBatch]:
        """Read what `partitions` planned, in an executor."""
        match partition:
            case _SegmentRows():
                yield partition.to_batch(schema)
            case _Part(pieces) if self.view == "messages":
                for piece in pieces:
                    yield from MessageReader(piece, schema).read()
            case _Part(pieces) if self.table is not None:
                for piece in pieces:
                    yield from TypedReader(piece, self.table, schema, self.types).read()
            case _Part(pieces):
                for piece in pieces:
                    yield from EnvelopeReader(piece, schema).read()
            case _ if type(partition) is InputPartition:  # what Spark makes of an empty list of partitions
                return
            case _:
                # Planned by a process that runs other code than this one. To read nothing would be to lose it.
                msg = f"a partition of a kind that this version of cdcpipe does not know: {type(partition).__name__}"
                raise StagingError(msg, hint="the driver and the executors must run the same version")


def _invalid(option: str, problem: str) -> NoReturn:
    msg = f"option {option!r} of format {FORMAT_NAME!r} {problem}"
    raise InvalidArgumentsError(msg)


def _parse_option(left: dict[str, str], name: str, parse: Callable[[str], T]) -> T | None:
    """Take an option out of those that are left and read it."""
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
        _invalid("table", f'is schema.name, each quoted with " where it has a dot or a quote, and not {text!r}')
    namespace, name = (p[1:-1].replace('""', '"') if p.startswith('"') else p for p in match.groups())
    return namespace, name


@dataclass
class _Part(InputPartition):  # type: ignore[misc]  # pyspark is not analysed
    """What one task reads. Goes to executors by pickle: plain values only."""

    pieces: list[Slice]


@dataclass
class _SegmentRows(InputPartition):  # type: ignore[misc]  # pyspark is not analysed
    """The rows of the segments view, found when the batch was planned."""

    rows: list[tuple[int, int, int, str, int]]

    def to_batch(self, schema: StructType) -> pa.RecordBatch:
        columns = dict(zip(SEGMENTS_SCHEMA.names, zip(*self.rows, strict=True), strict=True))
        arrow_schema = to_arrow_schema(schema, timezone="UTC")
        return pa.record_batch([pa.array(columns[f.name], f.type) for f in arrow_schema], schema=arrow_schema)


def _plan(root: Path, start: Position | None, end: Position | None, origin: Origin | None = None) -> list[tuple[Segment, Slice]]:
    """Return the segments that have transactions of (start, end], and what of each is wanted; StagingError if one is missing."""
    if end is not None:
        if start is not None and start.lsn >= end.lsn:
            return []
        list_segments(root, end)  # raises unless the log, which has no gaps, reaches to there
    segments = list_segments(root, start)
    if end is not None:
        segments = [segment for segment in segments if segment.start_lsn < end.lsn]
    return [
        (
            segment,
            Slice(
                str(segment.path) if origin is None else name_of(segment.path),
                segment.epoch,
                segment.start_lsn if start is None else max(segment.start_lsn, start.lsn),
                segment.end_lsn if end is None else min(segment.end_lsn, end.lsn),
                origin=origin,
            ),
        )
        for segment in segments
    ]


def _relations(root: Path, start: Position | None, end: Position | None) -> list[Relation]:
    """Return the relations that the segments describe, each version once, in order."""
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
        return self._options.read(partition, self._schema)


class _StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc]  # pyspark is not analysed
    """Offsets are positions: ``{"format": 1, "position": "1:0/171F388"}``. Spark compares them as text: one spelling only."""

    def __init__(self, options: _Options, schema: StructType) -> None:
        if options.end is not None:
            _invalid("end", "is for batches: a stream has no end")
        self._options = options
        self._schema = schema
        self._root = Path(options.root)
        self._log = LogView(self._root)
        self._target: Position | None = None
        self._batch = (Position(0, 0), Position(0, 0))
        """The newest batch that was planned: its start and its end."""

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
        return _offset(position)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        self._target = log_end(self._root) or Position(0, 0)

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802 - Spark's name
        """Return the log's end with the metrics of the batch just planned: Spark has no place of its own for a Python source's."""
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
        return self._options.partitions(read_offset(start), read_offset(end))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self._options.read(partition, self._schema)


def _offset(position: Position) -> dict[str, Any]:
    return {"format": OFFSET_FORMAT, "position": str(position)}  # keys sorted


@functools.cache
def _source_archive() -> Path:
    """Zip the sources of the core and of this package, under a name that tells one content from another."""
    files = [
        (path, f"{package.__name__}/{path.relative_to(root).as_posix()}")
        for package in (cdcpipe, spark_sink)
        for root in map(Path, package.__path__)
        for path in sorted(root.rglob("*.py"))
    ]
    contents = [(name, path.read_bytes()) for path, name in files]
    digest = hashlib.sha256(b"".join(name.encode() + b"\0" + content for name, content in contents)).hexdigest()
    directory = Path(tempfile.mkdtemp(prefix="cdcpipe-sources-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    archive = directory / f"cdcpipe-sources-{digest[:16]}.zip"
    with zipfile.ZipFile(archive, "w") as target:
        for name, content in contents:
            target.writestr(name, content)
    return archive

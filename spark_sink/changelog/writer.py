"""Writes the changes in segments to files of changelogs. Runs in executors; for a small micro-batch in the driver.

A task opens each of its segments once, for all tables, and decodes each record once, to Arrow columns. It writes them to a Parquet
file for each table, in the table's directory. These files are not part of the table before the driver commits them. The driver
knows the number of rows of each file then (changelog/tables.py). So the files of a lost task never count, and the driver can have
all tasks run again. A task that fails removes its files: on a full disk each new attempt would take the room that was freed.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, cast

import pyarrow as pa
import pyarrow.compute as pc

from cdcpipe.error_texts import without_values
from cdcpipe.masks import NO_MASKS, Masks
from cdcpipe.retry import RetryPolicy
from spark_sink.files import places
from spark_sink.files.parquet import FileWriter, Layout, WrittenFile, part_name
from spark_sink.files.system_hints import WORKER_ENDED
from spark_sink.schema.table import EXACT
from spark_sink.source.messages import MessageReader
from spark_sink.source.server import SegmentAddress, name_of
from spark_sink.source.slices import OpenSlice, Slice, divide
from spark_sink.source.typed import OLD_PREFIX, TypedReader
from spark_sink.spark.worker import settle
from spark_sink.staging.log import Segment

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

__all__ = ["Target", "Written", "write"]

_logger = logging.getLogger(__name__)

_TASK_BYTES: Final = 16 << 20
"""The least bytes of segments for one task, so that files do not become too small."""
_DRIVER_BYTES: Final = 2 << 20
"""A micro-batch up to this size is written by the driver itself, in less time than it takes to start a task."""
_JOBS: Final = RetryPolicy(attempts=3)
"""How often to run the tasks of a micro-batch if Python workers are killed. With a local master, Spark itself never tries again."""


@dataclass(frozen=True, slots=True)
class Target:
    """A table to write changes to. It is pickled for the executors, so it has plain values only."""

    relations: Mapping[tuple[str, str], Collection[int]] | None
    """Schema and name of each name that the table has in these segments, with the OIDs; None for the logical messages."""
    schema: StructType
    """The columns of its changelog."""
    directory: str
    layout: Layout
    """The columns of its files."""
    after_lsn: int
    """The LSN up to which the table has its changes already."""
    types: str = EXACT
    masks: Masks = NO_MASKS
    """With the key, which the executors do not have."""


@dataclass(frozen=True, slots=True)
class Written:
    """A written file of a table, and facts about its changes."""

    file: WrittenFile
    exact: Counter[str]
    """Counts by column the values that their type cannot hold, without those of old rows."""
    incomplete_lsn: int
    """The end LSN of the last insert that lacks a value, because the server did not send it; 0 for none."""


def write(
    spark: SparkSession, segments: Sequence[Segment], targets: Sequence[Target], address: SegmentAddress | None = None
) -> list[list[Written]]:
    """Write the changes of the targets in these segments. Returns the files of each target.

    Executors read the segments at the same path as the driver; with an ``address`` they fetch them from that server.
    """
    sizes = [segment.size() for segment in segments]
    if sum(sizes) <= _DRIVER_BYTES:
        found = [_write([_slice(segment, None) for segment in segments], targets)]
    else:
        context = spark.sparkContext
        slices = [(_slice(segment, address), size) for segment, size in zip(segments, sizes, strict=True)]
        task_bytes = max(_TASK_BYTES, -(-sum(sizes) // context.defaultParallelism))
        tasks = divide(slices, task_bytes, task_bytes)

        def job() -> list[list[Written | None]]:
            written = context.parallelize(tasks, len(tasks)).map(lambda pieces: _write_as_task(pieces, targets))
            return cast("list[list[Written | None]]", written.collect())

        found = _JOBS.call(job, Exception, where=_has_lost_a_worker)
    return [[of_target for of_target in of_targets if of_target is not None] for of_targets in zip(*found, strict=True)]


def _has_lost_a_worker(ex: Exception) -> bool:
    """Tell whether Spark's error says that a Python worker has ended without an error of its own. Logs a warning if so."""
    is_lost = WORKER_ENDED in str(ex)
    if is_lost:
        _logger.warning("a Python worker of Spark has ended while it wrote changes (the system's log tells why: dmesg)")
    return is_lost


def _slice(segment: Segment, address: SegmentAddress | None) -> Slice:
    path = str(segment.path) if address is None else name_of(segment.path)
    return Slice(path, segment.epoch, segment.start_lsn, segment.end_lsn, address=address)


def _write_as_task(pieces: Sequence[Slice], targets: Sequence[Target]) -> list[Written | None]:
    with without_values():
        found = _write(pieces, targets)
    settle()
    return found


def _write(pieces: Sequence[Slice], targets: Sequence[Target]) -> list[Written | None]:
    """Write one file for each target that has changes in these slices. After an error there is none of these files."""
    opened: dict[tuple[int, int], OpenSlice] = {}

    def open_beyond(number: int, lsn: int) -> OpenSlice:
        if (number, lsn) not in opened:
            opened[number, lsn] = OpenSlice(replace(pieces[number], after_lsn=lsn))
        return opened[number, lsn]

    def beyond(lsn: int) -> Iterator[OpenSlice]:
        return (open_beyond(number, max(piece.after_lsn, lsn)) for number, piece in enumerate(pieces) if piece.until_lsn > lsn)

    found: list[Written | None] = []
    try:
        for target in targets:
            found += [_write_table(beyond(target.after_lsn), target)]
    except BaseException:
        for target, written in zip(targets, found, strict=False):
            if written is not None:
                places.remove_files(places.place(target.directory), [written.file.name])
        raise
    return found


def _write_table(slices: Iterator[OpenSlice], target: Target) -> Written | None:
    writer: FileWriter | None = None
    exact: Counter[str] = Counter()
    incomplete_lsn = 0
    try:
        for opened in slices:
            if target.relations is not None and not opened.describes(target.relations):
                continue  # before there is a reader: it takes longer to make than what it would read
            for batch in _reader(opened, target).read():
                if writer is None:
                    writer = FileWriter(target.directory, part_name(), target.layout)
                writer.write_batch(batch)
                if target.relations is not None:
                    exact.update(_count_exact(batch))
                    incomplete_lsn = max(incomplete_lsn, _incomplete_lsn(batch))
    except BaseException:
        if writer is not None:
            writer.discard()
        raise
    return None if writer is None else Written(writer.close(), exact, incomplete_lsn)


def _reader(opened: OpenSlice, target: Target) -> MessageReader | TypedReader:
    if target.relations is None:
        return MessageReader(opened, target.schema)
    return TypedReader(opened, target.relations, target.schema, target.types, target.masks)


def _count_exact(batch: pa.RecordBatch) -> dict[str, int]:
    counts = batch.column("_cdc_exact").keys.value_counts().to_pylist()
    return {each["values"]: each["counts"] for each in counts if not each["values"].startswith(OLD_PREFIX)}


def _incomplete_lsn(batch: pa.RecordBatch) -> int:
    """Return the end LSN of the last insert without a value that was not sent; 0 for none."""
    unchanged = batch.column("_cdc_unchanged")
    if not len(unchanged.values):
        return 0
    is_incomplete = pc.and_(pc.equal(batch.column("_cdc_op"), "insert"), pc.greater(pc.list_value_length(unchanged), 0))
    return pc.max(batch.column("_cdc_end_lsn").filter(is_incomplete)).as_py() or 0

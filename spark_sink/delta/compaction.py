"""Puts small files of a Delta table together, without Spark, and without keeping its writers waiting.

    files = compact(path, small_bytes=64 << 20, right=lock.append)

OPTIMIZE does the same, but the table's writers have to wait until it has opened thousands of small files, one after the other: its
commit can overwrite one of theirs (warehouse/lock.py). Here only the commit needs the right to write. It is refused if one of the
files has left the table meanwhile, or if the table was redefined.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from spark_sink.delta import file_table
from spark_sink.delta.file_table import KNOWN_FEATURES, ChangedError, DeltaError
from spark_sink.delta.log import TableLog
from spark_sink.delta.row_groups import RowGroups
from spark_sink.delta.rows import UnsupportedError, fields_of, opened_file, record_batches, statistics
from spark_sink.files import places
from spark_sink.files.parquet import FileWriter, WrittenFile, part_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from spark_sink.files.parquet import Layout

__all__ = ["compact"]

_BATCH_ROWS: Final = 1 << 12
"""So many rows are read at once. A small file may have gigabytes of values, if they are alike."""


def compact(
    path: Path,
    small_bytes: int,
    right: Callable[[], AbstractContextManager[object]],
    is_stopping: Callable[[], bool] = lambda: False,
) -> int:
    """Put files of less than ``small_bytes`` together into files of about twice that size; return how many files have gone.

    ``right`` is held for each commit; it may raise InterruptedError. Stops early once ``is_stopping`` is True. Raises
    UnsupportedError for a table or a file that needs Spark, ChangedError if the table has changed so that nothing could be
    committed, and OSError; then nothing was changed.
    """
    log = TableLog(path).refresh()
    if (obstacle := log.obstacle("writerFeatures", KNOWN_FEATURES)) is not None:
        raise UnsupportedError(f"a table with {obstacle}")
    table, gone = file_table.of_log(log), 0
    fields_of(table.physical, table.schema.names)  # raises for a name with a dot
    for group in _groups(_small(log.files, small_bytes), 2 * small_bytes):
        written = _write(path, table.layout(), group, is_stopping)
        if written is None:
            return gone
        try:
            with right():
                file_table.replace_files(log, table, group, written)
        except (ChangedError, DeltaError, InterruptedError):
            # After another error the commit may have been made, and the file be part of the table.
            places.remove_files(path, [written.name])
            raise
        gone += len(group)
    return gone


def _small(files: Iterable[Mapping[str, Any]], size: int) -> list[Mapping[str, Any]]:
    """Return the files that are small, in the order in which they were added."""
    found = [file for file in files if int(file["size"]) < size and not file.get("deletionVector")]
    return sorted(found, key=lambda file: (int(file["modificationTime"]), str(file["path"])))


def _groups(files: Sequence[Mapping[str, Any]], size: int) -> Iterator[list[Mapping[str, Any]]]:
    """Yield files that are to become one file of about ``size``."""
    group: list[Mapping[str, Any]] = []
    total = 0
    for file in files:
        if group and total + int(file["size"]) > size:
            if len(group) > 1:
                yield group
            group, total = [], 0
        group.append(file)
        total += int(file["size"])
    if len(group) > 1:
        yield group


def _write(path: Path, layout: Layout, group: Sequence[Mapping[str, Any]], is_stopping: Callable[[], bool]) -> WrittenFile | None:
    """Write the rows of all these files to a new one; None, and no file, if it has to stop."""
    name = part_name()
    writer = FileWriter(places.name(path), name, layout)
    groups = RowGroups(writer.write)
    try:
        for file in group:
            if is_stopping():
                break
            for arrays, count in _read(path, layout, file):
                groups.add(arrays, count)
        groups.flush()
        written = writer.close()
    except BaseException:
        places.remove_files(path, [name])
        raise
    if is_stopping():
        places.remove_files(path, [name])
        return None
    return written


def _read(path: Path, layout: Layout, file: Mapping[str, Any]) -> Iterator[tuple[dict[str, pa.Array], int]]:
    """Yield the columns of some rows of a file, and the number of these rows. A column that the file lacks is null."""
    with opened_file(path, file) as opened:
        if opened.metadata.num_rows != int(statistics(file)["numRecords"]):
            raise UnsupportedError("a file that has not as many rows as the log says")
        there = {field.name: field.type for field in opened.schema_arrow}
        for field in layout.schema:
            if there.get(field.name, field.type) != field.type:
                raise UnsupportedError("a file whose columns have other types than the table's")
        columns = [field.name for field in layout.schema if field.name in there]
        for batch in record_batches(opened, _BATCH_ROWS, columns):
            arrays = {
                name: batch[field.name] if field.name in there else pa.nulls(len(batch), field.type)
                for name, field in zip(layout.names, layout.schema, strict=True)
            }
            yield arrays, len(batch)

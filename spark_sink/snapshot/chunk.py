"""Copies a chunk of a table into a file of its changelog: the part of a snapshot that runs in executors.

The server packs the rows of some pages into one (packed.py). Where it can't, it sends each row in COPY's binary form, and ADBC
makes Arrow columns of them. The columns go to Parquet as they are. No Python code runs per row, and no row goes through the JVM. A
type that binary form or Arrow cannot represent exactly comes as text. Texts go through the same casts as the texts of the stream.
The few dates and times beyond Spark's years become text, too. So a value is the same whether it comes with the snapshot or with a
change.

The position of each row is the snapshot's. The ordinals are dealt out to the chunks in turns: in each turn a chunk gets as many
successive ordinals as its ``share``: the number of its pages, or the mean of all chunks if that is more. So ordinals are unique in
the table, no chunk has to know of another, and thousands of empty partitions take few of them. Ordinals beyond 31 bits continue as
negative numbers, from the least one (32 bits in all).
"""

from __future__ import annotations

import secrets
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from cdcpipe.errors import ConnectionClosedError
from cdcpipe.masks import HASH, NO_MASKS, REDACT, Masks
from cdcpipe.retry import RetryPolicy
from cdcpipe.sql import quote_identifier, quote_literal
from cdcpipe.sqlstate import LOCK_NOT_AVAILABLE, NOT_IN_PREREQUISITE_STATE, UNDEFINED_COLUMN, UNDEFINED_FUNCTION, UNDEFINED_TABLE
from cdcpipe.types.arrow.casts import NO_ROWS, NO_TEXTS, Converted, convert_text
from cdcpipe.types.table import CAST_TO_TEXT, PRINTED, TYPES, UNKNOWN
from spark_sink.client.exported import SnapshotError
from spark_sink.files import places
from spark_sink.files.parquet import FileWriter, Layout
from spark_sink.schema.exact_texts import ExactTexts
from spark_sink.schema.masking import REDACTED, masked
from spark_sink.snapshot import packed
from spark_sink.snapshot.plan import Chunk, Select, StaleSnapshotError, locked_error, open_snapshot, reading_error
from spark_sink.snapshot.progress import Written, note

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping

    from cdcpipe.pgoutput.messages import Column, Relation
    from spark_sink.files.parquet import WrittenFile
    from spark_sink.snapshot.packed import Packing

__all__ = ["NOT_UTF8", "NOT_UTF8_HINT", "ChunkTask", "CopiedTable", "select_columns", "write_chunk", "write_truncate"]

_GONE: Final = (UNDEFINED_COLUMN, UNDEFINED_FUNCTION, UNDEFINED_TABLE, NOT_IN_PREREQUISITE_STATE)
"""A query in an old snapshot still uses today's catalog. A column may be gone, or have a type that a function does not take. A view
may be in the table's place, which a session that reads rows does not read."""

NOT_UTF8: Final = "is not UTF-8"
NOT_UTF8_HINT: Final = (
    "in a database with the encoding SQL_ASCII the server converts nothing: correct the value, or leave the column out"
    " (--exclude-column, a column list of the publication); then start again: finished tables stay"
)

_COPIED_ANEW: Final = "start again: this table is then copied from its beginning"

_LOST: Final = RetryPolicy(attempts=3, first_pause_s=1.0)
"""How often a chunk is read if the connection is lost."""

_WITHOUT_WAITING: Final = MappingProxyType({"lock_timeout": "1"})
"""A session that finds a lock gives up at once: 0 would be no limit."""
_waited: Final[dict[str, tuple[str, int]]] = {}
"""For each directory of a copy: the last snapshot and round in which a chunk has waited in this process for a lock, in vain.

A later copy of the table has the same directory, and counts its rounds anew."""

_ORDINALS: Final = 1 << 32
_BATCH_HINT_BYTES: Final = 16 << 20


def select_columns(relation: Relation, masks: Mapping[str, str] = MappingProxyType({})) -> list[Select]:
    """Return for each column of a table how to select it. The server sends no value that is masked, except one to be hashed."""
    selects = [
        _select_masked(column, masks[column.name]) if column.name in masks else _select(column) for column in relation.columns
    ]
    if len(selects) + sum(select.rest is not None for select in selects) <= packed.MAX_EXPRESSIONS:
        return selects
    # There is no room for a second expression. A text has all values of a column.
    return [
        select if select.rest is None else replace(select, expression=_text(column), is_text=True, rest=None)
        for select, column in zip(selects, relation.columns, strict=True)
    ]


def _select_masked(column: Column, kind: str) -> Select:
    name = quote_identifier(column.name)
    if kind == HASH:
        expression = PRINTED.expression.format(name)
        return Select(expression, is_text=True, is_hashed=True, packing=packed.as_text(expression))
    value = f"CASE WHEN {name} IS DISTINCT FROM NULL THEN {quote_literal(REDACTED)} END" if kind == REDACT else "NULL"
    expression = f"({value})::pg_catalog.text"
    return Select(expression, is_text=True, packing=packed.as_text(expression))


def _text(column: Column) -> str:
    return CAST_TO_TEXT.expression.format(quote_identifier(column.name))


def _select(column: Column) -> Select:
    rule, name = TYPES.get(column.type_id, UNKNOWN).selected, quote_identifier(column.name)
    expression, packing = rule.expression.format(name), packed.packing(column, name)
    if rule.is_text:
        return Select(expression, is_text=True, packing=packing or packed.as_text(expression))
    if rule.fits is None:
        return Select(expression, packing=packing)
    fits = rule.fits.format(name)
    rest = f"CASE WHEN NOT ({fits}) THEN {_text(column)} END"
    return Select(f"CASE WHEN {fits} THEN {expression} END", rest=rest, packing=packing)


@dataclass(frozen=True, slots=True)
class CopiedTable:
    """What all tasks of a table share. It is pickled for the executors, so it has plain values only, and no password."""

    connection: str
    snapshot: str
    shares: int
    """The sum of the shares of all chunks."""
    condition: str | None
    selects: tuple[Select, ...]
    names: tuple[str, ...]
    """The names of the table's columns in the changelog, in the order of ``selects``."""
    types: pa.Schema
    """The Arrow types of the columns, by these names."""
    epoch: int
    lsn: int
    time_us: int
    directory: str
    layout: Layout
    is_utf8: bool = True
    """Whether the server guarantees that texts are UTF-8."""
    masks: Masks = NO_MASKS
    """With the key of hashed columns, which the executors do not have."""


@dataclass(frozen=True, slots=True)
class ChunkTask:
    """The work of one task. A large table has tens of thousands of them, so what they share is in `CopiedTable`."""

    chunk: Chunk
    number: int
    note: str
    """The file that records the end of the chunk (snapshot/progress.py)."""
    first_ordinal: int
    """The ordinal of the chunk's first row: the sum of the shares of the chunks before it."""
    round: int = 0
    """How often the copy has given chunks to the executors before. In each round a process waits for one lock only: the chunks
    behind it that find a lock give up at once. So the round ends soon, and the copy can tell which session has the lock."""


def write_chunk(table: CopiedTable, task: ChunkTask, count_rows: Callable[[int], object]) -> Written:
    """Copy a chunk into a file, and record that it is done. Calls ``count_rows`` with the number of rows of each batch.

    If another attempt at the same chunk was first, its file counts, and this attempt's file is removed. After a lost connection the
    chunk is read again: another session of the server still holds the snapshot. Raises ConnectionClosedError if that does not help.
    """
    return _LOST.call(lambda: _write_once(table, task, count_rows), ConnectionClosedError)


def _write_once(table: CopiedTable, task: ChunkTask, count_rows: Callable[[int], object]) -> Written:
    packings = _packings(table, task.chunk)
    if packings is not None:
        try:
            return _write(table, task, _read_packed(table, task, packings), count_rows)
        except packed.AmbiguousError:
            pass
    return _write(table, task, _read_rows(table, task), count_rows)


def _write(
    table: CopiedTable, task: ChunkTask, batches: Iterator[tuple[int, list[Converted]]], count_rows: Callable[[int], object]
) -> Written:
    writer = FileWriter(table.directory, f"part-{task.number:06d}-{secrets.token_hex(8)}.parquet", table.layout)
    rows = 0
    counts: Counter[str] = Counter()
    try:
        for count, columns in batches:
            arrays: dict[str, pa.Array] = {}
            exact = ExactTexts(count)
            for name, column in zip(table.names, columns, strict=True):
                arrays[name] = column.array
                if len(column.exact_rows):
                    exact.add(name, column.exact_rows, column.exact)
                    counts[name] += len(column.exact_rows)
            arrays["_cdc_exact"] = exact.to_arrow(_EXACT_TYPE)
            writer.write(arrays | _metadata(table, task, rows, count), count)
            rows += count
            count_rows(count)
    except (packed.AmbiguousError, ConnectionClosedError):
        places.remove_files(places.place(table.directory), [writer.close().name])
        count_rows(-rows)
        raise
    own = Written(rows, writer.close(), dict(counts))
    written = note(places.place(task.note), own)
    if written.file.name != own.file.name:
        places.remove_files(places.place(table.directory), [own.file.name])
    return written


def write_truncate(directory: str, layout: Layout, epoch: int, lsn: int, time_us: int) -> WrittenFile:
    """Write a file with one row, a TRUNCATE: the snapshot of an empty table."""
    writer = FileWriter(directory, f"part-empty-{secrets.token_hex(8)}.parquet", layout)
    writer.write(_positions("truncate", epoch, lsn, pa.array([0], pa.int32()), time_us), 1)
    return writer.close()


def _packings(table: CopiedTable, chunk: Chunk) -> list[Packing] | None:
    """Return how the server packs the columns; None if it must send each row."""
    if not chunk.packed_pages:
        return None
    found = []
    for select, name in zip(table.selects, table.names, strict=True):
        each = select.packing
        if each is None or (each.is_integer and not pa.types.is_decimal(table.types.field(name).type)):
            return None
        found.append(each)
    return found if packed.is_possible(found) else None


def _read_packed(table: CopiedTable, task: ChunkTask, packings: list[Packing]) -> Iterator[tuple[int, list[Converted]]]:
    """Yield numbers of rows, and the table's columns of as many rows. Raises AmbiguousError."""
    # A SELECT without columns would not count rows.
    expressions = [f"{each.value} AS c{number}" for number, each in enumerate(packings)] or ["true AS c0"]
    query = task.chunk.packed_query(packed.aggregates(packings), expressions, table.condition)
    kinds = [table.types.field(name).type for name in table.names]
    with closing(_read(table, task, query, packed.SETTINGS)) as batches:
        for batch in batches:
            count, columns = packed.read_packed(packings, kinds, batch)
            yield (
                count,
                [
                    Converted(masked(column.array, HASH, table.masks), NO_ROWS, NO_TEXTS) if select.is_hashed else column
                    for select, column in zip(table.selects, columns, strict=True)
                ],
            )


def _read_rows(table: CopiedTable, task: ChunkTask) -> Iterator[tuple[int, list[Converted]]]:
    """Yield the same for a table whose rows the server sends one by one."""
    expressions = [select.expression for select in table.selects]
    expressions += [select.rest for select in table.selects if select.rest is not None]
    # Numbered names, because two columns may get the same name in Arrow. A table without columns gets a constant, to count rows.
    numbered = [f"{expression} AS c{number}" for number, expression in enumerate(expressions)] or ["true AS c0"]
    with closing(_read(table, task, task.chunk.query(numbered, table.condition))) as batches:
        for batch in batches:
            yield len(batch), _columns(table, task.chunk, batch)


def _read(
    table: CopiedTable, task: ChunkTask, query: str, settings: Mapping[str, str] = MappingProxyType({})
) -> Generator[pa.RecordBatch, None, None]:
    """Yield the server's answer as it arrives."""
    connection = open_snapshot(table.connection, table.snapshot)
    try:
        with connection.cursor() as cursor:
            cursor.adbc_statement.set_options(**{"adbc.postgresql.batch_size_hint_bytes": _BATCH_HINT_BYTES})
            if _waited.get(table.directory) == (table.snapshot, task.round):
                settings = {**settings, **_WITHOUT_WAITING}
            if settings:
                values = (f"set_config({quote_literal(name)}, {quote_literal(value)}, true)" for name, value in settings.items())
                cursor.execute(f"SELECT {', '.join(values)}")
            _check(task.chunk, cursor)
            cursor.execute(query)
            yield from cursor.fetch_record_batch()
            _check(task.chunk, cursor)  # ALTER SCHEMA … RENAME waits for no lock on a table
    except (connection.Error, OSError) as ex:
        problem, state = str(ex).strip().partition("\n")[0], getattr(ex, "sqlstate", None)
        if state == LOCK_NOT_AVAILABLE:
            _waited[table.directory] = table.snapshot, task.round
            own = task.chunk.relation_id
            relations = f"SELECT {own} UNION ALL SELECT indexrelid FROM pg_index WHERE indrelid = {own}"
            raise locked_error(connection, relations, f"table {task.chunk.table}") from ex
        if state in _GONE:
            raise StaleSnapshotError(f"table {task.chunk.table} was altered while it was copied: {problem}") from ex
        raise reading_error(ex, connection, f"cannot read table {task.chunk.table}", _COPIED_ANEW) from None
    finally:
        connection.close()


def _check(chunk: Chunk, cursor: Any) -> None:
    """Lock the chunk's table. Raises StaleSnapshotError unless its name is that of the planned table, with its columns and file."""
    cursor.execute(chunk.check_query())
    file, relation_id, has_columns, _ = cursor.fetchone()
    if relation_id != chunk.relation_id:
        how = "was altered while it was copied: another table has its name now"
    elif not has_columns:
        how = "was altered while it was copied: columns have other names now"
    elif file != chunk.file:
        how = "was rewritten (TRUNCATE, ALTER TABLE, VACUUM FULL, CLUSTER) while it was copied"
    else:
        return
    raise StaleSnapshotError(f"table {chunk.table} {how}")


def _columns(table: CopiedTable, chunk: Chunk, batch: pa.RecordBatch) -> list[Converted]:
    """Return the table's columns."""
    found = []
    rests = iter(range(len(table.selects), batch.num_columns))
    for number, (select, name) in enumerate(zip(table.selects, table.names, strict=True)):
        array, kind = batch.column(number), table.types.field(name).type
        if not table.is_utf8 and pa.types.is_string(array.type):
            _check_utf8(chunk, name, array)
        if select.is_hashed:
            converted = Converted(masked(array, HASH, table.masks), NO_ROWS, NO_TEXTS)
        elif select.is_text:
            converted = convert_text(array, kind)
        elif select.rest is not None:
            rest = batch.column(next(rests))
            rows = np.flatnonzero(rest.is_valid().to_numpy(zero_copy_only=False)) if rest.null_count < len(rest) else NO_ROWS
            converted = Converted(array, rows, rest.take(pa.array(rows)))
        else:
            converted = Converted(array, NO_ROWS, NO_TEXTS)
        found.append(converted)
    return found


_EXACT_TYPE: Final = pa.map_(pa.string(), pa.string())


def _check_utf8(chunk: Chunk, name: str, array: pa.StringArray) -> None:
    try:
        array.validate(full=True)
    except pa.ArrowInvalid as ex:
        raise SnapshotError(f"table {chunk.table}: a value of column {name!r} {NOT_UTF8}", hint=NOT_UTF8_HINT) from ex


def _metadata(table: CopiedTable, task: ChunkTask, first_row: int, count: int) -> dict[str, pa.Array]:
    """Return the ``_cdc_`` columns with operation and position of each row."""
    turn, place = np.divmod(np.arange(first_row, first_row + count, dtype=np.uint64), np.uint64(task.chunk.share))
    ordinal = turn * np.uint64(table.shares) + np.uint64(task.first_ordinal) + place
    if count and ordinal[-1] >= _ORDINALS:
        raise SnapshotError(
            f"table {task.chunk.table} has more rows on some pages than a copy has ordinals: its pages, and those of all partitions"
            f" of its root, share {_ORDINALS:,}; publish the partitions as tables of their own (publish_via_partition_root = false)"
            "; if many pages are almost empty, VACUUM FULL helps, too"
        )
    ordinals = pa.array(ordinal.astype(np.uint32).view(np.int32))
    return _positions("snapshot", table.epoch, table.lsn, ordinals, table.time_us)


def _positions(op: str, epoch: int, lsn: int, ordinals: pa.Array, time_us: int) -> dict[str, pa.Array]:
    count = len(ordinals)
    return {
        "_cdc_op": pa.repeat(op, count),
        "_cdc_epoch": pa.repeat(pa.scalar(epoch, pa.int32()), count),
        "_cdc_end_lsn": pa.repeat(pa.scalar(lsn, pa.int64()), count),
        "_cdc_ordinal": ordinals,
        "_cdc_commit_time": pa.repeat(pa.scalar(time_us, pa.timestamp("us", "UTC")), count),
        "_cdc_unchanged": pa.ListArray.from_arrays(pa.array(np.zeros(count + 1, np.int32)), NO_TEXTS),
    }

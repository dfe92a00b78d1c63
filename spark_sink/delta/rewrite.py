"""Rewrites a Delta table without Spark: removes rows with some keys and adds others, in one commit.

It searches the keys in the files whose least and greatest values allow them. Removed rows are marked in deletion vectors, if the
table has them; otherwise each file that loses rows is written anew without them. Added rows go to a new file. A small file that
loses rows is rewritten together with the new file, so that small files do not pile up. Large changes come in parts, one range of
keys after the other, and each part gets a file of its own.

If a table or a file has a feature that this module does not support, it raises UnsupportedError. Nothing changes before
`Rewrite.commit`.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark_sink.delta import deletion_vector, file_table
from spark_sink.delta.file_table import FileTable, Replaced
from spark_sink.delta.row_groups import RowGroups
from spark_sink.delta.rows import (
    Budget,
    UnsupportedError,
    encoded_bytes,
    fields_of,
    present_rows,
    read_batches,
    read_columns,
    read_rows,
    statistics,
)
from spark_sink.files import places
from spark_sink.files.parquet import FileWriter, part_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    from pyspark.sql.types import StructType

    from spark_sink.delta.log import Mark, TableLog
    from spark_sink.delta.rows import Flags, Numbers
    from spark_sink.files.parquet import WrittenFile

    _Rows: TypeAlias = dict[str, pa.Array]
    _Marked: TypeAlias = tuple[Mapping[str, Any], Flags]

__all__ = ["Found", "Rewrite"]

_MOST_BYTES: Final = 512 << 20
"""The most bytes of the table's values, in memory, that are read for the rows of one `add`."""
_MOST_REWRITTEN_BYTES: Final = 1 << 30
"""The most bytes, encoded, of the larger files that one commit writes anew in a table without deletion vectors.

This bounds the time, and so does the next one. For memory there is no need: such files are read and written in small parts.
"""
_MOST_FILLED_BYTES: Final = 128 << 20
"""The most bytes, encoded, of a table whose rows all get a value."""
_MOST_ROWS: Final = 200_000_000
"""The most rows of the table that are searched for keys."""
_SMALL_BYTES: Final = 1 << 20
_SMALL_VALUES: Final = 500_000
"""A file with fewer bytes and fewer values is small: it is rewritten when it loses rows, instead of getting a deletion vector.

Bytes alone do not tell what that costs. A file of a megabyte may have millions of values, if they lie close together.
"""
_MOST_SMALL_FILES: Final = 8
"""If there are more small files than this, all of them are rewritten as one."""

_KNOWN_FEATURES: Final = file_table.KNOWN_FEATURES - {"changeDataFeed", "v2Checkpoint"}
"""Features of a table that this module supports, or refuses only if they are turned on."""
_FORBIDDEN: Final = ("delta.appendOnly", "delta.enableChangeDataFeed")


@dataclass(frozen=True, slots=True)
class Found:
    """The rows of a file that have one of the keys."""

    file: Mapping[str, Any]
    rows: Numbers
    """Their numbers, which ascend."""
    keys: Numbers
    """For each of these rows the number of its key."""
    present: Flags
    """For each row of the file, whether it is part of the table so far."""

    def left(self) -> Flags:
        """Return ``present`` without the rows that were found."""
        left = self.present.copy()
        left[self.rows] = False
        return left


class Rewrite:
    """A table as of a commit, with its files, to be rewritten. An error in its ``with`` block, before `commit`, undoes `add`.

    Keys are given as an Arrow table with a row for each key. Its columns ``k0``, ``k1``, … have the values of the columns ``key``,
    in this order.
    """

    def __init__(self, table: FileTable, key: Sequence[str], files: Sequence[Mapping[str, Any]] = ()) -> None:
        self._table = table
        self._files = files
        self._fields = fields_of(table.physical, table.schema.names)
        self._key = {f"k{index}": self._fields[name] for index, name in enumerate(key)}
        self._has_vectors = table.properties.get("delta.enableDeletionVectors") == "true"
        self._gone: Sequence[Mapping[str, Any]] = ()
        """Files all rows of which are removed."""
        self._left: dict[str, Flags] = {}
        """For each file that loses rows, by its path, which rows it keeps."""
        self._written: list[WrittenFile] = []
        self._writer = _Writer(table)
        self._budget = Budget(_MOST_BYTES)

    @classmethod
    def new(cls, path: Path, key: Sequence[str], columns: StructType, properties: Mapping[str, str]) -> Self:
        """Return a new table, which its first commit will create."""
        # Remove the files of an attempt that did not finish.
        places.remove_tree(path)
        places.make_directory(path)
        return cls(file_table.define(path, columns, properties), key)

    @classmethod
    def of_log(cls, log: TableLog, key: Sequence[str]) -> Self:
        """Return the table that a log describes."""
        if (obstacle := log.obstacle("writerFeatures", _KNOWN_FEATURES)) is not None:
            raise UnsupportedError(f"a table with {obstacle}")
        configuration = log.metadata.get("configuration", {})
        is_on = {name for name in _FORBIDDEN if configuration.get(name, "false") != "false"}
        if is_on:
            raise UnsupportedError(f"a table with {min(is_on)}")
        return cls(file_table.of_log(log), key, list(log.files))

    @property
    def schema(self) -> StructType:
        """The table's columns."""
        return self._table.schema

    def remove_all(self) -> None:
        """Remove all present rows. They are not found any more."""
        self._gone, self._files = [*self._gone, *self._files], ()

    def find(self, keys: pa.Table, unset: str | None = None) -> list[Found]:
        """Find the rows with these keys, with ``unset`` only those that have no value in this column.

        Skips files that can't have any of them.
        """
        files = self._candidates(keys, None if unset is None else self._fields[unset].name)
        return places.map_reads(lambda file: self._find_in(file, keys, unset), files, self._table.path)

    def _candidates(self, keys: pa.Table, unset: str | None) -> list[Mapping[str, Any]]:
        """Return the files that may have one of the keys, by their least and greatest values and their numbers of nulls."""
        sought = {}
        for name, field in self._key.items():
            if pa.types.is_integer(field.type) or pa.types.is_string(field.type):
                values = keys[name].combine_chunks()
                sought[field.name] = values.take(pc.sort_indices(values))
        found, count = [], 0
        for file in self._files:
            known = statistics(file)
            if known.get("nullCount", {}).get(unset) == 0:
                continue
            least, greatest = (known.get(kind, {}) for kind in ("minValues", "maxValues"))
            if all(
                name not in least or name not in greatest or _has_between(values, least[name], greatest[name])
                for name, values in sought.items()
            ):
                found.append(file)
                count += known["numRecords"]
        if count > _MOST_ROWS:
            raise UnsupportedError("many rows to look through")
        return found

    def _find_in(self, file: Mapping[str, Any], keys: pa.Table, unset: str | None) -> Found:
        columns = read_columns(self._table.path, file, self._key)
        present = present_rows(self._table.path, file, len(columns["k0"]))
        if len(columns) == 1:
            found = pc.index_in(columns["k0"], value_set=keys["k0"])
            rows = np.flatnonzero(found.is_valid().to_numpy(zero_copy_only=False))
            numbers = found.drop_null().to_numpy().astype(np.int64)
        else:
            there = pa.table(columns | {"row": np.arange(len(present))})
            numbered = keys.append_column("number", pa.array(np.arange(len(keys))))
            joined = there.join(numbered, list(columns), join_type="inner")
            joined = joined.sort_by("row")
            rows, numbers = joined["row"].to_numpy(), joined["number"].to_numpy()
        wanted = present[rows]
        if unset is not None:
            rows, numbers = rows[wanted], numbers[wanted]
            wanted = self.values(file, [unset], rows)[unset].is_null().to_numpy(zero_copy_only=False)
        return Found(file, rows[wanted], numbers[wanted], present)

    def values(self, file: Mapping[str, Any], names: Sequence[str], rows: Numbers) -> dict[str, pa.Array]:
        """Return the values of some rows of a file in some columns. The numbers of the rows ascend.

        Raises UnsupportedError if all values since the last `add` take too much memory.
        """
        return read_rows(self._table.path, file, {name: self._fields[name] for name in names}, rows, self._budget)

    def add(self, new: Mapping[str, pa.Array], found: Sequence[Found]) -> Self:
        """Write new rows into a file, and remember the found rows, which `commit` removes. Large changes come in several calls."""
        for each in found:
            if len(each.rows):
                path, left = each.file["path"], each.left()
                self._left[path] = left & self._left[path] if path in self._left else left
        self._written += self._writer.close()
        self._writer = _Writer(self._table)
        self._writer.add(new, len(next(iter(new.values()))))
        self._budget = Budget(_MOST_BYTES)
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: type[BaseException] | None, error: BaseException | None, _tb: TracebackType | None) -> None:
        """After an error, remove the files that `add` has written. They are no part of the table before `commit`."""
        if error is not None:
            self._writer.discard()
            places.remove_files(self._table.path, [file.name for file in self._written])

    def commit(self, mark: Mark) -> None:
        """Add the new rows, remove the found rows, and record the mark, in one commit.

        Raises ChangedError, and changes nothing, if another program has committed since the log was read.
        """
        with self:
            replaced = self._written_for_commit()
        file_table.commit(self._table, self._written, mark, replaced=replaced)

    def _written_for_commit(self) -> list[Replaced]:
        """Write what `add` has not written: the rows and the marks of files that lose rows. Return these files."""
        copied, replaced, marked = [], [Replaced(file) for file in self._gone], []
        small = {file["path"] for file in self._files if self._is_small(file)}
        for file in self._files:
            left = self._left.get(file["path"])
            if file["path"] in small and (left is not None or len(small) > _MOST_SMALL_FILES):
                copied.append((file, left))
                replaced.append(Replaced(file))
            elif left is not None:
                if left.any():
                    marked.append((file, left))
                else:
                    replaced.append(Replaced(file))
        if self._has_vectors:
            replaced += self._with_vectors(marked)
        else:
            self._written += self._written_anew(marked)
            replaced += [Replaced(file) for file, _ in marked]
        for file, left in copied:
            self._copy_left(file, left, self._writer)
        self._written += self._writer.close()
        return replaced

    def fill(self, constants: Mapping[str, pa.Scalar], copies: Mapping[str, str], mark: Mark) -> None:
        """Give all rows values in some columns, in one commit, which does not record the mark. Each file is written anew.

        ``constants`` are the values of columns, ``copies`` the names of the columns that have them already. Raises UnsupportedError
        if the table is large; ChangedError if another program has committed since the log was read. Then nothing changes.
        """
        if sum(encoded_bytes(self._table.path, file) for file in self._files) > _MOST_FILLED_BYTES:
            raise UnsupportedError("many bytes to write anew")

        def changed(rows: _Rows, count: int) -> _Rows:
            filled = {name: pa.repeat(value, count).cast(self._fields[name].type) for name, value in constants.items()}
            return rows | filled | {name: rows[source] for name, source in copies.items()}

        written = []
        for file in self._files:
            writer = _Writer(self._table)
            self._copy_left(file, None, writer, changed)
            written += writer.close()
        if self._files:
            replaced = [Replaced(file) for file in self._files]
            file_table.commit(self._table, written, mark, is_reached=False, replaced=replaced)

    def _is_small(self, file: Mapping[str, Any]) -> bool:
        has_few_bytes = int(file["size"]) < _SMALL_BYTES
        return has_few_bytes and statistics(file)["numRecords"] * len(self._fields) < _SMALL_VALUES

    def _copy_left(
        self,
        file: Mapping[str, Any],
        left: Flags | None,
        writer: _Writer,
        changed: Callable[[_Rows, int], _Rows] = lambda rows, _: rows,
    ) -> None:
        """Copy the rows that a file keeps, as ``changed`` returns them. ``left`` is None if it keeps all."""
        if left is None:
            left = present_rows(self._table.path, file, int(statistics(file)["numRecords"]))
        groups, first = RowGroups(writer.add), 0
        for rows, count in read_batches(self._table.path, file, self._fields):
            wanted = pa.array(left[first : first + count])
            kept = {name: values.filter(wanted) for name, values in changed(rows, count).items()}
            groups.add(kept, wanted.true_count)
            first += count
        groups.flush()

    def _with_vectors(self, marked: Sequence[_Marked]) -> list[Replaced]:
        """Write deletion vectors for files that lose some of their rows."""
        if not marked:
            return []
        vectors = deletion_vector.write(self._table.path, [np.flatnonzero(~left) for _, left in marked])
        return [Replaced(file, vector) for (file, _), vector in zip(marked, vectors, strict=True)]

    def _written_anew(self, marked: Sequence[_Marked]) -> list[WrittenFile]:
        """Write the rows that larger files keep, each file on its own: so the files keep their ranges of keys."""
        if sum(encoded_bytes(self._table.path, file) for file, _ in marked) > _MOST_REWRITTEN_BYTES:
            raise UnsupportedError("many bytes to write anew")
        written = []
        for file, left in marked:
            writer = _Writer(self._table)
            self._copy_left(file, left, writer)
            written += writer.close()
        return written


def _has_between(ordered: pa.Array, least: Any, greatest: Any) -> bool:
    """Tell whether one of the ordered values is in [least, greatest]. Texts are ordered by code points, here and in statistics."""
    at = bisect_left(range(len(ordered)), least, key=lambda index: ordered[index].as_py())
    return at < len(ordered) and bool(ordered[at].as_py() <= greatest)


class _Writer:
    """Writes a new file of a rewrite, if there are rows for it."""

    def __init__(self, table: FileTable) -> None:
        self._directory = places.name(table.path)
        self._layout = table.layout()
        self._writer: FileWriter | None = None

    def add(self, rows: Mapping[str, pa.Array], count: int) -> None:
        if count:
            if self._writer is None:
                self._writer = FileWriter(self._directory, part_name(), self._layout)
            self._writer.write(dict(rows), count)

    def close(self) -> list[WrittenFile]:
        return [] if self._writer is None else [self._writer.close()]

    def discard(self) -> None:
        if self._writer is not None:
            self._writer.discard()

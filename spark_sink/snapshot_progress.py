"""What is done of a table that a snapshot copies, chunk by chunk, so that a killed copy goes on where it was. No pyspark.

Of use only as long as the server holds the snapshot (exported.py): files of two snapshots do not fit together. In a table's
directory ``begun.json`` says what the copy is of, and executors leave ``NUMBER.json`` for each chunk when its file is whole.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

from spark_sink.parquet_file import WrittenFile
from spark_sink.snapshot_plan import Chunk
from spark_sink.storage import list_names, make_directory, read_json, remove_tree, write_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["Begun", "Written", "begin", "note", "resume"]

_NOTE: Final = re.compile(r"([0-9]+)\.json")


@dataclass(frozen=True, slots=True)
class Written:
    """What became of a chunk; ``exact``: how many values their type cannot hold, by column."""

    rows: int
    file: WrittenFile
    exact: dict[str, int]


@dataclass(frozen=True, slots=True)
class Begun:
    """A copy that is under way."""

    directory: Path
    chunks: tuple[Chunk, ...]
    """How the table was cut: it may have grown since."""
    time_us: int
    definition: Sequence[Mapping[str, Any]] = ()
    """Of a new Delta table: its files have names of columns that are made up."""
    done: dict[int, Written] = field(default_factory=dict)


def resume(directory: Path, purpose: str) -> Begun | None:
    """Return what was begun in a directory; None, and the directory is removed, if that was something else than ``purpose``."""
    found = read_json(directory / "begun.json")
    if found is None or found["purpose"] != purpose:
        remove_tree(directory)
        return None
    done = {}
    for name in list_names(directory):
        match = _NOTE.fullmatch(name)
        if match is not None and (value := read_json(directory / name)) is not None:
            done[int(match[1])] = Written(value["rows"], WrittenFile(**value["file"]), value["exact"])
    chunks = tuple(Chunk(*each) for each in found["chunks"])
    return Begun(directory, chunks, found["time_us"], found["definition"], done)


def begin(
    directory: Path, purpose: str, chunks: Sequence[Chunk], time_us: int, definition: Sequence[Mapping[str, Any]] = ()
) -> Begun:
    """Write down what is begun."""
    make_directory(directory)
    cut = [[chunk.relation_id, chunk.table, chunk.file, chunk.first_page, chunk.last_page] for chunk in chunks]
    write_json(
        directory / "begun.json",
        {"purpose": purpose, "chunks": cut, "time_us": time_us, "definition": list(definition)},
    )
    return Begun(directory, tuple(chunks), time_us, definition)


def note(directory: Path, number: int, written: Written) -> None:
    """Write down that a chunk is done."""
    write_json(directory / f"{number}.json", asdict(written))

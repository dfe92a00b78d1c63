"""What is done of a table that a snapshot copies, chunk by chunk, so that a killed copy goes on where it was. No pyspark.

Of use only as long as the server holds the snapshot (client/exported.py): files of two snapshots do not fit together. In a table's
directory ``begun.json`` says what the copy is of, and executors leave ``NUMBER-TOKEN.json`` for each chunk when its file is whole.

Spark may run a task twice, and the second attempt may go on after the first has succeeded. The attempt that writes the note is the
one that counts: no note is replaced, and the other attempt takes over what the note says. The token is that of the copy, so that
an attempt of an earlier copy notes nothing for this one.
"""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from spark_sink.files.parquet import WrittenFile
from spark_sink.files.places import list_names, make_directory, put_if_absent, read_json, remove_tree, write_json
from spark_sink.snapshot.plan import Chunk

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["Begun", "Written", "begin", "note", "resume"]


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
    token: str
    definition: Sequence[Mapping[str, Any]] = ()
    """Of a new Delta table: its files have names of columns that are made up."""
    done: dict[int, Written] = field(default_factory=dict)

    def note(self, number: int) -> Path:
        """Return where it is written down that a chunk is done."""
        return self.directory / f"{number}-{self.token}.json"


def resume(directory: Path, purpose: str) -> Begun | None:
    """Return what was begun in a directory; None, and the directory is removed, if that was something else than ``purpose``."""
    found = read_json(directory / "begun.json")
    if found is None or found["purpose"] != purpose:
        remove_tree(directory)
        return None
    token, done = found.get("token", ""), {}
    for name in list_names(directory):
        match = re.fullmatch(rf"([0-9]+)-{token}\.json", name)
        if match is not None and (written := _noted(directory / name)) is not None:
            done[int(match[1])] = written
    chunks = tuple(Chunk(*each) for each in found["chunks"])
    return Begun(directory, chunks, found["time_us"], token, found["definition"], done)


def begin(
    directory: Path, purpose: str, chunks: Sequence[Chunk], time_us: int, definition: Sequence[Mapping[str, Any]] = ()
) -> Begun:
    """Write down what is begun."""
    make_directory(directory)
    token = secrets.token_hex(8)
    cut = [[chunk.relation_id, chunk.table, chunk.file, chunk.first_page, chunk.last_page] for chunk in chunks]
    write_json(
        directory / "begun.json",
        {"purpose": purpose, "chunks": cut, "time_us": time_us, "token": token, "definition": list(definition)},
    )
    return Begun(directory, tuple(chunks), time_us, token, definition)


def note(path: Path, written: Written) -> Written:
    """Write down that a chunk is done; return what is written down: another attempt's file if that one was first."""
    try:
        put_if_absent(path, json.dumps(asdict(written)).encode())
    except FileExistsError:
        return _noted(path) or written
    return written


def _noted(path: Path) -> Written | None:
    found = read_json(path)
    return None if found is None else Written(found["rows"], WrittenFile(**found["file"]), found["exact"])

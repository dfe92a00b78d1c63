"""Records the finished chunks of a table that a snapshot copies, so that the next run can resume a killed copy. No pyspark.

The records are useful only while the server holds the snapshot (client/exported.py), because files of two snapshots do not fit
together. In a table's directory ``begun.json`` describes the copy. For each chunk an executor writes ``NUMBER-TOKEN.json`` when the
chunk's file is complete.

Spark may run a task twice, and the second attempt may still run after the first has succeeded. The attempt that writes the record
counts. A record is never replaced; the other attempt takes over its contents. Each copy has its own token, so an attempt of an
earlier copy records nothing for this one.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final

from cdcpipe.version import own_version
from spark_sink.files.parquet import WrittenFile
from spark_sink.files.places import list_names, make_directory, put_if_absent, read_json, remove_tree, sync_directory, write_json
from spark_sink.snapshot.plan import Chunk

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["Begun", "Written", "begin", "note", "resume"]

_logger = logging.getLogger(__name__)

_BEGUN: Final = "begun.json"


@dataclass(frozen=True, slots=True)
class Written:
    """A copied chunk: its rows and its file. ``exact`` counts by column the values that their type cannot hold."""

    rows: int
    file: WrittenFile
    exact: dict[str, int]


@dataclass(frozen=True, slots=True)
class Begun:
    """The copy of a table that has begun."""

    directory: Path
    chunks: tuple[Chunk, ...]
    """The chunks of the table at the begin of the copy. The table may have grown since."""
    token: str
    definition: Sequence[Mapping[str, Any]] = ()
    """For a new Delta table: its columns, whose names in the files were generated for this copy."""
    done: dict[int, Written] = field(default_factory=dict)

    def record_path(self, number: int) -> Path:
        """Return the path of a chunk's record."""
        return self.directory / f"{number}-{self.token}.json"

    def end(self) -> None:
        """Record that the files may be moved from now on, so that no later run resumes the copy without them."""
        (self.directory / _BEGUN).unlink(missing_ok=True)
        sync_directory(self.directory)


def resume(directory: Path, purpose: str) -> Begun | None:
    """Return the copy that was begun in a directory. If it has another ``purpose``, remove the directory and return None.

    The same holds if another version of cdcpipe began it: its chunks and files may be described in another way.
    """
    found = read_json(directory / _BEGUN)
    has_purpose = found is not None and found["purpose"] == purpose
    if found is None or not has_purpose or found.get("written_by") != _this_version():
        if has_purpose:
            _logger.info("another version of cdcpipe began the copy in %s: it begins anew", directory)
        remove_tree(directory)
        return None
    token, done = found["token"], {}
    for name in list_names(directory):
        match = re.fullmatch(rf"([0-9]+)-{token}\.json", name)
        if match is not None and (written := _noted(directory / name)) is not None:
            done[int(match[1])] = written
    chunks = tuple(Chunk(*each) for each in found["chunks"])
    return Begun(directory, chunks, token, found["definition"], done)


def begin(directory: Path, purpose: str, chunks: Sequence[Chunk], definition: Sequence[Mapping[str, Any]] = ()) -> Begun:
    """Create the directory, and record the copy that begins."""
    make_directory(directory)
    token = secrets.token_hex(8)
    cut = [list(asdict(chunk).values()) for chunk in chunks]
    found = {"purpose": purpose, "written_by": _this_version(), "chunks": cut, "token": token, "definition": list(definition)}
    write_json(directory / _BEGUN, found)
    return Begun(directory, tuple(chunks), token, definition)


def _this_version() -> list[str]:
    """Return what tells this version from others. Between two releases, those that have other fields are told apart."""
    return [own_version(), *(each.name for kind in (Chunk, Written, WrittenFile) for each in fields(kind))]


def note(path: Path, written: Written) -> Written:
    """Record that a chunk is done, and return its record: that of another attempt if it was first."""
    try:
        put_if_absent(path, json.dumps(asdict(written)).encode())
    except FileExistsError:
        return _noted(path) or written
    return written


def _noted(path: Path) -> Written | None:
    found = read_json(path)
    return None if found is None else Written(found["rows"], WrittenFile(**found["file"]), found["exact"])

"""What a Delta table's log says of the table, read without Spark and without Java: `read_table`.

The log is replayed as Delta's protocol has it (PROTOCOL.md, "Action Reconciliation"): the newest checkpoint in the classic
form, in one file or several, and the commits after it. Rows are counted from the files' statistics, less what their deletion
vectors take away.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

__all__ = ["TableState", "read_table"]

_APPLICATION = "cdcpipe"
_COMMIT = re.compile(r"([0-9]{20})\.json", re.ASCII)
_CHECKPOINT = re.compile(r"([0-9]{20})\.checkpoint(?:\.([0-9]{10})\.([0-9]{10}))?\.parquet", re.ASCII)
_ATTEMPTS = 3
"""A log may be cleaned up while it is read: what was listed is gone then, and a newer checkpoint is there."""


@dataclass(frozen=True, slots=True)
class TableState:
    """A Delta table as of its newest commit."""

    version: int
    lsn: int | None
    """Up to where it has its changes: what delta.recording noted; None for a table that is not ours."""
    written_ms: int | None
    """When it was last written to, in milliseconds since 1970."""
    rows: int | None
    """None if some file has no statistics."""
    sizes: tuple[int, ...]
    """Of each file, in bytes."""

    @property
    def files(self) -> int:
        """How many files it has."""
        return len(self.sizes)

    @property
    def size(self) -> int:
        """How many bytes they have."""
        return sum(self.sizes)

    def small_files(self, size: int) -> int:
        """Return how many files are smaller."""
        return sum(each < size for each in self.sizes)


def read_table(path: Path, known: TableState | None = None) -> TableState | None:
    """Return the state of the table, None if there is none; ``known`` itself if nothing has changed since.

    Raises OSError, or ValueError for a log that is damaged.
    """
    log = path / "_delta_log"
    for attempt in range(_ATTEMPTS):
        try:
            return _replay(log, known)
        except FileNotFoundError:
            if attempt == _ATTEMPTS - 1 and log.is_dir():
                raise
    return None


@dataclass(slots=True)
class _Replay:
    files: dict[tuple[str, str], Mapping[str, Any]] = field(default_factory=dict)
    lsn: int | None = None
    written_ms: int | None = None

    def apply(self, action: Mapping[str, Any]) -> None:
        if (add := action.get("add")) is not None:
            self.files[_identity(add)] = add
        elif (remove := action.get("remove")) is not None:
            self.files.pop(_identity(remove), None)
        elif (transaction := action.get("txn")) is not None and transaction["appId"] == _APPLICATION:
            self.lsn = int(transaction["version"])
        elif (information := action.get("commitInfo")) is not None and "timestamp" in information:
            self.written_ms = int(information["timestamp"])


def _replay(log: Path, known: TableState | None) -> TableState | None:
    names = [entry.name for entry in log.iterdir()] if log.is_dir() else []
    commits = sorted(int(match[1]) for name in names if (match := _COMMIT.fullmatch(name)))
    if not commits:
        return None
    if known is not None and known.version == commits[-1]:
        return known
    checkpoint, parts = _newest_checkpoint(names)
    replay = _Replay()
    for name in parts:
        for action in _checkpoint_actions(log / name):
            replay.apply(action)
    for version in commits:
        if version > checkpoint:
            for line in (log / f"{version:020d}.json").read_bytes().splitlines():
                replay.apply(json.loads(line))
    if commits[-1] <= checkpoint:  # the checkpoint has no commitInfo
        for line in (log / f"{commits[-1]:020d}.json").read_bytes().splitlines():
            if b'"commitInfo"' in line:
                replay.apply(json.loads(line))
    sizes = tuple(int(file["size"]) for file in replay.files.values())
    counts = [_rows(file) for file in replay.files.values()]
    return TableState(
        version=max(commits[-1], checkpoint),
        lsn=replay.lsn,
        written_ms=replay.written_ms,
        rows=None if None in counts else sum(count for count in counts if count is not None),
        sizes=sizes,
    )


def _newest_checkpoint(names: list[str]) -> tuple[int, list[str]]:
    """Return the version of the newest checkpoint that is complete, and its files; -1 and none if there is none."""
    found: dict[tuple[int, int], list[str]] = {}
    for name in names:
        match = _CHECKPOINT.fullmatch(name)
        if match is not None:
            found.setdefault((int(match[1]), int(match[3] or 1)), []).append(name)
    complete = [(version, sorted(parts)) for (version, count), parts in found.items() if len(parts) == count]
    return max(complete, default=(-1, []))


def _checkpoint_actions(path: Path) -> Iterator[Mapping[str, Any]]:
    import pyarrow.parquet as parquet

    file = parquet.ParquetFile(path)
    wanted = [name for name in ("add", "txn") if name in file.schema_arrow.names]
    for batch in file.iter_batches(columns=wanted):
        yield from batch.to_pylist()


def _identity(file: Mapping[str, Any]) -> tuple[str, str]:
    """Return what tells a file with one deletion vector from the same file with another."""
    vector = file.get("deletionVector")
    if not vector:
        return file["path"], ""
    return file["path"], f"{vector['storageType']}{vector['pathOrInlineDv']}@{vector.get('offset')}"


def _rows(file: Mapping[str, Any]) -> int | None:
    count = json.loads(file.get("stats") or "{}").get("numRecords")
    if count is None:
        return None
    return int(count) - int((file.get("deletionVector") or {}).get("cardinality", 0))

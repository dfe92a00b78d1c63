"""Reads a Delta table's log without Spark and Java (`TableLog`, `read_table`), and deletes its old part (`shorten`).

The log is replayed as in Delta's protocol (PROTOCOL.md, "Action Reconciliation"): the newest checkpoint, in one file or several,
then the commits after it. A log that was read before is continued from its last known commit, if that is still there unchanged.
The number of rows comes from the statistics of the files, minus the rows in deletion vectors.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from bisect import bisect_right
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

from cdcpipe.retry import RetryPolicy
from spark_sink.files import clock, places

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

__all__ = [
    "APPLICATION",
    "LogCache",
    "Mark",
    "TableEnd",
    "TableLog",
    "TableState",
    "commit_path",
    "commits",
    "exists",
    "is_long",
    "is_small",
    "newest",
    "newest_lsn",
    "pin",
    "read_table",
    "shorten",
]

APPLICATION = "cdcpipe"
"""The application id in a table's transactions. The transaction version is the LSN up to which the table has its changes.

LSNs only grow, over all epochs of a staging directory. So Delta skips a commit that is made a second time. The number of a
micro-batch would not work: with a new checkpoint it starts at 0 again.
"""
_COMMIT = re.compile(r"([0-9]{20})\.json", re.ASCII)
_CHECKPOINT = re.compile(r"([0-9]{20})\.checkpoint(?:\.([0-9]{10})\.([0-9]{10}))?\.parquet", re.ASCII)
_CHECKPOINT_V2 = re.compile(r"([0-9]{20})\.checkpoint\.[0-9a-f-]{36}\.(?:json|parquet)", re.ASCII)
"""A checkpoint in this format is one file, which may name others ("sidecars")."""
_OF_VERSION = re.compile(r"\.?([0-9]{20})\.", re.ASCII)
"""Matches the beginning of the names of all files of a version, checksums included."""
_LAST_CHECKPOINT = "_last_checkpoint"
_IMPLIED = {
    "readerFeatures": {"columnMapping": 2},
    "writerFeatures": {
        "appendOnly": 2,
        "invariants": 2,
        "checkConstraints": 3,
        "changeDataFeed": 4,
        "generatedColumns": 4,
        "columnMapping": 5,
        "identityColumns": 6,
    },
}
"""The features that a version of the protocol without lists of features has, each with the first such version."""
_WRITES = ("WRITE", "MERGE")
"""The operations with which file_table.commit adds rows."""
_OWN_RETENTION = {"delta.logRetentionDuration", "delta.enableExpiredLogCleanup"}
_NEWEST_COMMITS = 20
_MANY_COMMITS, _MOST_COMMITS = 200, 1000
"""With this many commits after the newest checkpoint, a new checkpoint, which costs a second, is worth it."""
_ACTIONS_PER_COMMIT = 200
"""A large checkpoint costs more. It is worth it after a commit for each so many actions in it, at most after `_MOST_COMMITS`."""
_MANY_FILES = 1000
"""A checkpoint with this many files takes longer to read in Python than Delta takes to plan a query."""
_MOST_CACHED_FILES = 50_000
"""The most files in the logs that are kept in memory. A file needs some 2 kB."""
_READS = RetryPolicy(attempts=3)
"""A log is read again if it was cleaned up meanwhile: listed files are gone then, and there is a newer checkpoint."""


class Mark(Protocol):
    """The place that a commit records: the table has its changes up to there. ``lsn`` only grows. Its text form is for people.

    A position of the staging log is a mark.
    """

    @property
    def lsn(self) -> int:
        """The number for the transaction version of `APPLICATION`."""


@dataclass(frozen=True, slots=True)
class TableState:
    """A Delta table as of its newest commit."""

    version: int
    lsn: int | None
    """The LSN up to which the table has its changes (delta.sql.recording); None for another program's table."""
    written_ms: int | None
    """The time of the last commit, in milliseconds since 1970."""
    rows: int | None
    """The number of rows; None if a file has no statistics."""
    sizes: tuple[int, ...]
    """The size of each file in bytes."""

    @property
    def files(self) -> int:
        """The number of files."""
        return len(self.sizes)

    @property
    def size(self) -> int:
        """The size of all files together in bytes."""
        return sum(self.sizes)

    def small_files(self, size: int) -> int:
        """Return how many files are smaller than ``size``."""
        return sum(each < size for each in self.sizes)


class TableEnd(NamedTuple):
    """What the newest commits of a table tell. The table has its changes up to ``lsn``; 0 for another program's table."""

    lsn: int
    is_restored: bool
    """Whether RESTORE has set the table back since the last commit of this client or with its position."""


class TableLog:
    """A table's log, replayed up to the commit that was the newest at the last ``refresh``.

    ``refresh`` raises OSError; and ValueError if the log is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._log = path / "_delta_log"
        self._forget()

    def _forget(self) -> None:
        self.version = -1
        """The newest commit; -1 if there is no table."""
        self.lsn: int | None = None
        """The LSN up to which the table has its changes (delta.sql.recording); None for another program's table."""
        self.written_ms: int | None = None
        """The time of the last commit, in milliseconds since 1970."""
        self.metadata: Mapping[str, Any] = {}
        """The action that defines the table's columns and properties."""
        self.protocol: Mapping[str, Any] = {}
        self.clustering: tuple[str, ...] = ()
        """The columns by which its rows are clustered, by the names in its files, without fields of structs."""
        self._files: dict[tuple[str, str], Mapping[str, Any]] = {}
        self._newest: list[bytes] | None = None
        """The lines of the commit ``version``; None if that was not read."""

    @property
    def files(self) -> Collection[Mapping[str, Any]]:
        """The table's files: the actions that have added them."""
        return self._files.values()

    def features(self, kind: str) -> set[str]:
        """Return the table's features. ``kind`` is "readerFeatures" or "writerFeatures".

        Older versions of the protocol do not list them (PROTOCOL.md, "Valid Feature Names in Table Features").
        """
        if kind in self.protocol:
            return set(self.protocol[kind])
        version = int(self.protocol.get("minReaderVersion" if kind == "readerFeatures" else "minWriterVersion", 1))
        return {name for name, since in _IMPLIED[kind].items() if since <= version}

    def obstacle(self, kind: str, known: Collection[str]) -> str | None:
        """Return the first thing about the table that a client does not support; None if there is nothing.

        ``kind`` is "readerFeatures" or "writerFeatures". ``known`` are the features that the client supports. Partitions are never
        supported.
        """
        unknown = self.features(kind).difference(known)
        if unknown:
            return f"the feature {min(unknown)}"
        return "partitions" if self.metadata.get("partitionColumns") else None

    def refresh(self) -> Self:
        """Read the log up to its newest commit. A later call reads only the commits since, unless the table was replaced."""
        try:
            _READS.call(self._read, FileNotFoundError)
        except FileNotFoundError:
            if self._log.is_dir():
                raise
            self._forget()
        return self

    def _read(self) -> None:
        names = _names(self._log)
        versions = _versions(names)
        if not versions:
            self._forget()
            return
        if self.version in versions and self._commit(self.version) == self._newest:
            self._files = dict(self._files)  # do not change what the last caller got from `files`
        else:
            self._begin(names)
        new = [version for version in versions if version > self.version]
        for version, lines in zip(new, places.map_reads(self._commit, new, self.path), strict=True):
            if version != self.version + 1:
                raise ValueError(f"the log of {self.path} lacks the versions before {version}")
            for line in lines:
                self._apply(json.loads(line))
            self.version, self._newest = version, lines
        if self._newest is None:  # the newest version is a checkpoint: read its commit, too, because a checkpoint has no commitInfo
            for line in self._commit(versions[-1]):
                if b'"commitInfo"' in line:
                    self._apply(json.loads(line))

    def _begin(self, names: Collection[str]) -> None:
        """Read the newest checkpoint, if there is one."""
        self._forget()
        checkpoint, parts = _newest_checkpoint(names)
        for name in parts:
            for action in _checkpoint_actions(self._log / name):
                self._apply(action)
        self.version = checkpoint

    def _commit(self, version: int) -> list[bytes]:
        return places.read_lines(commit_path(self.path, version))

    def _apply(self, action: Mapping[str, Any]) -> None:
        if (add := action.get("add")) is not None:
            self._files[_identity(add)] = add
        elif (remove := action.get("remove")) is not None:
            self._files.pop(_identity(remove), None)
        elif (transaction := action.get("txn")) is not None:
            if transaction["appId"] == APPLICATION:
                self.lsn = int(transaction["version"])
        elif (information := action.get("commitInfo")) is not None:
            self.written_ms = int(information["timestamp"]) if "timestamp" in information else self.written_ms
        elif (metadata := action.get("metaData")) is not None:
            self.metadata = metadata
        elif (protocol := action.get("protocol")) is not None:
            self.protocol = protocol
        elif (domain := action.get("domainMetadata")) is not None and domain["domain"] == "delta.clustering":
            names = [] if domain.get("removed") else json.loads(domain["configuration"])["clusteringColumns"]
            self.clustering = tuple(name for name, *fields in names if not fields)


class LogCache:
    """Keeps the logs of tables in memory, so that the next read of a log reads only its new commits. Threads may share a cache.

    ``most_files`` limits the memory: when the logs have more files together, those that were not read for the longest time go.
    """

    def __init__(self, most_files: int = _MOST_CACHED_FILES) -> None:
        self._most_files = most_files
        self._lock = threading.Lock()
        self._logs: dict[Path, TableLog] = {}
        """The logs that nobody reads at the moment, in the order of their last reads."""

    @contextmanager
    def newest(self, path: Path) -> Iterator[TableLog]:
        """Yield a table's log, read up to its newest commit. Nobody else gets the same object meanwhile.

        Raises the errors of `TableLog.refresh`. After an error, also one of the caller, the next call reads the whole log again.

            with logs.newest(path) as log:
                files = list(log.files)
        """
        with self._lock:
            log = self._logs.pop(path, None) or TableLog(path)
        yield log.refresh()
        if log.version < 0 or len(log.files) > self._most_files:
            return
        with self._lock:
            self._logs[path] = log
            count = sum(len(each.files) for each in self._logs.values())
            while count > self._most_files:
                count -= len(self._logs.pop(next(iter(self._logs))).files)


def read_table(path: Path, known: TableState | None = None, logs: LogCache | None = None) -> TableState | None:
    """Return the state of the table; None if there is no table; ``known`` itself if nothing has changed since.

    Raises OSError; and ValueError if the log is damaged.
    """
    if known is not None and _is_newest(path, known.version):
        return known
    with (logs or LogCache()).newest(path) as log:
        if log.version < 0:
            return None
        counts = [_row_count(file) for file in log.files]
        return TableState(
            version=log.version,
            lsn=log.lsn,
            written_ms=log.written_ms,
            rows=None if None in counts else sum(count for count in counts if count is not None),
            sizes=tuple(int(file["size"]) for file in log.files),
        )


def commit_path(path: Path, version: int) -> Path:
    """Return the path of a commit of a table, which need not exist."""
    return path / "_delta_log" / f"{version:020d}.json"


def commits(path: Path) -> list[int]:
    """Return the numbers of a table's commits from its last checkpoint on, in order; empty if there is no table."""
    return _versions(_names(path / "_delta_log"))


def exists(path: Path) -> bool:
    """Tell whether a Delta table exists, that is, whether it has a commit."""
    return any(name.endswith(".json") for name in places.list_names(path / "_delta_log"))


def newest(path: Path) -> TableEnd | None:
    """Return how far the table is; None if there is no table. RESTORE takes the rows back, but not the position."""
    versions = _versions(places.list_names(path / "_delta_log"))
    lsn: int | None = None
    is_restored: bool | None = None
    for count, version in enumerate(reversed(versions)):
        if is_restored is not None and (lsn is not None or count >= _NEWEST_COMMITS):
            break
        lines = places.read_lines(commit_path(path, version))
        actions = [json.loads(line) for line in lines if b'"txn"' in line or b'"commitInfo"' in line]
        information: Mapping[str, Any] = next((action["commitInfo"] for action in actions if "commitInfo" in action), {})
        reached = [int(action["txn"]["version"]) for action in actions if action.get("txn", {}).get("appId") == APPLICATION]
        lsn = reached[0] if reached and lsn is None else lsn
        # Commits of other operations of this client change no rows.
        is_own = information.get("engineInfo") == APPLICATION and information.get("operation") in _WRITES
        if is_restored is None and (information.get("operation") == "RESTORE" or is_own or reached):
            is_restored = information.get("operation") == "RESTORE"
    if not versions:
        return None
    return TableEnd((TableLog(path).refresh().lsn or 0) if lsn is None else lsn, is_restored=bool(is_restored))


def newest_lsn(path: Path) -> int | None:
    """Return the LSN that the table has reached; None if there is no table."""
    found = newest(path)
    return None if found is None else found.lsn


def pin(path: Path) -> TableLog | None:
    """Return the table's log as of now; None if there is no table. Pass it to `delta.sql.read_at`."""
    log = TableLog(path).refresh()
    return None if log.version < 0 else log


def is_long(path: Path) -> bool:
    """Tell whether a log has so many commits after its newest checkpoint that another checkpoint saves readers time."""
    log = path / "_delta_log"
    names = _names(log)
    checkpoint, _ = _newest_checkpoint(names)
    enough = min(max(_MANY_COMMITS, _last_checkpoint(log).actions // _ACTIONS_PER_COMMIT), _MOST_COMMITS)
    return sum(version > checkpoint for version in _versions(names)) >= enough


def is_small(path: Path) -> bool:
    """Tell whether a table's last checkpoint has so few files, if there is one, that its log is read in milliseconds."""
    return _last_checkpoint(path / "_delta_log").files < _MANY_FILES


def shorten(path: Path, age_s: float) -> int:
    """Delete the part of a log before the newest checkpoint that is at least ``age_s`` old. Returns the number of deleted commits.

    A reader that has begun since that checkpoint finds everything that it needs. Does nothing if a property of the table sets the
    retention of its log, or if its checkpoints have sidecar files: Delta shortens these logs itself.
    """
    log = path / "_delta_log"
    names = places.list_names(log)
    until = time.time() - age_s
    if not _before_checkpoint(log, names, until) or any(map(_CHECKPOINT_V2.fullmatch, names)):
        return 0
    # The times of checkpoints come from another clock. Compare the clocks only now, because a store needs three requests for it.
    gone = _before_checkpoint(log, names, until - clock.behind_s(path))
    if not gone or _OWN_RETENTION & TableLog(path).refresh().metadata.get("configuration", {}).keys():
        return 0
    places.remove_files(log, gone)
    return len(_versions(gone))


def _before_checkpoint(log: Path, names: Sequence[str], until: float) -> list[str]:
    """Return the names of the versions before the newest checkpoint that was written at ``until`` or earlier.

    They are in order, so that a commit exists as long as the one before it. Each new commit checks its predecessor (commit.py).
    """
    checkpoints = sorted(_checkpoints(names))
    old = bisect_right(checkpoints, until, key=lambda each: (log / each[1][-1]).stat().st_mtime)
    first = checkpoints[old - 1][0] if old else 0
    return sorted(name for name in names if (match := _OF_VERSION.match(name)) and int(match[1]) < first)


def _names(log: Path) -> list[str]:
    """Return the names in a log from its last checkpoint on. Earlier names may be many, and only `shorten` needs them."""
    names = places.list_names(log)
    if _LAST_CHECKPOINT not in names:
        return names
    first = f"{_last_checkpoint(log).version:020d}."
    kept = [name for name in names if name >= first]
    return kept if f"{first}json" in kept and _newest_checkpoint(kept)[1] else names


class _Hint(NamedTuple):
    """What `_last_checkpoint` tells of the last checkpoint; zeros if it does not, because it is only a hint."""

    version: int = 0
    actions: int = 0
    """Files of the table, files that have left it (tombstones), and some more."""
    files: int = 0
    """The files of the table; if their number is not told, the number of actions."""


def _last_checkpoint(log: Path) -> _Hint:
    try:
        hint = json.loads(places.read_bytes(log / _LAST_CHECKPOINT))
        actions = int(hint.get("size", 0))
        return _Hint(int(hint["version"]), actions, int(hint.get("numOfAddFiles", actions)))
    except (OSError, ValueError, KeyError, TypeError):
        return _Hint()


def _versions(names: Iterable[str]) -> list[int]:
    return sorted(int(match[1]) for match in map(_COMMIT.fullmatch, names) if match is not None)


def _is_newest(path: Path, version: int) -> bool:
    return commit_path(path, version).exists() and not commit_path(path, version + 1).exists()


def _newest_checkpoint(names: Iterable[str]) -> tuple[int, list[str]]:
    """Return version and files of the newest complete checkpoint; -1 and no files if there is none."""
    return max(_checkpoints(names), default=(-1, []))


def _checkpoints(names: Iterable[str]) -> list[tuple[int, list[str]]]:
    """Return versions and files of the complete checkpoints."""
    found: dict[tuple[int, int], list[str]] = {}
    complete = []
    for name in names:
        if (match := _CHECKPOINT.fullmatch(name)) is not None:
            found.setdefault((int(match[1]), int(match[3] or 1)), []).append(name)
        elif (match := _CHECKPOINT_V2.fullmatch(name)) is not None:
            complete.append((int(match[1]), [name]))
    return complete + [(version, sorted(parts)) for (version, count), parts in found.items() if len(parts) == count]


def _checkpoint_actions(path: Path) -> Iterator[Mapping[str, Any]]:
    if path.suffix == ".json":
        actions: Iterable[Mapping[str, Any]] = map(json.loads, places.read_lines(path))
    else:
        actions = _parquet_actions(path)
    for action in actions:
        if (sidecar := action.get("sidecar")) is None:
            yield action
        else:
            yield from _parquet_actions(path.parent / "_sidecars" / sidecar["path"])


def _parquet_actions(path: Path) -> Iterator[Mapping[str, Any]]:
    import pyarrow.compute as pc

    file = places.parquet_reader(path)
    wanted = [
        name for name in ("add", "txn", "metaData", "protocol", "domainMetadata", "sidecar") if name in file.schema_arrow.names
    ]
    for batch in file.iter_batches(columns=wanted):
        # Most rows may be of files that have left the table.
        is_any = functools.reduce(pc.or_, (batch.column(name).is_valid() for name in wanted))
        for action in batch.filter(is_any).to_pylist(maps_as_pydicts="strict"):
            yield {kind: _said(body) for kind, body in action.items() if body}


def _said(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return an action of a checkpoint in the form of a commit: without nulls, and without parsed copies of other fields."""
    return {
        key: _said(value) if isinstance(value, dict) else value
        for key, value in body.items()
        if value is not None and not key.endswith("_parsed")
    }


def _identity(file: Mapping[str, Any]) -> tuple[str, str]:
    """Return what distinguishes a file with one deletion vector from the same file with another."""
    vector = file.get("deletionVector")
    if not vector:
        return file["path"], ""
    return file["path"], f"{vector['storageType']}{vector['pathOrInlineDv']}@{vector.get('offset')}"


def _row_count(file: Mapping[str, Any]) -> int | None:
    """Return the number of a file's rows without those in its deletion vector; None if the file has no statistics."""
    count = json.loads(file.get("stats") or "{}").get("numRecords")
    if count is None:
        return None
    return int(count) - int((file.get("deletionVector") or {}).get("cardinality", 0))

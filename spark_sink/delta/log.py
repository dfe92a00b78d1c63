"""Reads a Delta table's log without Spark and Java (`TableLog`, `read_table`), and deletes its old part (`shorten`).

The log is replayed as in Delta's protocol (PROTOCOL.md, "Action Reconciliation"): the newest checkpoint, in one file or several,
then the commits after it. A log that was read before is continued from its last known commit, if that is still there unchanged.
The number of rows comes from the statistics of the files, minus the rows in deletion vectors.
"""

from __future__ import annotations

import json
import re
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

from cdcpipe.retry import RetryPolicy
from spark_sink.delta.checkpoints import (
    before_checkpoint,
    checkpoint_actions,
    has_v2_checkpoint,
    last_checkpoint,
    names_since_checkpoint,
    newest_checkpoint,
)
from spark_sink.files import clock, places

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

__all__ = [
    "APPLICATION",
    "POSITION_RETENTION",
    "RESTORED",
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
    "newest_lsn",
    "pin",
    "quiet_until",
    "read_table",
    "shorten",
    "table_end",
]

APPLICATION = "cdcpipe"
"""The application id in a table's transactions. The transaction version is the LSN up to which the table has its changes.

LSNs only grow, over all epochs of a staging directory. So Delta skips a commit that is made a second time. The number of a
micro-batch would not work: with a new checkpoint it starts at 0 again.
"""

RESTORED = "cdcpipe.restored"
"""The property of a stored history that RESTORE has set back. Then the commit of RESTORE, which said so, may leave the log."""
_COMMIT = re.compile(r"([0-9]{20})\.json", re.ASCII)
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
POSITION_RETENTION = "delta.setTransactionRetentionDuration"
"""With this property, checkpoints leave out a position that was recorded so long ago. It would be taken for none."""
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
    is_clustered: bool = False
    """Whether OPTIMIZE sorts the table."""

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
    """Whether RESTORE has set the table back since the last commit of this client or with its position, and has not undone this."""


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
        supported, and a writer does not support that the table forgets its position.
        """
        unknown = self.features(kind).difference(known)
        if unknown:
            return f"the feature {min(unknown)}"
        if kind == "writerFeatures" and POSITION_RETENTION in self.metadata.get("configuration", {}):
            return f"the property {POSITION_RETENTION}"
        return "partitions" if self.metadata.get("partitionColumns") else None

    def refresh(self) -> Self:
        """Read the log up to its newest commit. A later call reads only the commits since, unless the table was replaced."""
        try:
            _READS.call(self._read, FileNotFoundError)
        except FileNotFoundError as ex:
            if self._log.is_dir():
                raise ValueError(f"the log of {self.path} lacks a commit or a part of a checkpoint: {ex}") from ex
            self._forget()
        return self

    def _read(self) -> None:
        names = names_since_checkpoint(self._log)
        versions = _versions(names)
        if not versions:
            self._forget()
            return
        if self.version in versions and self._commit(self.version) == self._newest:
            self._files = dict(self._files)  # do not change what the last caller got from `files`
        else:
            self._begin(names)
        # Not only those listed: a list made while commits come may lack one and have the next (POSIX on readdir allows it).
        new = range(self.version + 1, versions[-1] + 1)
        for version, lines in zip(new, places.map_reads(self._commit, new, self.path), strict=True):
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
        checkpoint, parts = newest_checkpoint(names)
        for name in parts:
            for action in checkpoint_actions(self._log / name):
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
            is_clustered=bool(log.clustering),
        )


def commit_path(path: Path, version: int) -> Path:
    """Return the path of a commit of a table, which need not exist."""
    return path / "_delta_log" / f"{version:020d}.json"


def commits(path: Path) -> list[int]:
    """Return the numbers of a table's commits from its last checkpoint on, in order; empty if there is no table."""
    return _versions(names_since_checkpoint(path / "_delta_log"))


def exists(path: Path) -> bool:
    """Tell whether a Delta table exists, that is, whether it has a commit."""
    return any(name.endswith(".json") for name in places.list_names(path / "_delta_log"))


def table_end(path: Path) -> TableEnd | None:
    """Return how far the table is; None if there is no table. RESTORE takes the rows back, but not the position.

    A RESTORE to a version from after the last commit of this client, or with its position, has taken nothing of ours back. So it
    undoes an earlier RESTORE.
    """
    return _end(path, _versions(places.list_names(path / "_delta_log")))


def _end(path: Path, versions: Sequence[int]) -> TableEnd | None:
    """Return how far the table with these commits is, which are in order; None if there are none."""
    lsn: int | None = None
    is_restored: bool | None = None
    target: int | None = None  # the version to which RESTORE has set the table back
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
        is_skipped = target is not None and version > target
        if is_restored is None and (is_own or reached):
            is_restored = is_skipped
        elif is_restored is None and information.get("operation") == "RESTORE" and not is_skipped:
            target = _restored_version(information)
            is_restored = True if target is None else None
    if not versions:
        return None
    is_restored = target is not None if is_restored is None else is_restored
    return TableEnd((TableLog(path).refresh().lsn or 0) if lsn is None else lsn, is_restored)


def _restored_version(information: Mapping[str, Any]) -> int | None:
    """Return the version to which RESTORE has set a table back; None if its commit tells only a time."""
    told = str((information.get("operationParameters") or {}).get("version"))
    return int(told) if told.isdecimal() else None


def newest_lsn(path: Path) -> int | None:
    """Return the LSN that the table has reached; None if there is no table."""
    found = table_end(path)
    return None if found is None else found.lsn


def pin(path: Path) -> TableLog | None:
    """Return the table's log as of now; None if there is no table. Pass it to `delta.sql.read_at`."""
    log = TableLog(path).refresh()
    return None if log.version < 0 else log


def is_long(path: Path) -> bool:
    """Tell whether a log has so many commits after its newest checkpoint that another checkpoint saves readers time."""
    log = path / "_delta_log"
    names = names_since_checkpoint(log)
    checkpoint, _ = newest_checkpoint(names)
    enough = min(max(_MANY_COMMITS, last_checkpoint(log).actions // _ACTIONS_PER_COMMIT), _MOST_COMMITS)
    return sum(version > checkpoint for version in _versions(names)) >= enough


def is_small(path: Path) -> bool:
    """Tell whether a table's last checkpoint has so few files, if there is one, that its log is read in milliseconds."""
    return last_checkpoint(path / "_delta_log").files < _MANY_FILES


def shorten(path: Path, age_s: float) -> int:
    """Delete the part of a log before the newest checkpoint that is at least ``age_s`` old. Returns the number of deleted commits.

    A reader that has begun since that checkpoint finds everything that it needs. Does nothing if a property of the table sets the
    retention of its log, if its checkpoints have sidecar files, or if DROP FEATURE protects its checkpoints: Delta shortens these
    logs itself. Does nothing, too, while only this part tells whether RESTORE has set the table back, or has undone that.
    """
    log = path / "_delta_log"
    names = places.list_names(log)
    until = time.time() - age_s
    if not before_checkpoint(log, names, until) or has_v2_checkpoint(names):
        return 0
    # The times of checkpoints come from another clock. Compare the clocks only now, because a store needs some requests for it.
    gone = before_checkpoint(log, names, until - clock.behind_s(path))
    if not gone:
        return 0
    found = TableLog(path).refresh()
    properties = found.metadata.get("configuration", {})
    if _OWN_RETENTION & properties.keys() or "checkpointProtection" in found.features("writerFeatures"):
        return 0
    if RESTORED not in properties:
        versions = _versions(names)
        end, left = (_end(path, each) for each in (versions, sorted({*versions}.difference(_versions(gone)))))
        if end is None or left is None or end.is_restored or left.is_restored:
            return 0
    places.remove_files(log, gone)
    return len(_versions(gone))


def _versions(names: Iterable[str]) -> list[int]:
    return sorted(int(match[1]) for match in map(_COMMIT.fullmatch, names) if match is not None)


def _is_newest(path: Path, version: int) -> bool:
    return commit_path(path, version).exists() and not commit_path(path, version + 1).exists()


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


def quiet_until(files: Iterable[Mapping[str, Any]], lsn: int) -> int:
    """Return up to where these files of a changelog have no change after ``lsn``; ``lsn`` if their statistics do not tell."""
    later = []
    for file in files:
        stats = json.loads(file.get("stats") or "{}")
        least, greatest = (stats.get(kind, {}).get("_cdc_end_lsn") for kind in ("minValues", "maxValues"))
        if least is None or greatest is None:
            return lsn
        if int(greatest) > lsn:
            later.append(int(least) - 1)
    return max(lsn, min(later, default=lsn))

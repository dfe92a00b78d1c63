"""The staging log, as readers see it: a directory that is its own index. No pyspark, no pyarrow; nothing is decoded.

    000001/epoch.json                                who writes: system id, timeline, database, slot, ..., start LSN
    000001/000000000171F388-00000000017304A8.cdc     a sealed segment: (start, end], whole transactions in commit order
    000001/000000000171F388-00000000017304A8.idx     its index, a cache (staging/index.py)
    000001/00000000017304A8.open                     the segment being filled: not part of the log
    000002/...                                       the next launcher's epoch
    removed.json                                     up to which position segments were removed, all readers being past
    readers/NAME.json                                how far a reader is (register_reader)
    known.json                                       up to which LSN nothing is missing, beyond the last segment (known_position.py)
    last_error.json                                  with what somebody's work on it ended last (staging/last_error.py)
    lock                                             held by the launcher (staging/writer.py)

The log is one chain: each segment starts where the one before it ends, an epoch starts where the log ended when its
launcher began. What an older launcher seals after that is beyond the next epoch's start, and is no part of the log
(fencing). All else that does not fit, a gap, an overlap, a name that is none, is corruption and is a StagingError.

Listing needs no lock and may run while a launcher writes and while segments are removed.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from cdcpipe.errors import CdcpipeError
from cdcpipe.lsn import LSN, format_lsn
from cdcpipe.retry import RetryPolicy
from spark_sink.files.local import read_json

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Epoch", "LogView", "Position", "Segment", "StagingError", "list_epochs", "list_segments", "log_end"]

FORMAT = 1
"""The version of the directory's layout and of epoch.json; a reader refuses one that it does not know."""

_EPOCH_NAME = re.compile(r"[0-9]{6,9}", re.ASCII)
_SEGMENT_NAME = re.compile(r"([0-9A-F]{16})-([0-9A-F]{16})\.cdc", re.ASCII)
_POSITION_TEXT = re.compile(r"([0-9]{1,9}):([0-9A-Fa-f]{1,8}/[0-9A-Fa-f]{1,8})", re.ASCII)

_LISTINGS = RetryPolicy(attempts=3)
"""A directory that changes while it is listed may show the second of two new files and not the first."""

_SAME_TIME_NS = 3_000_000_000
"""Two changes of a directory that lie as far apart have other times, in any file system."""
_LISTING_S = 10.0
"""How long a listing may serve for a directory whose time is the same: a file server's clock is its own."""

T = TypeVar("T")


class StagingError(CdcpipeError):
    """The staging directory is damaged, is not ours, or lacks what a reader needs. Exit code 7, SYSTEM_ERROR."""


class _BrokenChainError(StagingError):
    """Segments that do not follow one another: corruption, or a listing that a writer overtook."""


class Position(NamedTuple):
    """A place in the log, always a transaction's end: everything up to ``lsn`` in ``epoch``. Text form ``1:0/171F388``.

    ``Position(0, 0)`` is the beginning of whatever log there is. ``lsn`` is a plain int, never an `LSN`: Spark takes an `LSN` for a
    text.
    """

    epoch: int
    lsn: int

    @classmethod
    def parse(cls, text: str) -> Position:
        """Read the text form; raise ValueError for anything else."""
        match = _POSITION_TEXT.fullmatch(text)
        if match is None:
            msg = f"not a position (EPOCH:LSN, like 1:0/171F388): {text!r}"
            raise ValueError(msg)
        return cls(int(match[1]), int(LSN.parse(match[2])))

    def __str__(self) -> str:
        return f"{self.epoch}:{format_lsn(self.lsn)}"


@dataclass(frozen=True, slots=True)
class Epoch:
    """One launcher's part of the log: what epoch.json says."""

    number: int
    system_id: str
    timeline: int
    database: str
    slot: str
    publications: tuple[str, ...]
    options: dict[str, str]
    start_lsn: int

    @property
    def start(self) -> Position:
        """Where the epoch begins."""
        return Position(self.number, self.start_lsn)


@dataclass(frozen=True, slots=True)
class Segment:
    """A sealed segment: the transactions that end in (start_lsn, end_lsn]."""

    epoch: int
    start_lsn: int
    end_lsn: int
    path: Path

    @property
    def index_path(self) -> Path:
        """Where its index is, or would be."""
        return self.path.with_suffix(".idx")

    def size(self) -> int:
        """Return its size in bytes; StagingError if it can't be seen."""
        try:
            return self.path.stat().st_size
        except OSError as ex:
            msg = f"segment {self.path} cannot be read: {ex.strerror}"
            raise StagingError(msg, hint="restore it from a copy of the staging directory") from ex

    @property
    def start(self) -> Position:
        """The position before the segment."""
        return Position(self.epoch, self.start_lsn)

    @property
    def end(self) -> Position:
        """The position of a reader that has the whole segment."""
        return Position(self.epoch, self.end_lsn)


_Chain = tuple[list[Epoch], list[Segment], Position | None]
"""The epochs, the log's segments in order and where it ends; None for a log that has not begun."""


def epoch_directory(root: Path, number: int) -> Path:
    """Return where an epoch's files are."""
    return root / f"{number:06d}"


def segment_name(start_lsn: int, end_lsn: int) -> str:
    """Return a sealed segment's file name."""
    return f"{start_lsn:016X}-{end_lsn:016X}.cdc"


def open_name(start_lsn: int) -> str:
    """Return the file name of a segment that is being filled."""
    return f"{start_lsn:016X}.open"


def _field(path: Path, value: dict[str, Any], name: str, kind: type[T]) -> T:
    field = value.get(name)
    if not isinstance(field, kind) or isinstance(field, bool):
        msg = f"{path} is damaged: {name!r} is missing, or of the wrong type"
        raise StagingError(msg)
    return field


def _read_epoch(directory: Path) -> Epoch | None:
    """Read an epoch's description, None for one whose launcher ended before it had written it."""
    path = directory / "epoch.json"
    value = read_json(path)
    if value is None:
        return None
    if value.get("format") != FORMAT:
        msg = f"{path} has format {value.get('format')!r}; this program knows {FORMAT}"
        raise StagingError(msg, hint="use the version of cdcpipe that wrote it, or a newer one")
    publications = _field(path, value, "publications", list)
    options = _field(path, value, "options", dict)
    try:
        start_lsn = int(LSN.parse(_field(path, value, "start_lsn", str)))
    except ValueError as ex:
        msg = f"{path} is damaged: {ex}"
        raise StagingError(msg) from ex
    return Epoch(
        number=int(directory.name),
        system_id=_field(path, value, "system_id", str),
        timeline=_field(path, value, "timeline", int),
        database=_field(path, value, "database", str),
        slot=_field(path, value, "slot", str),
        publications=tuple(str(name) for name in publications),
        options={str(key): str(option) for key, option in options.items()},
        start_lsn=start_lsn,
    )


def epoch_numbers(root: Path) -> list[int]:
    """Return the numbers of all epoch directories, described or not, in order; StagingError if there is no ``root``."""
    try:
        with os.scandir(root) as entries:
            names = [entry.name for entry in entries]
    except (FileNotFoundError, NotADirectoryError) as ex:
        msg = f"{root} is not a staging directory: there is no such directory"
        raise StagingError(msg, hint="give the directory that was --staging of cdcpipe-spark land or run") from ex
    return sorted(int(name) for name in names if _EPOCH_NAME.fullmatch(name))


def list_epochs(root: Path | str) -> list[Epoch]:
    """Return the epochs in order; raise StagingError for a damaged description or one of another database or slot."""
    root = Path(root)
    epochs = [epoch for number in epoch_numbers(root) if (epoch := _read_epoch(epoch_directory(root, number))) is not None]
    for before, epoch in pairwise(epochs):
        if identity(epoch) != identity(before):
            msg = f"{root}: epochs {before.number} and {epoch.number} differ in server, timeline, database or slot"
            raise StagingError(msg, hint="one staging directory serves one slot; do not mix the files of two")
        if epoch.start_lsn < before.start_lsn:
            msg = f"{root}: epoch {epoch.number} starts before epoch {before.number}"
            raise StagingError(msg)
    return epochs


def identity(epoch: Epoch) -> tuple[str, int, str, str]:
    """Return what is the same for all epochs of one directory."""
    return epoch.system_id, epoch.timeline, epoch.database, epoch.slot


def removed_position(root: Path) -> Position | None:
    """Return the position up to which segments were removed, None if none was."""
    path = root / "removed.json"
    value = read_json(path)
    return None if value is None else read_position(path, value)


def read_position(path: Path, value: dict[str, Any]) -> Position:
    """Return the ``position`` of a small JSON file."""
    try:
        return Position.parse(_field(path, value, "position", str))
    except ValueError as ex:
        msg = f"{path} is damaged: {ex}"
        raise StagingError(msg) from ex


def epoch_segments(root: Path, number: int) -> list[Segment]:
    """Return what is sealed in an epoch's directory, in order of start, unchecked."""
    directory = epoch_directory(root, number)
    try:
        with os.scandir(directory) as entries:
            names = [entry.name for entry in entries]
    except FileNotFoundError:  # removed since: removed.json tells
        return []
    segments = []
    for name in names:
        if not name.endswith(".cdc"):
            continue
        match = _SEGMENT_NAME.fullmatch(name)
        start_lsn, end_lsn = (int(match[1], 16), int(match[2], 16)) if match is not None else (0, 0)
        if start_lsn >= end_lsn:
            msg = f"{directory / name} is not a segment's name (START-END.cdc, START below END)"
            raise StagingError(msg, hint="a file was renamed or does not belong here; restore its name or move it away")
        segments.append(Segment(number, start_lsn, end_lsn, directory / name))
    return sorted(segments, key=lambda segment: segment.start_lsn)


def _chain(root: Path) -> _Chain:
    """List the log."""
    described = list_epochs(root)
    numbers = {epoch.number for epoch in described}
    listed = {epoch.number: epoch_segments(root, epoch.number) for epoch in described}
    for number in epoch_numbers(root):
        if number not in numbers and (stray := epoch_segments(root, number)) and not _read_epoch(stray[0].path.parent):
            msg = f"{stray[0].path.parent} has segments and no epoch.json"
            raise StagingError(msg, hint="restore epoch.json from a copy of the directory")
    # Read last: what is gone from the listing had been noted there before it went.
    removed = removed_position(root)
    if not described:
        return [], [], None
    end = Position(described[0].number, described[0].start_lsn)
    if removed is not None and removed.lsn > end.lsn:
        end = Position(max(removed.epoch, end.epoch), removed.lsn)
    segments: list[Segment] = []
    for epoch, following in zip(described, [*described[1:], None], strict=True):
        fence = None if following is None else following.start_lsn
        if epoch.start_lsn > end.lsn:
            msg = f"{root}: segments are missing between {format_lsn(end.lsn)} and {epoch.start}, where the epoch begins"
            raise _BrokenChainError(msg, hint=_LOST_HINT)
        for segment in listed[epoch.number]:
            if fence is not None and segment.start_lsn >= fence:
                break  # sealed by a launcher that had been replaced
            if removed is not None and segment.end_lsn <= removed.lsn:
                continue  # about to be deleted
            if segment.start_lsn > end.lsn:
                msg = f"{root}: segments are missing between {format_lsn(end.lsn)} and {segment.start}"
                raise _BrokenChainError(msg, hint=_LOST_HINT)
            if segment.start_lsn < end.lsn or (fence is not None and segment.end_lsn > fence):
                msg = f"{segment.path} overlaps what comes before or after it in the log"
                raise _BrokenChainError(msg, hint="a file was renamed, or comes from elsewhere; move it away")
            segments.append(segment)
            end = segment.end
        end = Position(epoch.number, end.lsn)
    return described, segments, end


_LOST_HINT = (
    "restore the files from a copy of the directory; if there is none, start anew with an empty staging directory, "
    "an empty warehouse and a new slot"
)


def read_chain(root: Path) -> _Chain:
    return _LISTINGS.call(lambda: _chain(root), _BrokenChainError)


def log_end(root: Path | str) -> Position | None:
    """Return the position after the last sealed segment, None for a log that has not begun."""
    return read_chain(Path(root))[2]


def list_segments(root: Path | str, after: Position | None = None) -> list[Segment]:
    """Return the log's segments in order; with ``after``, those that hold a transaction beyond it.

    Raise StagingError for a gap, an overlap or a missing segment, and for an ``after`` that is not in this log: before
    what has been removed, beyond the end, in what a replaced launcher wrote.
    """
    root = Path(root)
    return _segments_after(root, read_chain(root), after)


class LogView:
    """A log that is looked at again and again: listed anew if one of its directories has changed, and now and then."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._times: dict[Path, int] = {}
        """When the directories were changed last, as of the listing; empty if that may have to be made anew."""
        self._listed_at = 0.0
        self._chain: _Chain = [], [], None

    def end(self) -> Position | None:
        """Return what `log_end` does."""
        return self._look()[2]

    def segments(self, after: Position | None = None) -> list[Segment]:
        """Return, or raise, what `list_segments` does."""
        return _segments_after(self._root, self._look(), after)

    def _look(self) -> _Chain:
        is_new = time.monotonic() - self._listed_at < _LISTING_S
        if not (is_new and self._times and self._times == _changed_ns(self._times)):
            # An epoch's directory may be listed before its description is there.
            directories = [epoch_directory(self._root, number) for number in epoch_numbers(self._root)]
            times, self._times = _changed_ns([self._root, *directories]), {}
            self._listed_at = time.monotonic()
            self._chain = read_chain(self._root)
            # A change in the moment of the listing, and one after it, may have the same time.
            if times and time.time_ns() - max(times.values()) > _SAME_TIME_NS:
                self._times = times
        return self._chain


def _changed_ns(directories: Iterable[Path]) -> dict[Path, int]:
    """Return when the directories were changed last; nothing if one has gone."""
    try:
        return {directory: directory.stat().st_mtime_ns for directory in directories}
    except FileNotFoundError:
        return {}


def _segments_after(root: Path, chain: _Chain, after: Position | None) -> list[Segment]:
    epochs, segments, end = chain
    if after is None or after == (0, 0):
        return segments
    if end is None:
        msg = f"{root}: position {after} is not in this log, which has not begun"
        raise StagingError(msg, hint=_FOREIGN_HINT)
    _check_known(root, after, epochs, segments, end)
    return [segment for segment in segments if segment.end_lsn > after.lsn]


_FOREIGN_HINT = "the reader belongs to another staging directory, or this one was made anew; give each its own warehouse"


def _check_known(root: Path, after: Position, epochs: list[Epoch], segments: list[Segment], end: Position) -> None:
    """Raise StagingError unless ``after`` is a position of this log from which a reader can go on."""
    begin = segments[0].start_lsn if segments else end.lsn
    if after.lsn < begin:
        msg = f"{root}: the segments from {after} to {format_lsn(begin)} are not there any more"
        raise StagingError(msg, hint="they were removed, or the position is of another staging directory")
    fence = next((epoch for epoch in epochs if epoch.number > after.epoch), None)
    if after.lsn > end.lsn or after.epoch > end.epoch or (fence is not None and after.lsn > fence.start_lsn):
        msg = f"{root}: position {after} is not in this log, which ends at {end}"
        raise StagingError(msg, hint=_FOREIGN_HINT)


def remove_epoch(root: Path, number: int) -> None:
    """Delete an epoch that is no part of the log any more; its description goes last, so a crash leaves no riddle."""
    directory = epoch_directory(root, number)
    try:
        with os.scandir(directory) as entries:
            names = [entry.name for entry in entries]
    except FileNotFoundError:
        return
    for name in sorted(names, key=lambda name: name == "epoch.json"):
        (directory / name).unlink(missing_ok=True)
    try:
        directory.rmdir()
    except FileNotFoundError:
        return

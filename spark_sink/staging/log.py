"""Reads the staging log: its epochs, segments and end. The file names are the index. No pyspark, no pyarrow; decodes nothing.

    000001/epoch.json                                the epoch: system id, timeline, database, slot, ..., start LSN
    000001/000000000171F388-00000000017304A8.cdc     a sealed segment: (start, end], whole transactions in commit order
    000001/000000000171F388-00000000017304A8.idx     its index, a cache (staging/index.py)
    000001/00000000017304A8.open                     the segment being filled: not part of the log
    000002/...                                       the next launcher's epoch
    removed.json                                     the position up to which segments were removed
    readers/NAME.json                                the position of a reader (readers.register_reader)
    readers/tables.lock                              the lock of the pipeline that reads this log for its tables
    known.json                                       the account of the slot: up to which LSN the log is complete (account.py)
    copied.json                                      the position of the newest copy of a table (copied.py)
    masks.json                                       the masks of the tables that the log feeds (table_masks.py)
    diverged.json                                    a gap that would not show later, and that no epoch has yet (recorded_gap.py)
    last_error.json                                  the error with which the last run or land ended (last_error.py)
    history.jsonl                                    rates and lags of the last day (samples.py)
    lock                                             held by the launcher (lock.py)

The log is one chain. Each segment starts where the one before it ends. An epoch starts where the log ended when its launcher
began, or further if its epoch.json names a gap: changes that the log does not have, because the slot was moved or lost. If an older
launcher seals a segment after that, the segment starts at or beyond the start of the next epoch, and is not part of the log
(fencing). Anything else that does not fit (a hole, an overlap, an unknown file name) is corruption and raises StagingError.

Listing the log takes no lock. Meanwhile a launcher may write, and segments may be removed.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from cdcpipe.errors import CdcpipeError
from cdcpipe.lsn import LSN, format_lsn
from cdcpipe.pipe.exitcode import ExitCode
from cdcpipe.retry import RetryPolicy
from spark_sink.files.local import NEWER, RESTORE, read_json
from spark_sink.staging.gap import Gap

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "SEGMENT_NAME",
    "Epoch",
    "OtherSourceError",
    "Position",
    "Segment",
    "StagingError",
    "anew",
    "former_system_ids",
    "has_log",
    "list_epochs",
    "list_segments",
    "log_end",
]

FORMAT = 1
"""The version of the directory's layout and of epoch.json. A reader refuses other versions."""

_EPOCH_NAME = re.compile(r"[0-9]{6,9}", re.ASCII)
SEGMENT_NAME = re.compile(r"([0-9A-F]{16})-([0-9A-F]{16})\.cdc", re.ASCII)
_NAME_LENGTH = 37
_POSITION_TEXT = re.compile(r"([0-9]{1,9}):([0-9A-Fa-f]{1,8}/[0-9A-Fa-f]{1,8})", re.ASCII)

_LISTINGS = RetryPolicy(attempts=3)
"""The log is listed again after a broken chain: a listing may contain the second of two new files and miss the first."""

T = TypeVar("T")


class StagingError(CdcpipeError):
    """The staging directory is damaged, belongs to another slot or user, or lacks segments that a reader needs. Exit code 7."""


class OtherSourceError(StagingError):
    """The log is that of another server, database or slot, or of a newer timeline. Exit code 2, as for what the server refuses."""

    exit_code = ExitCode.INIT_FAILED


class _BrokenChainError(StagingError):
    """Segments do not follow one another: the log is corrupt, or a writer changed it during the listing."""


class Position(NamedTuple):
    """A place in the log, always the end of a transaction. Its text form is ``1:0/171F388``.

    A reader at this position has everything up to ``lsn`` in ``epoch``. ``Position(0, 0)`` is the beginning of any log. ``lsn`` is
    a plain int, never an `LSN`, because Spark would treat an `LSN` as text.
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
    """One launcher's part of the log: the contents of epoch.json."""

    number: int
    system_id: str
    timeline: int
    database: str
    slot: str
    publications: tuple[str, ...]
    options: dict[str, str]
    start_lsn: int
    gap: Gap | None = None
    """What the log lacks before this epoch."""
    former_system_id: str | None = None
    """The system id of the epoch before, if the user has accepted that it is another one (pg_upgrade)."""
    timeline_began_lsn: int = 0
    """Where the server's timeline branched off the one before; 0 on the first timeline, and in logs of older versions."""
    left_out: tuple[str, ...] = ()
    """The publications of the epoch before that this one does not have: the log lacks the changes of their tables from here on."""
    token: str = ""
    """A random text: epoch 3 of this log has another one than epoch 3 of a restored copy. Empty in logs of older versions."""

    @property
    def start(self) -> Position:
        """The position at which the epoch begins."""
        return Position(self.number, self.start_lsn)

    @property
    def is_break(self) -> bool:
        """Whether the epoch alone says that changes are missing before it, or that its server had another system id."""
        return self.gap is not None or self.former_system_id is not None

    @property
    def is_news(self) -> bool:
        """Whether the epoch alone says something that each reader has to know, also if the epoch has no segment."""
        return self.is_break or bool(self.left_out)


@dataclass(frozen=True, slots=True)
class Segment:
    """A sealed segment: the transactions that end in (start_lsn, end_lsn]."""

    epoch: int
    start_lsn: int
    end_lsn: int
    path: Path

    @property
    def index_path(self) -> Path:
        """The path of the segment's index. The file may not exist."""
        return self.path.with_suffix(".idx")

    def size(self) -> int:
        """Return the size in bytes. Raises StagingError if the file can't be read."""
        try:
            return self.path.stat().st_size
        except OSError as ex:
            msg = f"segment {self.path} cannot be read: {ex.strerror}"
            raise StagingError(msg, hint="restore it from a copy of the staging directory") from ex

    @property
    def start(self) -> Position:
        """The position of a reader that has everything before the segment."""
        return Position(self.epoch, self.start_lsn)

    @property
    def end(self) -> Position:
        """The position of a reader that has the whole segment."""
        return Position(self.epoch, self.end_lsn)


Chain = tuple[list[Epoch], list[Segment], Position | None]
"""The epochs, the log's segments in order, and the end of the log (None for a log that has not begun)."""


def epoch_directory(root: Path, number: int) -> Path:
    """Return the directory of an epoch."""
    return root / f"{number:06d}"


def segment_name(start_lsn: int, end_lsn: int) -> str:
    """Return the file name of a sealed segment."""
    return f"{start_lsn:016X}-{end_lsn:016X}.cdc"


def open_name(start_lsn: int) -> str:
    """Return the file name of a segment that is being filled."""
    return f"{start_lsn:016X}.open"


def _field(path: Path, value: dict[str, Any], name: str, kind: type[T]) -> T:
    field = value.get(name)
    if not isinstance(field, kind) or isinstance(field, bool):
        raise StagingError(f"{path} is damaged: {name!r} is missing, or of the wrong type", hint=RESTORE)
    return field


def _read_epoch(directory: Path) -> Epoch | None:
    """Read epoch.json; None if it does not exist, because the launcher ended before it wrote it."""
    path = directory / "epoch.json"
    value = read_json(path)
    if value is None:
        return None
    if value.get("format") != FORMAT:
        msg = f"{path} has format {value.get('format')!r}; this program knows {FORMAT}"
        raise StagingError(msg, hint=NEWER)
    publications = _field(path, value, "publications", list)
    options = _field(path, value, "options", dict)
    try:
        start_lsn = int(LSN.parse(_field(path, value, "start_lsn", str)))
        timeline_began_lsn = int(LSN.parse(value.get("timeline_began", "0/0")))
        gap = None if value.get("gap") is None else Gap.from_json(_field(path, value, "gap", dict))
    except (ValueError, KeyError, TypeError) as ex:
        raise StagingError(f"{path} is damaged: {ex}", hint=RESTORE) from ex
    return Epoch(
        number=int(directory.name),
        system_id=_field(path, value, "system_id", str),
        timeline=_field(path, value, "timeline", int),
        database=_field(path, value, "database", str),
        slot=_field(path, value, "slot", str),
        publications=tuple(str(name) for name in publications),
        options={str(key): str(option) for key, option in options.items()},
        start_lsn=start_lsn,
        gap=gap,
        former_system_id=value.get("former_system_id"),
        timeline_began_lsn=timeline_began_lsn,
        left_out=tuple(str(name) for name in value.get("left_out", ())),
        token=str(value.get("token", "")),
    )


def epoch_numbers(root: Path) -> list[int]:
    """Return the numbers of all epoch directories in order, also of those without epoch.json.

    Raises StagingError if ``root`` does not exist.
    """
    try:
        with os.scandir(root) as entries:
            names = [entry.name for entry in entries]
    except (FileNotFoundError, NotADirectoryError) as ex:
        msg = f"{root} is not a staging directory: there is no such directory"
        raise StagingError(msg, hint="give the directory that cdcpipe-spark land or run has as --staging") from ex
    return sorted(int(name) for name in names if _EPOCH_NAME.fullmatch(name))


def list_epochs(root: Path | str) -> list[Epoch]:
    """Return the epochs in order. Raises StagingError if an epoch.json is damaged, or if two do not belong to one slot."""
    root = Path(root)
    epochs = [epoch for number in epoch_numbers(root) if (epoch := _read_epoch(epoch_directory(root, number))) is not None]
    for before, epoch in pairwise(epochs):
        if not _continues(before, epoch):
            msg = f"{root}: epochs {before.number} and {epoch.number} differ in server, database or slot, or the timeline goes back"
            raise StagingError(msg, hint=_MIXED_HINT)
        if epoch.start_lsn < before.start_lsn:
            msg = f"{root}: epoch {epoch.number} starts before epoch {before.number}"
            raise StagingError(msg, hint=_MIXED_HINT)
    return epochs


def epoch_of(root: Path, number: int) -> Epoch | None:
    """Return an epoch; None if it does not exist any more."""
    return _read_epoch(epoch_directory(root, number))


def left_lsn(epochs: Iterable[Epoch], position: Position, token: str = "") -> int | None:
    """Return the LSN from which the log is another one than that of a reader at ``position``; None if nothing says that it is.

    The staging directory may be an older copy with which a launcher has gone on. Then the log has other transactions from there,
    with the same epochs and LSNs. ``token`` is that of the reader's epoch, if it is known. After a gap that passes ``position`` the
    difference does not count: the tables are copied anew.
    """
    left = None
    for epoch in epochs:
        if epoch.gap is not None and epoch.start_lsn >= position.lsn and epoch.number > position.epoch:
            return None
        is_other = epoch.number == position.epoch and "" not in (token, epoch.token) and epoch.token != token
        if left is None and (is_other or (epoch.number > position.epoch and epoch.start_lsn < position.lsn)):
            left = epoch.start_lsn
    return left


def _continues(before: Epoch, epoch: Epoch) -> bool:
    """Tell whether two epochs in a row belong to one slot of one server, which may be on a newer timeline meanwhile."""
    is_same = (epoch.database, epoch.slot) == (before.database, before.slot)
    if epoch.former_system_id is not None:
        return is_same and epoch.former_system_id == before.system_id
    return is_same and epoch.system_id == before.system_id and epoch.timeline >= before.timeline


def removed_position(root: Path) -> Position | None:
    """Return the position up to which segments were removed; None if no segment was removed."""
    path = root / "removed.json"
    value = read_json(path)
    return None if value is None else read_position(path, value)


def read_position(path: Path, value: dict[str, Any]) -> Position:
    """Return the ``position`` in ``value``, the contents of the small JSON file ``path``."""
    try:
        return Position.parse(_field(path, value, "position", str))
    except ValueError as ex:
        raise StagingError(f"{path} is damaged: {ex}", hint=RESTORE) from ex


def epoch_segments(root: Path, number: int, after_lsn: int = 0, fence: int | None = None) -> list[Segment]:
    """Return the sealed segments in an epoch's directory, ordered by start. Does not check that they are a chain.

    The segments that end at ``after_lsn`` or before come as one segment without a file, from the start of the first to the end of
    the last: there may be 600,000 of them. Those that start at ``fence`` or beyond are not part of the log, and stay apart.
    """
    directory = epoch_directory(root, number)
    try:
        listed = [name for name in os.listdir(directory) if name.endswith(".cdc")]  # noqa: PTH208 - faster
    except FileNotFoundError:  # removed since the listing of the epochs: removed.json says so
        return []
    names = listed
    if after_lsn:
        last, limit = f"{after_lsn:016X}.cdc", "G" if fence is None else f"{fence:016X}"
        behind = [name for name in listed if name[17:] <= last and name[:16] < limit and len(name) == _NAME_LENGTH]
        if len(behind) > 1:
            names = [f"{min(behind)[:16]}-{max(behind)[17:]}", *set(listed).difference(behind)]
    segments = []
    for name in names:
        match = SEGMENT_NAME.fullmatch(name)
        start_lsn, end_lsn = (int(match[1], 16), int(match[2], 16)) if match is not None else (0, 0)
        if start_lsn >= end_lsn:
            msg = f"{directory / name} is not a segment's name (START-END.cdc, START below END)"
            raise StagingError(msg, hint="a file was renamed or does not belong here; restore its name or move it away")
        segments.append(Segment(number, start_lsn, end_lsn, directory / name))
    return sorted(segments, key=lambda segment: segment.start_lsn)


def _chain(root: Path, after_lsn: int) -> Chain:
    """List the log once, and check that it is a chain. Segments up to ``after_lsn`` are put together: see `epoch_segments`."""
    described = list_epochs(root)
    numbers = {epoch.number for epoch in described}
    fences: list[int | None] = [epoch.start_lsn for epoch in described[1:]]
    fenced = list(zip(described, [*fences, None], strict=False))
    listed = {epoch.number: epoch_segments(root, epoch.number, after_lsn, fence) for epoch, fence in fenced}
    for number in epoch_numbers(root):
        if number not in numbers and (stray := epoch_segments(root, number)) and not _read_epoch(stray[0].path.parent):
            msg = f"{stray[0].path.parent} has segments but no epoch.json"
            raise StagingError(msg, hint="restore epoch.json from a copy of the directory")
    # Read this last: remove_consumed writes the position to removed.json before it removes a segment.
    removed = removed_position(root)
    if not described:
        _check_unused(root)
        return [], [], None
    end = Position(described[0].number, described[0].start_lsn)
    if removed is not None and removed.lsn > end.lsn:
        end = Position(max(removed.epoch, end.epoch), removed.lsn)
    segments: list[Segment] = []
    for epoch, fence in fenced:
        if epoch.gap is not None:
            end = Position(epoch.number, max(end.lsn, epoch.start_lsn))
        if epoch.start_lsn > end.lsn:
            msg = f"{root}: segments are missing between {format_lsn(end.lsn)} and {epoch.start}, the start of the epoch"
            raise _BrokenChainError(msg, hint=_lost_hint(root))
        for segment in listed[epoch.number]:
            if fence is not None and segment.start_lsn >= fence:
                break  # sealed by a launcher after another one had replaced it
            if removed is not None and segment.end_lsn <= removed.lsn:
                continue  # another process is about to delete it
            start_lsn = segment.start_lsn
            if removed is not None and segment.end_lsn <= after_lsn:  # another process deletes the first of those that come as one
                start_lsn = max(start_lsn, removed.lsn)
            if start_lsn > end.lsn:
                msg = f"{root}: segments are missing between {format_lsn(end.lsn)} and {segment.start}"
                raise _BrokenChainError(msg, hint=_lost_hint(root))
            if start_lsn < end.lsn or (fence is not None and segment.end_lsn > fence):
                msg = f"{segment.path} overlaps another segment of the log"
                raise _BrokenChainError(msg, hint="a file was renamed, or comes from another directory; move it away")
            segments.append(segment)
            end = segment.end
        end = Position(epoch.number, end.lsn)
    return described, segments, end


def _check_unused(root: Path) -> None:
    """Raise StagingError if a directory without epochs has had some: the server may have forgotten what was in them."""
    for name in ("known.json", "removed.json"):
        if (root / name).exists():
            msg = f"{root} has lost the directories of its epochs (000001 and so on): its {name} tells of changes that were in them"
            raise StagingError(msg, hint=_lost_hint(root))


_MIXED_HINT = "one staging directory serves one slot; do not mix the files of two"


def anew(root: Path) -> str:
    """Return the advice to begin another log in ``root`` for its tables, whose masks may be older than those of the log."""
    return (
        f"move everything but masks.json out of {root}, and start run as before: it says if its tables lack changes, and copies"
        " them anew with --on-gap resnapshot"
    )


def _lost_hint(root: Path) -> str:
    return f"restore what is missing from a copy of the directory. Without a copy, {anew(root)}"


def read_chain(root: Path, after_lsn: int = 0) -> Chain:
    return _LISTINGS.call(lambda: _chain(root, after_lsn), _BrokenChainError)


def former_system_ids(epochs: Iterable[Epoch]) -> set[str]:
    """Return the system ids that the log's server had before pg_upgrade."""
    return {epoch.former_system_id for epoch in epochs if epoch.former_system_id is not None}


def has_log(root: Path) -> bool:
    """Tell whether a launcher has begun a log in the directory, which may not exist. Raises StagingError if the log is damaged."""
    if not root.is_dir():
        return False
    if list_epochs(root):
        return True
    _check_unused(root)
    return False


def log_end(root: Path | str) -> Position | None:
    """Return the end of the last sealed segment; None for a log that has not begun."""
    return read_chain(Path(root))[2]


def list_segments(root: Path | str, after: Position | None = None) -> list[Segment]:
    """Return the log's segments in order; with ``after``, only the segments that have a transaction beyond it.

    Raises StagingError for a gap, an overlap or a missing segment. Raises it also if ``after`` is not a position of this log: its
    segments were removed, it is beyond the end, or a launcher wrote it after another one had replaced it. Does not look for gaps
    and overlaps before ``after``.
    """
    root = Path(root)
    return segments_after(root, read_chain(root, 0 if after is None else after.lsn), after)


def segments_after(root: Path, chain: Chain, after: Position | None) -> list[Segment]:
    epochs, segments, end = chain
    if after is None or after == (0, 0):
        return segments
    if end is None:
        msg = f"{root}: position {after} is not in this log, which is empty"
        raise StagingError(msg, hint=_FOREIGN_HINT)
    first_lsn = _check_known(root, after, epochs, end)
    return [segment for segment in segments if segment.end_lsn > after.lsn and segment.start_lsn >= first_lsn]


_FOREIGN_HINT = "the reader belongs to another staging directory, or this directory was replaced; give each its own warehouse"


def begin_lsn(root: Path, epochs: list[Epoch]) -> int:
    """Return the lowest LSN from which the log has all segments: a reader that is before it lacks some for good."""
    first, removed = epochs[0], removed_position(root)
    begin = first.start_lsn
    if removed is not None and removed.lsn > begin:
        begin = removed.lsn
    elif first.gap is not None:
        # A new log for tables that have lost theirs, or all epochs before the gap were removed. In those, the account of the log
        # (known.json) may have gone on after the last segment, without changes.
        begin = first.gap.after_lsn if removed is None else min(first.gap.after_lsn, removed.lsn)
    return begin


def passing_lsn(epochs: Iterable[Epoch], lsn: int, begin: int) -> int | None:
    """Return where a reader at ``lsn``, before ``begin``, the beginning of the log, goes on. None if it can't.

    It can if all that it lacks is in a gap that the log names. Then it goes on after the gap: it has no use for what is before.
    """
    starts = (each.start_lsn for each in epochs if each.gap is not None and each.gap.after_lsn <= lsn and each.start_lsn >= begin)
    return next(starts, None)


def _check_known(root: Path, after: Position, epochs: list[Epoch], end: Position) -> int:
    """Return the LSN of the first segment to read: 0, unless there is a gap (see `passing_lsn`).

    Raises StagingError unless ``after`` is a position of this log and all segments after it exist.
    """
    begin = begin_lsn(root, epochs)
    first_lsn = passing_lsn(epochs, after.lsn, begin) if after.lsn < begin else 0
    if first_lsn is None:
        msg = f"{root}: the segments from {after} to {format_lsn(begin)} do not exist any more"
        raise StagingError(msg, hint="they were removed, or the position is of another staging directory")
    if after.lsn > end.lsn or after.epoch > end.epoch or left_lsn(epochs, after) is not None:
        msg = f"{root}: position {after} is not in this log, which ends at {end}"
        raise StagingError(msg, hint=_FOREIGN_HINT)
    return first_lsn

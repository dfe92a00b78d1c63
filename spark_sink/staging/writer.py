"""The staging log, as the one launcher that appends to it sees it: lock, epoch, open segment, sealing. I/O, no policy.

What holds after a crash at any point, and why:

- One launcher at a time: `lock` is held (flock, which ends with the process). Should two run all the same, because the
  file system does not keep locks, then the later one's mkdir fences the earlier one off. The earlier one renames a
  segment into place, then looks for a newer epoch, and only then confirms; the later one makes its directory, then reads
  where the log ends. Whichever comes first, what was confirmed is in the log, and nothing is in it twice.
- A sealed segment is whole: its bytes are durable before it has its name, its name is durable before `seal` returns,
  and only then may anything be confirmed.
- After an error of write, fsync or rename the file is suspect, and the kernel reports such an error only once: nothing
  is tried again, every later call fails, nothing more is confirmed.
- What is `.open` is not part of the log. The next launcher deletes it, and the server sends it again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from cdcpipe.lsn import format_lsn
from cdcpipe.pipe.framing import encode_header
from spark_sink.files.local import TEMPORARY_PREFIX, fsync_directory, write_json
from spark_sink.staging.filler import COMMIT, MESSAGE_HEAD, Cut, Discard, Write
from spark_sink.staging.lock import lock, make_root, try_file_system
from spark_sink.staging.log import (
    FORMAT,
    Epoch,
    Segment,
    StagingError,
    epoch_directory,
    epoch_numbers,
    list_epochs,
    list_segments,
    log_end,
    open_name,
    remove_epoch,
    segment_name,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from numpy.typing import NDArray

    from spark_sink.staging.filler import Operation

    Array = NDArray[Any]

__all__ = ["Boundaries", "Failpoint", "Sealing", "StagingWriter"]

_logger = logging.getLogger(__name__)

_WRITE_BYTES = 1 << 20
"""Small pieces are gathered up to this size before they go to the file."""


_MAX_KNOWN_BOUNDARIES = 3 << 18
"""A segment of more records than this, one very large transaction, is left to its readers to index: that takes memory,
and the segment, which is mapped, counts as well."""


class Failpoint(StrEnum):
    """Where a crash or an error of the disk can be put in a test; the hook is called with each as it is passed."""

    EPOCH_MADE = "epoch directory made, not described"
    EPOCH_DESCRIBED = "epoch.json is durable"
    BEFORE_WRITE = "before a write"
    AFTER_WRITE = "after a write"
    BEFORE_FSYNC = "before the fsync of the segment"
    AFTER_FSYNC = "after the fsync of the segment"
    AFTER_RENAME = "after the rename"
    AFTER_DIRECTORY_FSYNC = "after the fsync of the directory"
    BEFORE_FEEDBACK = "before F"
    AFTER_FEEDBACK = "after F"


@dataclass(slots=True)
class Boundaries:
    """Where the records of a segment begin and end; not ``is_complete`` if they are too many to be remembered."""

    is_complete: bool = True
    parts: list[tuple[int, Array, Array]] = field(default_factory=list)
    """What to add to each, starts, ends."""
    count: int = 0

    def add(self, write: Write, pos: int) -> None:
        """Remember the records of a write that begins at ``pos`` of the file."""
        if not self.is_complete:
            return
        self.count += len(write.starts)
        if self.count > _MAX_KNOWN_BOUNDARIES:
            self.is_complete = False
            self.parts.clear()
        else:
            self.parts.append((pos - write.base, write.starts, write.ends))

    def arrays(self) -> tuple[Array, Array]:
        """Return where each record begins in the file, its header not counted, and where it ends; int64."""
        none = np.zeros(0, np.int64)
        starts = [starts + offset for offset, starts, _ in self.parts]
        ends = [ends + offset for offset, _, ends in self.parts]
        return np.concatenate([none, *starts]), np.concatenate([none, *ends])


@dataclass(frozen=True, slots=True)
class Sealing:
    """A segment that has all its bytes and is to be sealed. May be handed to another thread."""

    fd: int
    path: Path
    cut: Cut
    boundaries: Boundaries


class StagingWriter:
    """Holds the lock of a staging directory, and appends to its log.

    ``apply`` and ``seal`` may be called from two threads, each from one; segments are sealed in the order of their cuts.
    """

    def __init__(self, root: Path | str, *, slot: str, hook: Callable[[Failpoint], None] | None = None) -> None:
        """Lock the directory, making it if need be, and check the log in it; raise StagingError if either fails."""
        self.root = Path(root)
        self._hook = hook
        self._failure: str | None = None
        self._epoch: Epoch | None = None
        self._directory = self.root
        self._fd = -1  # the open segment's, -1 while it has no file
        self._path = self.root
        self._buffer: list[bytes] = []
        self._buffered = 0
        self._pos = 0
        self._boundaries = Boundaries()
        self._start_lsn = 0
        make_root(self.root)
        self._lock_fd = lock(self.root)
        try:
            try_file_system(self.root)
            self._check_not_ended()
            self._check_slot(slot)
            self._check_log()
        except BaseException:
            os.close(self._lock_fd)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _type: type[BaseException] | None, _value: BaseException | None, _tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the lock. What is not sealed stays as an ``.open`` file, which the next launcher deletes."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    @property
    def end_lsn(self) -> int:
        """Where the open segment begins: the end of the log once all cuts are sealed."""
        return self._start_lsn

    @property
    def open_size(self) -> int:
        """How many bytes the open segment has."""
        return self._pos + self._buffered

    # --- beginning ---

    def end_for_good(self, reason: str) -> None:
        """Let no launcher append to this log any more: what the server sends from now on does not continue it."""
        with self._translated(self.root):
            write_json(self.root / _ENDED, {"reason": reason})

    def _check_not_ended(self) -> None:
        path = self.root / _ENDED
        if path.exists():
            reason = json.loads(path.read_bytes())["reason"]
            msg = f"nothing is added to {self.root} any more ({path.name}): {reason}"
            raise StagingError(msg, hint=_ANEW_HINT)

    def _check_slot(self, slot: str) -> None:
        epochs = list_epochs(self.root)
        if epochs and epochs[-1].slot != slot:
            msg = f"{self.root} holds the log of slot {epochs[-1].slot!r}, not of {slot!r}"
            raise StagingError(msg, hint=_OTHER_HINT)

    def _check_log(self) -> None:
        """See that the log is a chain, and that each segment ends as its name says."""
        for segment in list_segments(self.root):
            _check_end(segment)

    def begin_epoch(
        self,
        *,
        system_id: str,
        timeline: int,
        database: str,
        slot: str,
        publications: tuple[str, ...],
        options: dict[str, str],
        first_lsn: int,
    ) -> Epoch:
        """Make the next epoch, which begins where the log ends, or at ``first_lsn`` if there is no log yet.

        Raise StagingError if the log is another server's, timeline's, database's or slot's.
        """
        epochs = list_epochs(self.root)
        if epochs:
            self._check_identity(epochs[-1], system_id, timeline, database, slot)
        number = max(epoch_numbers(self.root), default=0) + 1
        directory = epoch_directory(self.root, number)
        with self._translated(directory):
            directory.mkdir(mode=0o700)
            fsync_directory(self.root)
            self._pass(Failpoint.EPOCH_MADE)
            # Only now: what a launcher that we replace seals from here on, it does not confirm.
            end = log_end(self.root)
            epoch = Epoch(
                number=number,
                system_id=system_id,
                timeline=timeline,
                database=database,
                slot=slot,
                publications=publications,
                options=options,
                start_lsn=int(first_lsn) if end is None else end.lsn,
            )
            _write_epoch(directory / "epoch.json", epoch)
            self._pass(Failpoint.EPOCH_DESCRIBED)
        self._epoch, self._directory, self._start_lsn = epoch, directory, epoch.start_lsn
        self._clean()
        return epoch

    def _check_identity(self, epoch: Epoch, system_id: str, timeline: int, database: str, slot: str) -> None:
        if epoch.system_id != system_id:
            msg = f"{self.root} holds the log of the server with system id {epoch.system_id}; this one has {system_id}"
            raise StagingError(msg, hint=_OTHER_HINT)
        if epoch.timeline != timeline:
            msg = (
                f"the server is on timeline {timeline}, {self.root} was written on timeline {epoch.timeline}: "
                "a standby was promoted or a backup restored since. WAL positions do not go on over that: changes that "
                "are in the log may not exist any more on the server, and others may be missing"
            )
            raise StagingError(msg, hint=_ANEW_HINT)
        if epoch.database != database or epoch.slot != slot:
            msg = (
                f"{self.root} holds the log of slot {epoch.slot!r} in database {epoch.database!r}, not of {slot!r} in {database!r}"
            )
            raise StagingError(msg, hint=_OTHER_HINT)

    def _clean(self) -> None:
        """Delete what earlier launchers left: open segments, half-written files, epochs in which nothing was sealed."""
        assert self._epoch is not None
        for path in self.root.glob(f"{TEMPORARY_PREFIX}*"):
            path.unlink(missing_ok=True)
        for number in epoch_numbers(self.root):
            if number < self._epoch.number:
                names = [path.name for path in epoch_directory(self.root, number).iterdir()]
                if not any(name.endswith(".cdc") for name in names):
                    remove_epoch(self.root, number)
                for name in names:
                    if name.endswith(".open") or name.startswith(TEMPORARY_PREFIX):
                        (epoch_directory(self.root, number) / name).unlink(missing_ok=True)

    # --- filling ---

    def apply(self, operation: Operation) -> Sealing | None:
        """Do what the filler says; a cut gives what is to be sealed."""
        if isinstance(operation, Write):
            self._write(operation)
            return None
        if isinstance(operation, Cut):
            return self._cut(operation)
        assert isinstance(operation, Discard)
        self.discard()
        return None

    def _write(self, write: Write) -> None:
        self._boundaries.add(write, self.open_size)
        self._buffer.append(write.data)
        self._buffered += len(write.data)
        if self._buffered >= _WRITE_BYTES:
            self._flush()

    def _flush(self) -> None:
        with self._translated(self._directory):
            if self._fd < 0:
                self._path = self._directory / open_name(self._start_lsn)
                self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            self._pass(Failpoint.BEFORE_WRITE)
            data = memoryview(b"".join(self._buffer))
            self._buffer.clear()
            self._buffered = 0
            while data:
                written = os.write(self._fd, data)
                self._pos += written
                data = data[written:]
            self._pass(Failpoint.AFTER_WRITE)

    def _cut(self, cut: Cut) -> Sealing:
        if self._buffer:
            self._flush()
        if (self._start_lsn, self.open_size) != (cut.start_lsn, cut.size):
            msg = f"{self._path} has {self.open_size} bytes, {cut.size} were expected"
            raise StagingError(msg, hint="please report this: it is a mistake in cdcpipe")
        sealing = Sealing(self._fd, self._path, cut, self._boundaries)
        self._start_lsn = cut.end_lsn
        self._forget()
        return sealing

    def abandon(self, sealing: Sealing) -> None:
        """Close a segment that is not to be sealed because one before it could not be."""
        os.close(sealing.fd)

    def discard(self) -> None:
        """Delete the open segment; the next begins where it began."""
        if self._fd >= 0:
            with self._translated(self._path):
                os.close(self._fd)
                self._path.unlink(missing_ok=True)
        self._forget()

    def _forget(self) -> None:
        self._fd, self._pos = -1, 0
        self._buffer.clear()
        self._buffered = 0
        self._boundaries = Boundaries()

    # --- sealing ---

    def seal(self, sealing: Sealing) -> Segment:
        """Make a segment durable and part of the log. When this returns, and only then, its end may be confirmed."""
        assert self._epoch is not None
        cut = sealing.cut
        path = self._directory / segment_name(cut.start_lsn, cut.end_lsn)
        with self._translated(sealing.path):
            try:
                self._pass(Failpoint.BEFORE_FSYNC)
                os.fsync(sealing.fd)
            finally:
                os.close(sealing.fd)
            self._pass(Failpoint.AFTER_FSYNC)
            self._check_fence()
            sealing.path.rename(path)
            self._pass(Failpoint.AFTER_RENAME)
            fsync_directory(self._directory)
            self._pass(Failpoint.AFTER_DIRECTORY_FSYNC)
            self._check_fence()
        return Segment(self._epoch.number, cut.start_lsn, cut.end_lsn, path)

    def _check_fence(self) -> None:
        assert self._epoch is not None
        newest = max(epoch_numbers(self.root))
        if newest != self._epoch.number:
            msg = f"{self.root}: another launcher has taken over (epoch {newest}; this is {self._epoch.number})"
            self._failure = msg
            raise StagingError(msg, hint="run one launcher at a time; nothing is lost")

    def _pass(self, failpoint: Failpoint) -> None:
        if self._hook is not None:
            self._hook(failpoint)

    @contextlib.contextmanager
    def _translated(self, path: Path) -> Iterator[None]:
        """Turn an error of the file system into the last one: from then on nothing works."""
        if self._failure is not None:
            msg = f"writing to {self.root} has failed before: {self._failure}"
            raise StagingError(msg, hint=_DISK_HINT)
        try:
            yield
        except OSError as ex:
            msg = f"cannot write {path}: {ex.strerror or ex}"
            self._failure = msg
            raise StagingError(msg, hint=_DISK_HINT) from ex


_ENDED = "ended.json"
_OTHER_HINT = "give each slot a --staging directory (and a warehouse) of its own, or connect to where this one comes from"
_ANEW_HINT = "start anew: another --staging directory, another warehouse, another slot"
_DISK_HINT = "make room or repair the disk, then start again; nothing was confirmed that is not sealed, so nothing is lost"


def _write_epoch(path: Path, epoch: Epoch) -> None:
    write_json(
        path,
        {
            "format": FORMAT,
            "system_id": epoch.system_id,
            "timeline": epoch.timeline,
            "database": epoch.database,
            "slot": epoch.slot,
            "publications": list(epoch.publications),
            "options": epoch.options,
            "start_lsn": format_lsn(epoch.start_lsn),
        },
    )


def _ends_with_message(fd: int, size: int, end_lsn: int) -> bool:
    """Whether the last record is the logical message outside of transactions that has this LSN."""
    if not size:
        return False
    head = MESSAGE_HEAD.pack(b"M", 0, end_lsn)
    with mmap.mmap(fd, size, access=mmap.ACCESS_READ) as content:
        pos = content.rfind(head)
        while pos >= 0:
            header = encode_header(end_lsn, size - pos)
            if content[max(0, pos - len(header)) : pos] == header:
                return True
            pos = content.rfind(head, 0, pos + len(head) - 1)  # that was somewhere in its content
    return False


def _check_end(segment: Segment) -> None:
    """See that a segment's last record is the Commit, or the message, that its name promises: one read shows a cut file."""
    with open(segment.path, "rb", buffering=0) as stream:
        size = os.fstat(stream.fileno()).st_size
        tail = os.pread(stream.fileno(), COMMIT.size, max(0, size - COMMIT.size))
        if len(tail) == COMMIT.size:
            kind, _, _, end_lsn, _ = COMMIT.unpack(tail)
            if kind == b"C" and end_lsn == segment.end_lsn:
                return
        if _ends_with_message(stream.fileno(), size, segment.end_lsn):
            return
    msg = f"{segment.path} is damaged: it does not end with the transaction that ends at {format_lsn(segment.end_lsn)}"
    raise StagingError(msg, hint="the file was cut, changed or renamed; restore it from a copy")

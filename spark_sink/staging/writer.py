"""Appends to the staging log, for the one launcher that holds its lock: begins an epoch, fills and seals segments. No policy.

These rules hold after a crash at any point:

- Only one launcher writes at a time, because it holds `lock` (flock, which the kernel releases with the process). If the file
  system does not keep locks and two launchers run, the later one's epoch directory fences off the earlier one. The earlier one
  renames a segment into place, then looks for a newer epoch, and only then confirms. The later one creates its directory, then
  reads the end of the log. In either order, everything confirmed is in the log, and nothing is in it twice.
- A sealed segment is complete. Its bytes are durable before it gets its name, the name is durable before `seal` returns, and only
  then may the launcher confirm anything. A new launcher makes the name of the log's last segment durable before its epoch begins.
- After an error of write, fsync or rename, the file may be damaged, and the kernel reports such an error only once. So nothing is
  tried again, every later call fails, and nothing more is confirmed. After a failed write the open segment is deleted.
- An ``.open`` file is not part of the log. The next launcher deletes it, and the server sends its contents again.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import secrets
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from cdcpipe.lsn import format_lsn
from cdcpipe.pipe.framing import encode_header
from spark_sink.files.local import fsync_directory, named, write_json
from spark_sink.files.system_hints import THEN, hint_of, is_full
from spark_sink.staging.filler import COMMIT, MESSAGE_HEAD, Cut, Discard, Write
from spark_sink.staging.leftovers import remove_empty_epochs, remove_leftovers
from spark_sink.staging.lock import StagingLock, try_file_system
from spark_sink.staging.log import (
    FORMAT,
    Epoch,
    Segment,
    StagingError,
    epoch_directory,
    epoch_numbers,
    list_epochs,
    list_segments,
    open_name,
    read_chain,
    segment_name,
)
from spark_sink.staging.readers import remove_consumed
from spark_sink.staging.same_source import OTHER_HINT, check_source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from numpy.typing import NDArray

    from spark_sink.staging.filler import Operation
    from spark_sink.staging.readers import Retention

    Array = NDArray[Any]

__all__ = ["Boundaries", "Failpoint", "Sealing", "StagingWriter"]

_logger = logging.getLogger(__name__)

_WRITE_BYTES = 1 << 20
"""Small writes are collected up to this size before they go to the file."""


_MAX_KNOWN_BOUNDARIES = 3 << 18
"""The writer builds no index for a segment with more records than this (one very large transaction): its readers do.

Building takes memory, and the mapped segment counts as well.
"""


class Failpoint(StrEnum):
    """A point at which a test can cause a crash or a disk error. The writer calls the hook at each point that it passes."""

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
    """Where the records of a segment begin and end. ``is_complete`` is False if there are too many to remember."""

    is_complete: bool = True
    parts: list[tuple[int, Array, Array]] = field(default_factory=list)
    """For each write: the offset to add, the starts, the ends."""
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
        """Return where each record begins in the file (after its header) and where it ends; int64."""
        none = np.zeros(0, np.int64)
        starts = [starts + offset for offset, starts, _ in self.parts]
        ends = [ends + offset for offset, _, ends in self.parts]
        return np.concatenate([none, *starts]), np.concatenate([none, *ends])


@dataclass(frozen=True, slots=True)
class Sealing:
    """A segment with all its bytes, ready to be sealed. It may be handed to another thread."""

    fd: int
    path: Path
    cut: Cut
    boundaries: Boundaries


class StagingWriter:
    """Holds the lock of a staging directory, and appends to its log.

    One thread calls ``apply`` and one thread calls ``seal``; they may be different threads. Seal segments in the order of their
    cuts.
    """

    def __init__(
        self,
        root: Path | str,
        *,
        slot: str,
        retention: Retention | None = None,
        hook: Callable[[Failpoint], None] | None = None,
        lock: StagingLock | None = None,
    ) -> None:
        """Create the directory if it does not exist, lock it, and check its log. Raises StagingError if one of these fails.

        A caller that holds the lock already passes it as ``lock``, and releases it itself.

        If the disk is full, make room first: delete the leftovers of earlier launchers. If this is not enough, remove segments that
        all readers have read, except those that ``retention`` keeps.
        """
        self.root = Path(root)
        self._hook = hook
        self._failure: str | None = None
        self._epoch: Epoch | None = None
        self._directory = self.root
        self._fd = -1  # of the open segment; -1 while it has no file
        self._path = self.root
        self._buffer: list[bytes] = []
        self._buffered = 0
        self._pos = 0
        self._boundaries = Boundaries()
        self._start_lsn = 0
        self._owns_lock = lock is None
        self._lock = StagingLock(self.root) if lock is None else lock
        try:
            self._check_slot(slot)
            self._try_file_system(retention)
            self._check_log()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _type: type[BaseException] | None, _value: BaseException | None, _tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock that the writer has taken. The open segment stays as an ``.open`` file: the next launcher deletes it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._owns_lock:
            self._lock.close()
        else:
            self._lock.end_landing()

    @property
    def end_lsn(self) -> int:
        """The start of the open segment. It is the end of the log once all cuts are sealed."""
        return self._start_lsn

    @property
    def open_size(self) -> int:
        """The size of the open segment in bytes."""
        return self._pos + self._buffered

    # --- beginning ---

    def _check_slot(self, slot: str) -> None:
        epochs = list_epochs(self.root)
        if epochs and epochs[-1].slot != slot:
            msg = f"{self.root} has the log of slot {epochs[-1].slot!r}, not of {slot!r}"
            raise StagingError(msg, hint=OTHER_HINT)

    def _try_file_system(self, retention: Retention | None) -> None:
        for make_room in (remove_leftovers, lambda root: remove_consumed(root, retention)):
            try:
                try_file_system(self.root)
                break
            except StagingError as ex:
                if not is_full(ex):
                    raise
            make_room(self.root)
        else:
            try_file_system(self.root)
        with self._translated(self.root / "lock"):
            self._lock.sign()  # again: a full disk may have had no room for this, either

    def _check_log(self) -> None:
        """Check that the log is a chain, and that each segment ends at the LSN in its name."""
        for segment in list_segments(self.root):
            _check_end(segment)

    def begin_epoch(self, wanted: Epoch) -> Epoch:
        """Create the next epoch of the log, as ``wanted``, and return it with what the writer has decided.

        - The number is ``wanted.number`` or more.
        - The epoch begins at the end of the log. It begins at ``wanted.start_lsn`` if there is no log yet, or with a gap.
        - The token is a new one.
        - It names the publications of the epoch before that it leaves out.

        Raises OtherSourceError if the log belongs to another server, database or slot, or is on a newer timeline. Another server
        may go on with the log if ``wanted.former_system_id`` is given.
        """
        epochs = list_epochs(self.root)
        if epochs:
            is_accepted = wanted.former_system_id is not None
            check_source(
                self.root, epochs[-1], wanted.system_id, wanted.timeline, wanted.database, wanted.slot, is_accepted=is_accepted
            )
        number = max([*epoch_numbers(self.root), wanted.number - 1]) + 1
        directory = epoch_directory(self.root, number)
        with self._translated(directory):
            directory.mkdir(mode=0o700)
            fsync_directory(self.root)
            self._pass(Failpoint.EPOCH_MADE)
            # Read the end only now: a launcher that this one replaces seals segments after this point, but does not confirm them.
            _, segments, end = read_chain(self.root)
            if segments:  # its launcher may have been killed before the name was durable
                fsync_directory(segments[-1].path.parent)
            start_lsn = wanted.start_lsn if end is None else end.lsn if wanted.gap is None else max(end.lsn, wanted.start_lsn)
            former = epochs[-1].publications if epochs else ()
            left_out = tuple(name for name in former if name not in wanted.publications)
            epoch = replace(wanted, number=number, start_lsn=start_lsn, left_out=left_out, token=secrets.token_hex(8))
            _write_epoch(directory / "epoch.json", epoch)
            self._pass(Failpoint.EPOCH_DESCRIBED)
        self._epoch, self._directory, self._start_lsn = epoch, directory, epoch.start_lsn
        remove_empty_epochs(self.root, epoch.number)
        remove_leftovers(self.root, epoch.number)
        return epoch

    # --- filling ---

    def apply(self, operation: Operation) -> Sealing | None:
        """Carry out an operation of the filler. For a cut it returns the segment to be sealed."""
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
            try:
                self._pass(Failpoint.BEFORE_WRITE)
                data = memoryview(b"".join(self._buffer))
                self._buffer.clear()
                self._buffered = 0
                while data:
                    written = os.write(self._fd, data)
                    self._pos += written
                    data = data[written:]
                self._pass(Failpoint.AFTER_WRITE)
            except OSError:
                self._give_back()
                raise

    def _give_back(self) -> None:
        """Delete the open segment after a failed write: on a full disk it has the last room, and the next start needs a little."""
        os.close(self._fd)
        self._fd = -1
        with contextlib.suppress(OSError):  # the next launcher deletes it
            self._path.unlink()

    def _cut(self, cut: Cut) -> Sealing:
        if self._buffer:
            self._flush()
        if (self._start_lsn, self.open_size) != (cut.start_lsn, cut.size):
            msg = f"{self._path} has {self.open_size} bytes instead of {cut.size}"
            raise StagingError(msg, hint="please report this bug in cdcpipe")
        sealing = Sealing(self._fd, self._path, cut, self._boundaries)
        self._start_lsn = cut.end_lsn
        self._forget()
        return sealing

    def abandon(self, sealing: Sealing) -> None:
        """Close a segment without sealing it, because an earlier one could not be sealed."""
        os.close(sealing.fd)

    def discard(self) -> None:
        """Delete the open segment. The next one begins at the same LSN."""
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
        """Make a segment durable and part of the log. Its end may be confirmed only after this has returned."""
        assert self._epoch is not None
        cut = sealing.cut
        path = self._directory / segment_name(cut.start_lsn, cut.end_lsn)
        with self._translated(sealing.path):
            try:
                self._pass(Failpoint.BEFORE_FSYNC)
                os.fsync(sealing.fd)
                self._pass(Failpoint.AFTER_FSYNC)
                self._check_fence()
                self._check_same(sealing)
            finally:
                os.close(sealing.fd)
            sealing.path.rename(path)
            self._pass(Failpoint.AFTER_RENAME)
            fsync_directory(self._directory)
            self._pass(Failpoint.AFTER_DIRECTORY_FSYNC)
            self._check_fence()
        return Segment(self._epoch.number, cut.start_lsn, cut.end_lsn, path)

    def _check_fence(self) -> None:
        assert self._epoch is not None
        newest = max(epoch_numbers(self.root) if self.root.is_dir() else [], default=0)
        if newest < self._epoch.number:
            raise FileNotFoundError("what this launcher has written is not there any more")
        if newest > self._epoch.number:
            msg = f"{self.root}: another launcher has taken over (epoch {newest}; this is {self._epoch.number})"
            self._failure = msg
            raise StagingError(msg, hint="run one launcher at a time; nothing is lost")

    def _check_same(self, sealing: Sealing) -> None:
        """Raise StagingError unless the file of this name is the one that was synced: a copy may lack its newest bytes."""
        if not os.path.samestat(os.fstat(sealing.fd), sealing.path.stat()):
            msg = f"{sealing.path} is not the file that this launcher has written: its directory was replaced while it ran"
            self._failure = msg
            raise StagingError(msg, hint=f"stop the launcher before you move, copy or restore its directory; {_NOTHING_LOST}")

    def _pass(self, failpoint: Failpoint) -> None:
        if self._hook is not None:
            self._hook(failpoint)

    @contextlib.contextmanager
    def _translated(self, path: Path) -> Iterator[None]:
        """Turn an error of the file system into a StagingError. After that, every operation of this writer fails."""
        if self._failure is not None:
            msg = f"an earlier write to {self.root} has failed: {self._failure}"
            raise StagingError(msg, hint=f"{_DISK_HINT}; {_NOTHING_LOST}")
        try:
            yield
        except OSError as ex:
            msg = f"cannot write {path}: {ex.strerror or ex}"
            self._failure = msg
            is_gone = isinstance(ex, FileNotFoundError | NotADirectoryError)
            hint = _GONE_HINT if is_gone else f"{hint_of(ex) or _DISK_HINT}; {_NOTHING_LOST}"
            raise StagingError(msg, hint=hint) from ex


_DISK_HINT = f"make room or repair the disk; {THEN}"
_NOTHING_LOST = "nothing is lost, because only sealed segments were confirmed"
_GONE_HINT = (
    "it was removed, moved or unmounted while the launcher wrote there: put it back with all that was in it,"
    f" {THEN}; the server does not send again what is in its segments"
)


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
            "token": epoch.token,
            **({"timeline_began": format_lsn(epoch.timeline_began_lsn)} if epoch.timeline_began_lsn else {}),
            **({} if epoch.gap is None else {"gap": epoch.gap.to_json()}),
            **({} if epoch.former_system_id is None else {"former_system_id": epoch.former_system_id}),
            **({"left_out": list(epoch.left_out)} if epoch.left_out else {}),
        },
    )


def _ends_with_message(fd: int, size: int, end_lsn: int) -> bool:
    """Tell whether the last record is a logical message outside of transactions with this LSN."""
    if not size:
        return False
    head = MESSAGE_HEAD.pack(b"M", 0, end_lsn)
    with mmap.mmap(fd, size, access=mmap.ACCESS_READ) as content:
        pos = content.rfind(head)
        while pos >= 0:
            header = encode_header(end_lsn, size - pos)
            if content[max(0, pos - len(header)) : pos] == header:
                return True
            pos = content.rfind(head, 0, pos + len(head) - 1)  # that match was inside the message's content
    return False


def _check_end(segment: Segment) -> None:
    """Raise StagingError unless the last record is the Commit, or the message, that the segment's name promises.

    One read at the end of the file is enough to find a file that was cut.
    """
    with open(segment.path, "rb", buffering=0) as stream, named(segment.path):
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

"""The consumer's ends of the pipe: records go out, commands come in. Only `RecordsOut.drain` waits for the consumer."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import stat
import time
from collections.abc import Callable

from cdcpipe.errors import CommandError, OutputError
from cdcpipe.pipe.commands import CommandReader, Feedback
from cdcpipe.pipe.input import Input
from cdcpipe.pipe.output import Output
from cdcpipe.replication.progress import Progress

__all__ = ["CommandsIn", "RecordsOut"]

log = logging.getLogger(__name__)

DRAIN_S = 1.0
"""How long the consumer may pause while the last records are written."""
DRAIN_SLICE_S = 0.1


class RecordsOut:
    """Writes records to ``fd``, and tells ``progress`` which transactions were written completely.

    With ``auto_feedback`` these transactions count as confirmed, too. With ``check``, records are held until `release`, which calls
    it.
    """

    def __init__(self, fd: int, progress: Progress, *, auto_feedback: bool, check: Callable[[], None] | None = None) -> None:
        self._given_fd = fd
        self._check = check
        self._held: list[tuple[bytes, list[int], bool]] = []
        self._held_bytes = 0
        self._progress = progress
        self._auto_feedback = auto_feedback
        self._output = Output(fd)
        self.is_closed = False
        """Whether the descriptor was closed, so that the reader sees the end of the records."""
        self.bytes = 0
        """How many bytes were queued."""

    @property
    def fd(self) -> int:
        """The descriptor to poll."""
        return self._output.fd

    @property
    def pending_bytes(self) -> int:
        """The number of bytes that wait to be written."""
        return self._output.pending_bytes + self._held_bytes

    def put(self, chunk: bytes, ends: list[int], is_framed: bool) -> None:
        """Queue a chunk, and the ends of the transactions whose last record is in it. For ``is_framed``, see `Output.put`."""
        self.bytes += len(chunk)
        if self._check is None:
            self._output.put(chunk, ends, is_framed=is_framed)
        else:
            self._held.append((chunk, ends, is_framed))
            self._held_bytes += len(chunk)

    def release(self) -> None:
        """Let the records that are held be written. If the check raises an error, drop them, and raise it."""
        if self._check is None or not self._held:
            return
        held, self._held, self._held_bytes = self._held, [], 0
        self._check()
        for chunk, ends, is_framed in held:
            self._output.put(chunk, ends, is_framed=is_framed)

    def write(self) -> None:
        """Write as much as the consumer takes without waiting."""
        self._note_written(self._output.write())

    def _note_written(self, ends: list[int]) -> None:
        if ends:
            self._progress.written(ends)
            if self._auto_feedback:
                self._progress.confirm_written(time.monotonic())

    def confirm(self, lsn: int) -> None:
        """Pass the consumer's feedback on to ``progress``. It may be for a transaction in a chunk that is only partly written."""
        if lsn > self._progress.written_lsn or self._progress.behind is not None:
            self._note_written(self._output.take_written_ends())
        self._progress.feedback(lsn, time.monotonic())

    def drain(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Write the rest. If the consumer stops reading, give up after `DRAIN_S`.

        A slow consumer may take minutes. ``meanwhile`` is called at least every `DRAIN_SLICE_S`.
        """
        if self.is_closed:
            return
        deadline = time.monotonic() + DRAIN_S
        try:
            self.write()
            while self.pending_bytes and time.monotonic() < deadline:
                meanwhile()
                before = self.pending_bytes
                poll = select.poll()
                poll.register(self.fd, select.POLLOUT)
                poll.poll(max(0.0, min(DRAIN_SLICE_S, deadline - time.monotonic())) * 1000)
                self.write()
                if self.pending_bytes < before:
                    deadline = time.monotonic() + DRAIN_S
        except OutputError as ex:
            log.debug("while ending: %s", ex)

    def close_descriptor(self, command_fd: int) -> None:
        """Close the descriptor that the caller gave, too, so that the reader sees the end of the records.

        If it is the socket from which commands come (socat, systemd), only a shutdown of one direction shows this end.
        """
        self._output.close()
        if stat.S_ISSOCK(os.fstat(self._given_fd).st_mode) and os.path.sameopenfile(self._given_fd, command_fd):
            with socket.socket(fileno=os.dup(self._given_fd)) as both, contextlib.suppress(OSError):  # the reader has gone
                both.shutdown(socket.SHUT_WR)
        os.close(self._given_fd)
        self.is_closed = True

    def close(self) -> None:
        """Drop the queued records, and restore the descriptor's blocking mode."""
        self._output.close()


class CommandsIn:
    """Reads commands from ``fd``."""

    def __init__(self, fd: int) -> None:
        self._input = Input(fd)
        self._reader = CommandReader()
        self.is_quit = False
        """Whether the consumer has sent ``q``."""
        self.is_closed = False
        """Whether no more commands can come."""

    @property
    def fd(self) -> int:
        """The descriptor to poll."""
        return self._input.fd

    def read(self, confirm: Callable[[int], None] | None) -> None:
        """Read once, so that a flood of commands holds up nothing else. Pass the highest feedback on to ``confirm``, and the last.

        The last may be for a record whose position is lower than those of earlier records.
        Before a stream it is None. Feedback is dropped then, because nothing was written that it could confirm.
        """
        feedback = last = 0
        try:
            data = self._input.read()
            if data == b"":
                self.is_closed = True
            for command in self._reader.feed(data or b""):
                if isinstance(command, Feedback):
                    last = command.lsn
                    feedback = max(feedback, last)
                else:
                    self.is_quit = True
                    return
        except CommandError:
            self.is_closed = True  # nobody knows what the next ones mean
            raise
        except OSError as ex:
            log.info("stdin can't be read: %s", ex.strerror)
            self.is_closed = True
        finally:
            if feedback and confirm is not None:
                confirm(feedback)
                if last < feedback:
                    confirm(last)

    def close(self) -> None:
        """Close the descriptors that this object opened."""
        self._input.close()

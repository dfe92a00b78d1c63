"""A snapshot that the server holds for us: ``cdcpipe prepare --export-snapshot`` as a subprocess. No pyspark.

    export = ExportedSnapshot(config, lambda: False, directory, hold_s=600.0)
    ...
    export.close()      # done: the server may let it go
    export.leave()      # not done: for so long the next one with this directory goes on with the same snapshot

The subprocess outlives this process, also a killed one, for ``hold_s``: its stdin is a named pipe in the directory, which the next
process opens in our place. ``export.json`` beside it is what it has printed. One process has the directory at a time.
"""

from __future__ import annotations

import json
import logging
import os
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Self

from cdcpipe.errors import CdcpipeError
from cdcpipe.lsn import LSN
from spark_sink.client.failure import error_of
from spark_sink.client.prepare import Prepared, SlotConfig, look_up, prepare_arguments
from spark_sink.client.process import ANSWER_S, Child, unanswered
from spark_sink.files.local import read_json, write_json
from spark_sink.files.lock import hold_alone

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


__all__ = ["ExportedSnapshot", "SnapshotError"]

_logger = logging.getLogger(__name__)

_PURPOSE = "for"

_END_TIMEOUT_S = 10.0
_END_POLL_S = 0.05


class ExportedSnapshot:
    """Takes a snapshot, or goes on with the one that was left in ``directory``, and holds it until ``close`` or ``leave``.

    Makes the slot if that is asked for and it does not exist. Raises what prevents it. ``is_stopping`` is asked while the server
    waits for running transactions; then InterruptedError is raised.

    What was left is gone on with unless ``hold_s`` is 0, if it was taken for the same tables ("schema.name", none: all that are
    published), and these are still what they were.
    """

    def __init__(
        self,
        config: SlotConfig,
        is_stopping: Callable[[], bool],
        directory: Path,
        *,
        tables: Sequence[str] = (),
        hold_s: float = 0.0,
    ) -> None:
        self.is_left_over = False
        """Whether it is one that another process took."""
        self._pipe_path, self._text_path = directory / "hold", directory / "export.json"
        self._config = config
        self._tables = tables
        self._hold_s = hold_s
        self._pipe: int | None = None
        self._child: Child | None = None
        self._resources = ExitStack()
        directory.mkdir(parents=True, exist_ok=True)
        if not self._resources.enter_context(hold_alone(directory / "lock")):
            self._resources.close()
            raise SnapshotError(f"another process holds a snapshot in {directory}", hint="wait for its end")
        try:
            found = self._take_over(is_stopping) or self._export(is_stopping)
            self.prepared = Prepared.of(found)
            try:
                self.name = str(found["snapshot"])
                self.consistent_point = LSN.parse(found["consistent_point"])
                self.is_slot_new = bool(found["slot_created"])
                self.connection = {str(name): str(value) for name, value in found["connection"].items()}
            except (ValueError, KeyError, TypeError, AttributeError) as ex:
                msg = f"cannot read what 'cdcpipe prepare --export-snapshot' printed: {ex!r}"
                raise CdcpipeError(msg, hint="are cdcpipe and cdcpipe-spark of the same version?") from ex
        except BaseException:
            self._end(is_done=not self.is_left_over)
            raise

    # --- one that was left ---

    def _take_over(self, is_stopping: Callable[[], bool]) -> dict[str, Any] | None:
        """Open the pipe of a snapshot that somebody else has taken; None if there is none, or none that is of use."""
        try:
            self._pipe = os.open(self._pipe_path, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # never made, or nobody reads from it
            return None
        found = read_json(self._text_path)
        self.is_left_over = self._hold_s > 0 and found is not None and found.pop(_PURPOSE) == self._purpose()
        if self.is_left_over and self._is_unchanged(Prepared.of(found), is_stopping):
            _logger.info("going on with the snapshot that was left")
            return found
        _logger.info("the snapshot that was left was taken for something else")
        self.is_left_over = False
        self._release()
        return None

    def _purpose(self) -> list[Any]:
        """Return what a snapshot is for; not how one gets to the server, which may have a password in it."""
        return [self._config.slot, list(self._config.publications), list(self._tables)]

    def _is_unchanged(self, then: Prepared, is_stopping: Callable[[], bool]) -> bool:
        """Tell whether server and tables are what they were, and the snapshot is still held."""
        return self._described(then) == self._described(look_up(self._config, is_stopping)) and self._say(b"\n")

    def _described(self, prepared: Prepared) -> list[Any]:
        """Return what must not have changed meanwhile."""
        tables = [each for each in prepared.tables if not self._tables or f"{each['schema']}.{each['name']}" in self._tables]
        return [prepared.system_id, prepared.timeline, prepared.database, tables]

    # --- a new one ---

    def _export(self, is_stopping: Callable[[], bool]) -> dict[str, Any]:
        """Let the server export a snapshot, and return what is printed then."""
        config = self._config
        arguments = [*prepare_arguments(config), "--export-snapshot", "--linger", f"{self._hold_s:g}"]
        for table in self._tables or ("*",):
            arguments += ["--check-select", table]
        if config.create_slot:
            arguments.append("-c")
            for table in config.tables:
                arguments += ["--table", table]
        self._text_path.unlink(missing_ok=True)
        self._pipe_path.unlink(missing_ok=True)
        os.mkfifo(self._pipe_path, 0o600)
        # To be opened for writing, it has to be open for reading.
        reader = os.open(self._pipe_path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            self._pipe = os.open(self._pipe_path, os.O_WRONLY | os.O_NONBLOCK)
            os.set_blocking(reader, True)
            self._child = Child(arguments, command=config.command, stdin=reader, outlives_us=self._hold_s > 0)
        finally:
            os.close(reader)
        try:
            text = self._read(self._child, is_stopping)
        except BaseException:
            self._child.end()  # it does not read its stdin yet
            raise
        Prepared.parse(text)
        found: dict[str, Any] = json.loads(text)
        write_json(self._text_path, found | {_PURPOSE: self._purpose()})
        return found

    def _read(self, child: Child, is_stopping: Callable[[], bool]) -> bytes:
        """Read the JSON object that it prints before it waits; raise what it says if it ends instead."""
        deadline = time.monotonic() + ANSWER_S
        text = b""
        while not text.endswith(b"}\n"):
            try:
                data = child.read(deadline - time.monotonic(), is_stopping)
            except TimeoutError:
                raise error_of(unanswered("prepare", ANSWER_S)) from None
            if not data:
                raise error_of(child.failure())
            text += data
        return text

    # --- while it is held, and then ---

    def check(self) -> None:
        """Raise the error with which it has ended, if it has."""
        if self._child is not None:
            if self._child.code is not None:
                raise error_of(self._child.failure())
        elif not self._say(b"\n"):
            raise SnapshotError("the snapshot that was gone on with has ended", hint="start again: what is done stays")

    def close(self) -> None:
        """Let the snapshot go."""
        self._end(is_done=True)

    def leave(self) -> None:
        """End without letting the snapshot go: for a while, somebody may go on with it."""
        is_held = self._hold_s > 0 and self._pipe is not None and self._say(b"\n")
        if is_held:
            held = "the server holds the snapshot for another %.0f s: what is started again until then goes on with it"
            _logger.warning(held, self._hold_s)
        self._end(is_done=not is_held)

    def _end(self, *, is_done: bool) -> None:
        if self._pipe is not None:
            if is_done:
                self._release()
            else:
                os.close(self._pipe)
                self._pipe = None
        if self._child is not None:
            self._child.close()
            self._child = None
        self._resources.close()

    def _release(self) -> None:
        """Tell whoever holds it to let it go, and wait for that."""
        assert self._pipe is not None
        self._say(b"q\n")
        self._text_path.unlink(missing_ok=True)
        if self._child is not None:
            if not self._child.wait(_END_TIMEOUT_S):
                self._child.end()
        else:
            ends_at = time.monotonic() + _END_TIMEOUT_S
            while self._say(b"\n") and time.monotonic() < ends_at:
                time.sleep(_END_POLL_S)
        os.close(self._pipe)
        self._pipe = None
        self._pipe_path.unlink(missing_ok=True)

    def _say(self, text: bytes) -> bool:
        """Write to whoever holds it; False if nobody does any more."""
        assert self._pipe is not None
        try:
            os.write(self._pipe, text)
        except BrokenPipeError:
            return False
        except BlockingIOError:  # full: it has not yet read
            return True
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SnapshotError(CdcpipeError):
    """A snapshot could not be taken or read."""

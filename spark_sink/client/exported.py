"""A snapshot that the server holds while tables are copied: ``cdcpipe prepare --export-snapshot`` as a subprocess. No pyspark.

    export = ExportedSnapshot(config, lambda: False, directory, hold_s=600.0)
    ...
    export.close()      # the copy is done: the server drops the snapshot
    export.leave()      # the copy is not done: within 600 s another process can continue with the same snapshot

The subprocess keeps the snapshot for ``hold_s`` seconds after this process has ended, even if this process was killed. A service
manager that ends a whole service (systemd), or the end of a container, ends the subprocess, too. Its stdin
is a named pipe in the directory: the next process opens this pipe and so takes over the subprocess. The file ``export.json``
beside the pipe contains what the subprocess printed. Only one process at a time uses the directory.
"""

from __future__ import annotations

import json
import logging
import os
import time
from contextlib import ExitStack, suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Self

from cdcpipe.errors import CdcpipeError, LostSlotError, SlotDoesNotExistError
from cdcpipe.lsn import LSN
from spark_sink.client.failure import error_of
from spark_sink.client.keyless import table_name
from spark_sink.client.prepare import Prepared, SlotOptions, creation_arguments, look_up, prepare_arguments
from spark_sink.client.process import ANSWER_S, Child, is_report, reading, unanswered
from spark_sink.files.local import read_json, write_json
from spark_sink.files.lock import hold_alone

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


__all__ = ["STOPPED", "ExportedSnapshot", "SnapshotError", "drop_left"]

_logger = logging.getLogger(__name__)

STOPPED: Final = "the snapshot was stopped before its end"
_PURPOSE = "for"
_LAYOUT: Final = 2
"""That of ``export.json``. No run continues with what an earlier version has written: it may lack a field."""
_PIPE, _TEXT = "hold", "export.json"
_DROP = b"q\n"

_ADDRESS: Final = ("host", "hostaddr", "port")
"""The parameters of a connection that name the server. The former ones may not work with the other parameters of this process: a
certificate has one name of its server. The new ones may lead to another server of the same cluster, which has no such snapshot.
"""

_LAST_LINE = b"\n}\n"
"""The end of the object that the subprocess prints. It is indented, so the objects in it do not end at the beginning of a line."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)

_END_TIMEOUT_S = 10.0
_END_POLL_S = 0.05


class ExportedSnapshot:
    """Holds a snapshot until ``close`` or ``leave``: a new one, or the one that an earlier process left in ``directory``.

    Creates the slot if the configuration says so and the slot does not exist. While the server waits for running transactions, the
    constructor asks ``is_stopping``, and raises InterruptedError when the answer is True.

    It continues with an earlier snapshot only if ``hold_s`` is not 0, if that snapshot was taken for the same ``tables``
    ("schema.name"; empty for all published tables), if these tables have not changed their definition since, if the slot is still
    there, and if this process reaches the server by the same host and port. `connection` has the parameters of this process.
    ``on_held`` is called as soon as this process alone holds the directory, before anything is asked of the server.
    """

    def __init__(
        self,
        config: SlotOptions,
        is_stopping: Callable[[], bool],
        directory: Path,
        *,
        tables: Sequence[str] = (),
        hold_s: float = 0.0,
        on_held: Callable[[], None] = lambda: None,
    ) -> None:
        self.is_left_over = False
        """Whether another process took this snapshot."""
        self._pipe_path, self._text_path = directory / _PIPE, directory / _TEXT
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
            on_held()
            found = self._take_over(is_stopping) or self._export(is_stopping)
            self.prepared = Prepared.of(found)
            self.prepared.check_left_out(config)
            with reading("prepare --export-snapshot"):
                self.name = str(found["snapshot"])
                self.consistent_point = LSN.parse(found["consistent_point"])
                self.time_us = (datetime.fromisoformat(found["snapshot_time"]) - _EPOCH) // _MICROSECOND
                """The server's time at the snapshot's position (UTC, since 1970)."""
                self.is_slot_new = bool(found["slot_created"])
                self.connection = self.prepared.connection
                """libpq's parameters for sessions that read the snapshot. No password is among them."""
        except BaseException:
            self._end(is_done=not self.is_left_over)
            raise

    # --- continue with an earlier snapshot ---

    def _take_over(self, is_stopping: Callable[[], bool]) -> dict[str, Any] | None:
        """Open the pipe of an earlier process's snapshot and return its description; None if there is no usable snapshot."""
        try:
            self._pipe = os.open(self._pipe_path, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # the pipe does not exist, or no process reads from it
            return None
        found = read_json(self._text_path)
        self.is_left_over = self._hold_s > 0 and found is not None and found.pop(_PURPOSE) == self._purpose()
        now = self._if_unchanged(Prepared.of(found), is_stopping) if found is not None and self.is_left_over else None
        if found is not None and now is not None:
            _logger.info("continuing with the snapshot of an earlier run")
            return found | {"connection": now.connection}
        _logger.info("the snapshot of the earlier run does not fit this run")
        self.is_left_over = False
        self._release()
        return None

    def _purpose(self) -> list[Any]:
        """Return slot, publications and tables of this snapshot. Connection options are left out: they may contain a password."""
        return [_LAYOUT, self._config.slot, list(self._config.publications), list(self._tables)]

    def _if_unchanged(self, then: Prepared, is_stopping: Callable[[], bool]) -> Prepared | None:
        """Return what is there now if the server, how it is reached and the tables are as ``then``, and it holds the snapshot."""
        try:
            now = look_up(self._config, is_stopping)
        except (LostSlotError, SlotDoesNotExistError):  # a new slot begins later: nothing has the changes since the snapshot
            return None
        return now if self._described(then) == self._described(now) and self._say(b"\n") else None

    def _described(self, prepared: Prepared) -> list[Any]:
        """Return the facts that have to be the same before another process may continue with a snapshot."""
        tables = [each for each in prepared.tables if not self._tables or table_name(each) in self._tables]
        address = [prepared.connection.get(name) for name in _ADDRESS]
        return [prepared.system_id, prepared.timeline, prepared.database, address, tables]

    # --- take a new snapshot ---

    def _export(self, is_stopping: Callable[[], bool]) -> dict[str, Any]:
        """Let the server export a snapshot, and return what the subprocess prints about it."""
        config = self._config
        arguments = [*prepare_arguments(config), "--quiet", "--export-snapshot", "--linger", f"{self._hold_s:g}"]
        for table in self._tables or ("*",):
            arguments += ["--check-select", table]
        if config.create_slot:
            arguments += creation_arguments(config)
        self._text_path.unlink(missing_ok=True)
        self._pipe_path.unlink(missing_ok=True)
        os.mkfifo(self._pipe_path, 0o600)
        # A named pipe can be opened for writing without waiting only while it is open for reading.
        reader = os.open(self._pipe_path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            self._pipe = os.open(self._pipe_path, os.O_WRONLY | os.O_NONBLOCK)
            os.set_blocking(reader, True)
            self._child = Child(arguments, command=config.command, stdin=reader, tell=_tell, outlives_us=self._hold_s > 0)
        finally:
            os.close(reader)
        try:
            text = self._read(self._child, is_stopping)
        except BaseException:
            self._child.end()  # by a signal: the subprocess does not read its stdin yet
            raise
        with reading("prepare"):
            found: dict[str, Any] = json.loads(text)
        write_json(self._text_path, found | {_PURPOSE: self._purpose()})
        return found

    def _read(self, child: Child, is_stopping: Callable[[], bool]) -> bytes:
        """Read the JSON object that the subprocess prints before it waits; raise its error if it ends instead."""

        def is_stopping_now() -> bool:
            child.tell_news()
            return is_stopping()

        text = b""
        while not text.endswith(_LAST_LINE):
            try:
                data = child.read(ANSWER_S, is_stopping_now)
            except TimeoutError:
                raise error_of(unanswered("prepare", ANSWER_S)) from None
            if not data:
                raise error_of(child.failure())
            text += data
        return text

    # --- hold the snapshot, and end ---

    def check(self) -> None:
        """Raise an error if the subprocess has ended, and with it the snapshot."""
        if self._child is not None:
            if self._child.code is not None:
                raise error_of(self._child.failure())
        elif not self._say(b"\n"):
            raise SnapshotError("the server has dropped the snapshot of the earlier run", hint="start again: finished tables stay")

    def is_lost(self, within_s: float = 0.0) -> bool:
        """Tell whether the subprocess has ended, and with it the snapshot, or ends within ``within_s``."""
        ends_at = time.monotonic() + within_s
        while True:
            try:
                self.check()
            except CdcpipeError:
                return True
            if time.monotonic() >= ends_at:
                return False
            time.sleep(_END_POLL_S)

    def close(self) -> None:
        """Let the server drop the snapshot."""
        self._end(is_done=True)

    def leave(self) -> None:
        """End, but let the server hold the snapshot for ``hold_s`` seconds, so that another process can continue with it."""
        is_held = self._hold_s > 0 and self._pipe is not None and self._say(b"\n")
        if is_held:
            held = (
                "a process of cdcpipe holds the snapshot for another %.0f s: a run that starts within this time continues with it."
                " If systemd or the end of the container ends that process, too, unfinished tables begin anew"
            )
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
        """Tell the subprocess to drop the snapshot, and wait until it has ended."""
        assert self._pipe is not None
        self._say(_DROP)
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
        """Write to the subprocess that holds the snapshot; False if it has ended."""
        assert self._pipe is not None
        try:
            os.write(self._pipe, text)
        except BrokenPipeError:
            return False
        except BlockingIOError:  # the pipe is full: the subprocess runs, but has not read yet
            return True
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def drop_left(directory: Path) -> None:
    """Let the server drop the snapshot that a process has left in ``directory``, if there is one. Does not wait for that."""
    if not directory.is_dir():
        return
    with hold_alone(directory / "lock") as is_alone:
        if not is_alone:  # another process goes on with it
            return
        path = directory / _PIPE
        with suppress(OSError):  # the pipe does not exist, or no process reads from it
            pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
            try:
                os.write(pipe, _DROP)
            finally:
                os.close(pipe)
        for each in (directory / _TEXT, path):
            each.unlink(missing_ok=True)


class SnapshotError(CdcpipeError):
    """A snapshot could not be taken or read."""


def _tell(line: str) -> None:
    """Log a line of the subprocess, such as what a standby waits for before it makes a slot. Its final error is raised anyway."""
    _logger.log(logging.INFO if is_report(line) else logging.WARNING, "%s", line)

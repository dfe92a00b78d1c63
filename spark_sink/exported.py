"""A snapshot that the server holds for us: ``cdcpipe prepare --export-snapshot`` as a subprocess. No pyspark."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import tempfile
from typing import TYPE_CHECKING, Self

from cdcpipe.errors import CdcpipeError
from cdcpipe.lsn import LSN
from cdcpipe.pipe.exitcode import ExitCode
from spark_sink.command import environment, failure_of
from spark_sink.launcher import LauncherConfig, Prepared
from spark_sink.restart import error_of

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ExportedSnapshot", "slot_exists"]

_POLL_MS = 200
_READ_BYTES = 1 << 16
_END_TIMEOUT_S = 10.0


class ExportedSnapshot:
    """Makes the slot if that is asked for and it does not exist, and holds a snapshot until ``close``, or this process's end.

    Raise what prevents it. ``is_stopping`` is asked while the server waits for running transactions; then InterruptedError is
    raised.
    """

    def __init__(self, config: LauncherConfig, is_stopping: Callable[[], bool]) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        arguments = [*_arguments(config), "--export-snapshot"]
        if config.create_slot:
            arguments.append("-c")
            for table in config.tables:
                arguments += ["--table", table]
        # A session of its own: ^C is for us. It ends with its stdin, so with this process, however that ends.
        self._process = subprocess.Popen(
            arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            bufsize=0,
            start_new_session=True,
            env=environment(),
        )
        try:
            text = self._read(is_stopping)
            self.prepared = Prepared.parse(text)
            try:
                found = json.loads(text)
                self.name = str(found["snapshot"])
                self.consistent_point = LSN.parse(found["consistent_point"])
                self.is_slot_new = bool(found["slot_created"])
                self.connection = {str(name): str(value) for name, value in found["connection"].items()}
            except (ValueError, KeyError, TypeError, AttributeError) as ex:
                msg = f"cannot read what 'cdcpipe prepare --export-snapshot' printed: {ex!r}"
                raise CdcpipeError(msg, hint="are cdcpipe and cdcpipe-spark of the same version?") from ex
        except BaseException:
            self.close()
            raise

    def _read(self, is_stopping: Callable[[], bool]) -> bytes:
        """Read the JSON object that it prints before it waits; raise what it says if it ends instead."""
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        text = b""
        while not text.endswith(b"}\n"):
            if is_stopping():
                raise InterruptedError
            if not poll.poll(_POLL_MS):
                continue
            data = os.read(fd, _READ_BYTES)
            if not data:
                raise error_of(failure_of(self._process.wait(), self._said()))
            text += data
        return text

    def check(self) -> None:
        """Raise the error with which it has ended, if it has."""
        code = self._process.poll()
        if code is not None:
            raise error_of(failure_of(code, self._said()))

    def _said(self) -> list[str]:
        self._stderr.seek(0)
        return _lines(self._stderr.read())

    def close(self) -> None:
        """Let the snapshot go."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._stderr.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def slot_exists(config: LauncherConfig) -> bool:
    """Ask whether the slot is there; raise what prevents the answer."""
    done = subprocess.run(_arguments(config), stdin=subprocess.DEVNULL, capture_output=True, env=environment(), check=False)
    if done.returncode == ExitCode.SLOT_NOT_EXIST:
        return False
    if done.returncode in (ExitCode.SUCCESS, ExitCode.SLOT_IN_USE):
        return True
    raise error_of(failure_of(done.returncode, _lines(done.stderr)))


def _arguments(config: LauncherConfig) -> list[str]:
    arguments = [*config.command, "prepare", *config.connection, "-S", config.slot]
    for name in config.publications:
        arguments += ["--publication", name]
    return arguments


def _lines(said: bytes) -> list[str]:
    return said.decode("utf-8", "backslashreplace").strip().splitlines()

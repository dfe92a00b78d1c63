"""Runs the real CLI as a subprocess, with deadlines for all operations. Parses pgoutput's records only as far as rows need it."""

import contextlib
import fcntl
import os
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Self

from cdcpipe.lsn import LSN
from cdcpipe.pgoutput.decode import decode
from cdcpipe.pgoutput.messages import Commit, Insert
from cdcpipe.pipe.framing import RecordReader
from support.paths import ROOT
from support.waiting import DEADLINE_S, SPARK_DEADLINE_S

COMMAND = [sys.executable, "-m", "cli"]
SPARK_COMMAND = [sys.executable, "-m", "spark_sink"]


class CLI:
    """`cdcpipe ARGS…` with pipes. `records` reads the records from stdout; `stderr` has the text of stderr."""

    def __init__(
        self,
        *args: str,
        command: Sequence[str] = COMMAND,
        env: dict[str, str] | None = None,
        header: bool = True,
        **popen: Any,
    ) -> None:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PG")} | (env or {})
        self.args = [*command, *args, *(["-H"] if header else [])]
        self.process = subprocess.Popen(
            self.args, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, bufsize=0, **popen
        )
        self.reader = RecordReader()
        self._stderr: list[bytes] = []
        self._stderr_thread = threading.Thread(target=self._read_stderr, daemon=True)
        self._stderr_thread.start()

    def _read_stderr(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._stderr.append(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.wait()
        self._stderr_thread.join()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()

    @property
    def stderr(self) -> str:
        return b"".join(self._stderr).decode()

    def say(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text.encode())

    def close_stdin(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def read_bytes(self, size: int = 1 << 16, deadline_s: float = DEADLINE_S) -> bytes:
        """Return the next bytes of stdout; b"" at its end."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], deadline_s)
        assert ready, f"nothing on stdout within {deadline_s} s; stderr: {self.stderr}"
        return os.read(self.process.stdout.fileno(), size)

    def is_stdout_full(self) -> bool:
        """Tell whether the pipe holds about as much as it can."""
        assert self.process.stdout is not None
        (held,) = struct.unpack("i", fcntl.ioctl(self.process.stdout, termios.FIONREAD, b"\0\0\0\0"))
        return held >= fcntl.fcntl(self.process.stdout, fcntl.F_GETPIPE_SZ) * 3 // 4

    def records(self) -> Iterator[tuple[LSN, bytes]]:
        """Yield records until stdout ends."""
        while True:
            for lsn, record in self.reader:
                yield LSN(lsn), record
            data = self.read_bytes()
            if not data:
                assert not self.reader.has_partial, "stdout ended inside a record"
                return
            self.reader.feed(data)

    def take(self, count: int) -> list[tuple[LSN, bytes]]:
        """Return the next `count` records."""
        taken = []
        for record in self.records():
            taken.append(record)
            if len(taken) == count:
                return taken
        raise AssertionError(f"stdout ended after {len(taken)} of {count} records; stderr: {self.stderr}")

    def transactions(self, count: int) -> list[tuple[LSN, list[bytes | None]]]:
        """Return the next `count` transactions of a pgoutput slot: the Commit's header LSN, and each insert's first column."""
        done: list[tuple[LSN, list[bytes | None]]] = []
        rows: list[bytes | None] = []
        while len(done) < count:
            for lsn, record in self.take(1):
                message = decode(record)
                if isinstance(message, Insert):
                    rows.append(message.new[0])
                elif isinstance(message, Commit):
                    assert lsn == message.end_lsn
                    done.append((lsn, rows))
                    rows = []
        return done

    def wait(self, deadline_s: float = DEADLINE_S) -> int:
        """Wait for the end and return the exit code. Reads stdout meanwhile, so that a full pipe does not block the process."""
        deadline = time.monotonic() + deadline_s
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"still running after {deadline_s} s; stderr: {self.stderr}"
            assert self.process.stdout is not None
            ready = not self.process.stdout.closed and select.select([self.process.stdout], [], [], 0.05)[0]
            if ready and not os.read(self.process.stdout.fileno(), 1 << 20):
                time.sleep(0.01)
        self._stderr_thread.join(10)
        return self.process.returncode

    def wait_without_reading(self, deadline_s: float = DEADLINE_S) -> int:
        code = self.process.wait(deadline_s)
        self._stderr_thread.join(10)
        return code

    def quit(self) -> int:
        self.say("q\n")
        return self.wait()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


def run_cli(
    *args: str, env: dict[str, str] | None = None, stdin: bytes = b"", deadline_s: float = DEADLINE_S
) -> tuple[int, bytes, str]:
    """Run the CLI to its end. Returns exit code, stdout and stderr."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PG")} | (env or {})
    done = subprocess.run([*COMMAND, *args], input=stdin, capture_output=True, env=environment, timeout=deadline_s)
    return done.returncode, done.stdout, done.stderr.decode()


def run_spark_cli(*args: str, deadline_s: float = SPARK_DEADLINE_S, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run ``cdcpipe-spark`` to its end."""
    command = [*SPARK_COMMAND, *args]
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=deadline_s, cwd=ROOT, **options
    )


def spark_cli(*args: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run ``cdcpipe-spark`` to its end, and assert this exit code."""
    ended = run_spark_cli(*args)
    assert ended.returncode == code, ended.stderr
    return ended

"""A walsender that the test plays, for answers that a real server rarely gives.

    with FakeWalsender(tmp_path, [COPY_BOTH + wal_data(8, b"a record"), b""]) as server:
        walsender = Walsender(server.parameters)
        walsender.start_copy("START_REPLICATION ...", may_be_direct=True)

The server takes one connection. It answers each command, and each CopyDone, with the next of the given bytes; after the last answer
it closes the connection. After ``stops_reading_after`` messages it reads nothing more, and keeps the connection.
"""

import contextlib
import socket
import struct
import threading
from pathlib import Path
from typing import Self

from support.wire import message

__all__ = ["COPY_BOTH", "READY", "FakeWalsender"]

READY = message(b"Z", b"I")
COPY_BOTH = message(b"W", b"\0\0\0")

_PORT = 5432
_GREETING = (
    message(b"R", struct.pack(">I", 0))
    + message(b"S", b"server_version\x0018.0\0")
    + message(b"K", struct.pack(">II", 1, 2))
    + READY
)


class FakeWalsender:
    """The server, from the start of the `with` statement to its end. ``received`` are the kinds of the messages from cdcpipe."""

    def __init__(self, directory: Path, answers: list[bytes], *, stops_reading_after: int = 1_000) -> None:
        self.parameters = {"host": str(directory), "port": str(_PORT), "user": "u", "dbname": "d"}
        self.received = b""
        self._answers = answers
        self._stops_reading_after = stops_reading_after
        self._stopped = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(directory / f".s.PGSQL.{_PORT}"))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        with contextlib.suppress(OSError):  # the connection was closed by the server
            self._connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        self._connection, _ = self._listener.accept()
        # cdcpipe may close its socket with unread data.
        with self._connection as connection, connection.makefile("rb") as file, contextlib.suppress(ConnectionError):
            (size,) = struct.unpack(">I", file.read(4))
            file.read(size - 4)
            connection.sendall(_GREETING)
            while header := file.read(5):
                kind, size = struct.unpack(">cI", header)
                file.read(size - 4)
                self.received += kind
                if kind in b"Qc":
                    connection.sendall(self._answers.pop(0))
                    if not self._answers:
                        return
                if len(self.received) >= self._stops_reading_after:
                    self._stopped.wait()
                    return

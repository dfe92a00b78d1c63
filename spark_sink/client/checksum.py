"""``cdcpipe checksum`` as a child process: the server's half of a comparison."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from spark_sink.client.failure import error_of
from spark_sink.client.process import ANSWER_S, Child, unanswered

if TYPE_CHECKING:
    from collections.abc import Sequence

    Flags = np.ndarray[Any, np.dtype[np.bool_]]
    Numbers = np.ndarray[Any, np.dtype[np.int64]]

__all__ = ["ChecksumServer"]


class ChecksumServer:
    """A running ``cdcpipe checksum``: send a request, take its answer, then the next request.

    Leaving the context ends the command, also in the middle of a request. The command cancels its query on the server.
    """

    def __init__(self, connection: Sequence[str]) -> None:
        self._connection = connection

    def __enter__(self) -> Self:
        self._child = Child(["checksum", *self._connection])
        return self

    def __exit__(self, *_: object) -> None:
        # Not by SIGKILL: the server would not notice it, and would finish the query, with locks on all tables of the snapshot.
        self._child.__exit__()

    def ask(self, request: Any) -> Any:
        """Return the answer to a request that the server answers at once."""
        self.send(request)
        return self.receive(ANSWER_S)

    def send(self, request: Any) -> None:
        """Send a request. `receive` returns its answer."""
        if not self._child.write(json.dumps(request).encode() + b"\n", ANSWER_S):
            self._fail()

    def receive(self, timeout_s: float | None = None) -> Any:
        """Return the answer to the last request.

        By default there is no time limit: the server may have to read a whole table.
        """
        try:
            line = self._child.read_line(timeout_s)
        except TimeoutError:
            raise error_of(unanswered("checksum", ANSWER_S)) from None
        if not line:
            self._fail()
        return json.loads(line)

    def _fail(self) -> None:
        """Raise the error with which the command ended."""
        raise error_of(self._child.failure())

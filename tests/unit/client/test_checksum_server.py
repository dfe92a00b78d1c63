"""The `cdcpipe checksum` of a comparison."""

import functools

import pytest

from spark_sink.client import checksum
from spark_sink.client.process import Child
from support.children import python

CANCELLING = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
print(sys.stdin.readline(), end="", flush=True)
signal.pause()
"""


def test_a_request_that_still_runs_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that SIGKILL ends leaves its query, and the query's locks, on the server."""
    monkeypatch.setattr(checksum, "Child", functools.partial(Child, command=python(CANCELLING)))
    with checksum.ChecksumServer([]) as server:
        server.ask({"begin": []})
        server.send({"buckets": ["public", "t"], "key": ["id"]})
    assert server._child.code == 5

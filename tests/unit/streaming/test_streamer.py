"""The one loop, in the parts that a stream from a server shows only after a long time."""

import os
import socket
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cdcpipe.config import StreamOptions
from cdcpipe.pgoutput.transactions import Transactions
from cdcpipe.replication.boundaries import tracker_for
from cdcpipe.replication.progress import UNREAD_INTERVAL_S, Progress
from cdcpipe.streaming.consumer import CommandsIn
from cdcpipe.streaming.streamer import Streamer


@pytest.mark.parametrize("has_pending", [True, False])
def test_a_socket_is_not_read_while_a_transaction_is_handed_on(has_pending: bool) -> None:
    """With -s 0 the server would ask for a status update, and nobody would see that."""
    now = time.monotonic()
    progress = Progress(now, status_interval_s=0)
    transactions = cast("Transactions", SimpleNamespace(has_pending=has_pending))
    tracker = tracker_for("pgoutput", {}, progress, None, Transactions())
    ours, server = socket.socketpair()
    commands_fd, said_fd = os.pipe()
    with ours, server, open(os.devnull, "wb") as out, open(commands_fd, "rb"), open(said_fd, "wb"):
        options = StreamOptions(
            out_fd=out.fileno(),
            write_header=True,
            write_newline=False,
            auto_feedback=False,
            wait_after_end=False,
            needs_commands=True,
        )
        walsender: Any = SimpleNamespace(socket=ours.fileno(), direct=None, notices=[], flush=lambda: True)
        given = walsender, progress, tracker, options, CommandsIn(commands_fd)
        streamer = Streamer(*given, confirmed_on_server=lambda _: 0, transactions=transactions)
        streamer._receiver.has_more = True
        with streamer._signals:
            streamer._wait(now)
    assert (progress.due_at() <= now + UNREAD_INTERVAL_S) == has_pending

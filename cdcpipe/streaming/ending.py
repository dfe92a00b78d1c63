"""Ends a stream so that the server has read the last feedback.

If a socket has unread data, closing it discards the bytes that were sent last. So cdcpipe ends the copy, and then reads and drops
the server's messages until the server has ended the copy, too.

If the server is silent, three steps run into their limit of `END_STEP_S`: the last update, the end of the copy, and the question
what the server has confirmed. So the end takes less than 10 s.
"""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Callable

from cdcpipe.errors import ConnectionClosedError, ServerError
from cdcpipe.libpq.walsender import Walsender
from cdcpipe.lsn import format_lsn
from cdcpipe.streaming.notices import END_STEP_S
from cdcpipe.streaming.status import StatusUpdates

__all__ = ["end_stream"]

log = logging.getLogger(__name__)

_LOOK_S = 0.1
_ASK_AGAIN_S = 0.05
_MOST_DROPPED = 10_000
"""The number of messages dropped between two looks at the clock."""


def end_stream(
    walsender: Walsender, status: StatusUpdates, confirmed_lsn: Callable[[], int], confirmed_on_server: Callable[[float], int]
) -> None:
    """Send the last status update, and end the stream.

    ``confirmed_lsn`` returns the position that this update confirms. ``confirmed_on_server`` is as in `Streamer`.
    """
    _send_last(walsender, status)
    flush_lsn = confirmed_lsn()
    walsender.end_copy()
    deadline = time.monotonic() + END_STEP_S
    while not _is_drained(walsender):
        if time.monotonic() >= deadline:
            # While the server sends a large transaction, it reads only when it can't send. So stop reading, and ask it for the
            # slot's position.
            _await_confirmation(flush_lsn, confirmed_on_server)
            return
        _wait_for_socket(walsender, deadline)
    try:
        walsender.copy_result(END_STEP_S)
    except (ConnectionClosedError, ServerError) as ex:
        log.info("after the end of the stream: %s", ex)


def _send_last(walsender: Walsender, status: StatusUpdates) -> None:
    deadline = time.monotonic() + END_STEP_S
    _send_stuck(walsender, status, deadline)
    status.send(time.monotonic())
    _send_stuck(walsender, status, deadline)


def _send_stuck(walsender: Walsender, status: StatusUpdates, deadline: float) -> None:
    while status.is_stuck:
        if time.monotonic() >= deadline:
            raise ConnectionClosedError("the server does not take the last status update", hint="it will send again what followed")
        _wait_for_socket(walsender, deadline)
        status.send(time.monotonic())


def _wait_for_socket(walsender: Walsender, deadline: float) -> None:
    is_flushed = walsender.flush()
    walsender.wait(select.POLLIN | (0 if is_flushed else select.POLLOUT), min(deadline, time.monotonic() + _LOOK_S))


def _is_drained(walsender: Walsender) -> bool:
    """Drop the server's remaining messages, and return whether the copy has ended. The server will send the changes again."""
    try:
        walsender.consume_input()
    except Walsender.Lost:
        return True
    walsender.flush()
    for _ in range(_MOST_DROPPED):
        try:
            length, _data = walsender.receive(1)
        except Walsender.Damaged:
            raise walsender.damage_error() from None
        if length < 0:
            return True
        if length == 0:
            break
    return False


def _await_confirmation(flush_lsn: int, confirmed_on_server: Callable[[float], int]) -> None:
    deadline = time.monotonic() + END_STEP_S
    while flush_lsn and confirmed_on_server(deadline - time.monotonic()) < flush_lsn:
        if time.monotonic() >= deadline:
            log.warning("the server has not confirmed %s yet; it may send again what followed", format_lsn(flush_lsn))
            return
        time.sleep(_ASK_AGAIN_S)

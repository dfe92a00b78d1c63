"""Ends a stream so that the server has read the last feedback.

If a socket has unread data, closing it discards the bytes that were sent last. So cdcpipe ends the copy, and then reads and drops
the server's messages until the server has ended the copy, too.

If the connection is lost meanwhile, or the server is silent, it is asked on another connection what it has confirmed. If it has not
confirmed everything, or does not answer, a warning says so. So an end without an error never hides that feedback was lost.

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
from cdcpipe.replication.copydata import WAL_DATA, parse_keepalive
from cdcpipe.replication.progress import Progress
from cdcpipe.streaming.notices import END_STEP_S, raise_end
from cdcpipe.streaming.status import StatusUpdates

__all__ = ["end_stream", "take_keepalives"]

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
    try:
        while not _is_drained(walsender):
            if time.monotonic() >= deadline:
                # While the server sends a large transaction, it reads only when it can't send. So stop reading, and ask it for the
                # slot's position.
                _await_confirmation(flush_lsn, confirmed_on_server)
                return
            _wait_for_socket(walsender, deadline)
        walsender.copy_result(max(_LOOK_S, deadline - time.monotonic()))
    except (ConnectionClosedError, ServerError) as ex:
        log.info("after the end of the stream: %s", ex)
        _await_confirmation(flush_lsn, confirmed_on_server)


def take_keepalives(walsender: Walsender, progress: Progress) -> bool:
    """Take the keepalives that come at the end position, without waiting, and return False at the first record.

    A server that shuts down waits for an answer to its keepalive. The record is dropped, because the next stream gets it. After
    False, the caller reads nothing more: otherwise the server would decode and send everything for nothing, and would come to
    errors in later changes, which end the stream before the last feedback. A notice is dropped, too. Raises the error with which
    the server ends the stream: it takes no more feedback then.
    """
    has_read = False
    while True:
        try:
            length, data = walsender.receive(1)
        except Walsender.Damaged:
            raise walsender.damage_error() from None
        walsender.notices.clear()  # the server warns if it skips later changes, which are not this stream's
        if length < 0:
            raise_end(walsender, 0)
        if length == 0:
            if has_read:
                return True
            has_read = True
            try:
                walsender.consume_input()
            except Walsender.Lost:
                raise walsender.closed_error() from None
            continue
        if data[0] == WAL_DATA:
            return False
        message = parse_keepalive(data)
        progress.keepalive(message.wal_end, reply_requested=message.reply_requested, is_past_end=True)


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
    """Drop the server's remaining messages, and return whether the copy has ended. The server will send the changes again.

    Raises ConnectionClosedError if the connection is lost, and the server has not ended the copy before.
    """
    is_lost = False
    try:
        walsender.consume_input()
        walsender.flush()
    except Walsender.Lost:
        is_lost = True
    for _ in range(_MOST_DROPPED):
        try:
            length, _data = walsender.receive(1)
        except Walsender.Damaged:
            raise walsender.damage_error() from None
        if length < 0:
            return True
        if length == 0:
            if is_lost:
                raise walsender.closed_error()
            break
    return False


def _await_confirmation(flush_lsn: int, confirmed_on_server: Callable[[float], int]) -> None:
    deadline = time.monotonic() + END_STEP_S
    while flush_lsn and confirmed_on_server(deadline - time.monotonic()) < flush_lsn:
        if time.monotonic() >= deadline:
            # The server may also have given no answer.
            what = "the server has not confirmed %s yet, as far as is known; it may send again what it has not confirmed"
            log.warning(what, format_lsn(flush_lsn))
            return
        time.sleep(_ASK_AGAIN_S)

"""Calls a function again and again in a thread.

    rounds = Rounds("replicas", catch_up, None, on_error)
    rounds.start()
    rounds.want()       # there is something to do: after a rest, the next round need not wait for its time
    rounds.end()        # one more round, in the thread
    rounds.wait()

There is a round at the start, one after each interval, and one more at the end.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Final

from cdcpipe.threads import Worker

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Rounds", "own_interval_s"]

_logger = logging.getLogger(__name__)

_LOOK_S: Final = 0.2
_NEVER_S: Final = threading.TIMEOUT_MAX
_SHORTEST_S: Final = 1.0
_LONGEST_S: Final = 10.0
_SHARE: Final = 0.25
"""Without a given interval, rounds take at most this share of the time, unless the longest interval is reached."""


def own_interval_s(took_s: float) -> float:
    """Return the interval from the start of a round that took ``took_s`` to the start of the next one, if none is given."""
    return min(_LONGEST_S, max(_SHORTEST_S, took_s / _SHARE))


class Rounds:
    """The rounds of one thread called ``name``.

    With an interval of 0 there are only the first and the last round. With None the interval is `own_interval_s`, and `want` starts
    a round at once if no other wanted round began within it. If an error ends the rounds, the thread calls ``on_error`` with it.
    InterruptedError is none: a round raises it if it waits while the process is asked to stop, or after another thread's error.
    """

    def __init__(
        self, name: str, run: Callable[[], None], interval_s: float | None, on_error: Callable[[BaseException], None]
    ) -> None:
        self._name = name
        self._round = run
        self._interval_s = interval_s
        self._on_error = on_error
        self._changed = threading.Condition()
        self._is_ending = False
        self._is_last_wanted = True
        self._is_wanted = False
        self._thread: Worker | None = None

    def start(self) -> None:
        """Start the thread. Returns at once."""
        self._thread = Worker(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def end(self, *, is_last_round_wanted: bool = True) -> None:
        """Ask the thread to end after a last round, or as soon as possible. Returns at once."""
        with self._changed:
            self._is_last_wanted = is_last_round_wanted
            self._is_ending = True
            self._changed.notify_all()

    def want(self) -> None:
        """Say that there is something to do. Returns at once. Changes nothing if an interval is given."""
        with self._changed:
            self._is_wanted = True
            self._changed.notify_all()

    @property
    def is_hurried(self) -> bool:
        """Whether the running round should end early: no last round is wanted."""
        return self._is_ending and not self._is_last_wanted

    def finish(self, is_stopping: Callable[[], bool]) -> None:
        """Wait until a last round is done, or for the end of the running one once ``is_stopping`` is True."""
        self.end()
        while not self.wait(_LOOK_S):
            if is_stopping():
                self.end(is_last_round_wanted=False)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait, after ``end``, for the last round. Returns False if the time runs out first."""
        return self._thread is None or self._thread.wait(timeout_s)

    def _run(self) -> None:
        try:
            earliest = 0.0
            while True:
                started = time.monotonic()
                with self._changed:
                    was_wanted, self._is_wanted = self._is_wanted, False
                self._round()
                took_s = time.monotonic() - started
                interval_s = own_interval_s(took_s) if self._interval_s is None else self._interval_s or _NEVER_S
                if was_wanted:
                    earliest = started + interval_s
                if not self._pause(earliest, started + interval_s):
                    break
            if self._is_last_wanted:
                self._round()
        except InterruptedError:  # the next start does what is left
            _logger.info("%s: stopped before the tables were free", self._name)
        except BaseException as ex:  # noqa: BLE001 - the owner raises it
            self._on_error(ex)

    def _pause(self, earliest: float, latest: float) -> bool:
        """Wait until the next round is due. Returns False at the end."""
        with self._changed:
            while not self._is_ending:
                left_s = self._due(earliest, latest) - time.monotonic()
                if left_s <= 0:
                    return True
                self._changed.wait(left_s)
            return False

    def _due(self, earliest: float, latest: float) -> float:
        """Return when the next round is due: a wanted one at ``earliest``, another at ``latest``."""
        return earliest if self._is_wanted and self._interval_s is None else latest

"""Lets ^C in a program that waits for a run end the wait, and no job of Spark."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["without_cancelling"]


@contextmanager
def without_cancelling() -> Iterator[None]:
    """Let ^C raise KeyboardInterrupt and do no more, in the main thread.

    A session that was made in the main thread has a handler there that first cancels all jobs, also those of other threads.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or getattr(handler, "__module__", "") != "pyspark.core.context":
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)

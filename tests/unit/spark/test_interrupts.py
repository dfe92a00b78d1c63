"""^C in a program with a session of its own: while the program waits for a run, Spark's handler cancels no jobs."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

from spark_sink.spark.interrupts import without_cancelling


def handler(module: str, called: list[int]) -> Callable[[int, Any], None]:
    def noted(number: int, _frame: Any) -> None:
        called.append(number)

    noted.__module__ = module
    return noted


@pytest.mark.parametrize(("module", "is_called"), [("pyspark.core.context", False), ("program", True)])
def test_an_interrupt_while_a_program_waits(module: str, *, is_called: bool) -> None:
    called: list[int] = []
    before = signal.signal(signal.SIGINT, handler(module, called))
    try:
        own = signal.getsignal(signal.SIGINT)
        if is_called:
            with without_cancelling():
                signal.raise_signal(signal.SIGINT)
        else:
            with pytest.raises(KeyboardInterrupt), without_cancelling():
                signal.raise_signal(signal.SIGINT)
        assert bool(called) == is_called
        assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_sets_no_handler() -> None:
    def wait() -> None:
        with without_cancelling():
            done.append(signal.getsignal(signal.SIGINT))

    done: list[Any] = []
    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    assert done == [signal.getsignal(signal.SIGINT)]

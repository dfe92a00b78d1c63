"""Which users of a warehouse's tables may run at the same time."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from spark_sink.warehouse.lock import TableLock
from support.waiting import until


def test_an_exclusive_request_is_granted(tmp_path: Path) -> None:
    """Also if others come and go without a pause. They learn that an exclusive user was there."""
    lock = TableLock(tmp_path)
    stopping, states, waiting = threading.Event(), [], threading.Barrier(3)

    def share(hold: Callable[[], AbstractContextManager[bytes | None]]) -> None:
        is_first = True
        while not stopping.is_set():
            with hold() as state:
                states.append(state)
                if is_first:
                    waiting.wait()
                is_first = False
                stopping.wait(0.01)

    threads = [threading.Thread(target=share, args=(lock.append,)), threading.Thread(target=share, args=(lock.merge,))]
    for thread in threads:
        thread.start()
    waiting.wait()
    with lock.alone():
        count = len(states)
        assert not stopping.wait(0.05)
        assert len(states) == count
        with pytest.raises(InterruptedError), lock.alone(lambda: True):
            pass
    until(lambda: len(states) > count, "the others' going on")
    stopping.set()
    for thread in threads:
        thread.join()
    assert len(set(states) - {None}) == 2

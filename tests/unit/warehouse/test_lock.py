"""Which users of a warehouse's tables may run at the same time."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from spark_sink.warehouse.lock import TableLock
from support.waiting import DEADLINE_S, until


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


def test_who_waits_for_a_long_merge_stops_no_append(tmp_path: Path) -> None:
    """OPTIMIZE of a large replica takes hours. All changelogs stood still then, if a copy or a purge waited for it."""
    waits, is_alone = threading.Event(), threading.Event()

    def take() -> None:
        with TableLock(tmp_path).alone(lambda: bool(waits.set())):
            is_alone.set()

    impatient = TableLock(tmp_path, has_failed=lambda: True)  # each of its waits is an error
    thread = threading.Thread(target=take)
    with TableLock(tmp_path).merge():
        thread.start()
        assert waits.wait(DEADLINE_S)
        with impatient.append(), impatient.reading():
            pass
        with pytest.raises(InterruptedError), impatient.merge():  # later merges can't starve it
            pass
        assert not is_alone.is_set()
    thread.join(DEADLINE_S)
    assert is_alone.is_set()

"""Threads: a waiter that is interrupted."""

import signal
import sys
import threading
from collections.abc import Iterator

import pytest

from cdcpipe.threads import Worker
from support.waiting import until


@pytest.fixture
def interrupted() -> Iterator[threading.Event]:
    """Yield an event that the first SIGUSR1 sets. That signal also interrupts what the main thread waits for; later ones do not."""
    event = threading.Event()

    def interrupt(*_: object) -> None:
        if not event.is_set():
            event.set()
            raise InterruptedError

    before = signal.signal(signal.SIGUSR1, interrupt)
    yield event
    signal.signal(signal.SIGUSR1, before)


def test_it_is_alive_after_an_interrupted_join(interrupted: threading.Event) -> None:
    started, ending = threading.Event(), threading.Event()
    main = threading.main_thread().ident
    assert main is not None

    def work() -> None:
        assert started.wait(60)  # the start is a wait, too
        until(lambda: sys._current_frames()[main].f_code is threading.Condition.wait.__code__)
        # A signal just before the system call of the wait does not end that wait. The next signal does.
        while not interrupted.wait(0.1):
            signal.pthread_kill(main, signal.SIGUSR1)
        ending.wait(60)

    worker = Worker(target=work, daemon=True)
    assert not worker.is_alive()
    worker.start()
    started.set()
    with pytest.raises(InterruptedError):
        worker.join(60)
    assert worker.is_alive()
    ending.set()
    worker.join(60)
    assert not worker.is_alive()


def test_a_second_start_changes_nothing() -> None:
    ending = threading.Event()
    worker = Worker(target=ending.wait, daemon=True)
    worker.join_if_started()
    worker.start()
    with pytest.raises(RuntimeError):
        worker.start()
    assert worker.is_alive()
    waiting = Worker(target=worker.join_if_started)
    waiting.start()
    ending.set()
    waiting.join(60)
    assert not waiting.is_alive()


def test_a_join_ends_with_its_time() -> None:
    ending = threading.Event()
    worker = Worker(target=ending.wait, daemon=True)
    assert worker.wait(0.0)  # it has not begun
    worker.start()
    worker.join(0.01)
    assert worker.is_alive()
    assert not worker.wait(0.01)
    ending.set()
    worker.join()
    assert worker.wait(0.0)


def test_a_failed_target_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)

    def fail() -> None:
        raise OSError

    worker = Worker(target=fail)
    worker.start()
    worker.join(60)
    assert not worker.is_alive()
    threading.Thread.join(worker)  # until the hook has been called


def test_a_join_that_could_never_end_is_refused() -> None:
    errors: list[str] = []

    def join() -> None:
        try:
            worker.join()
        except RuntimeError as ex:
            errors.append(str(ex))

    worker = Worker(target=join)
    with pytest.raises(RuntimeError, match="before it is started"):
        worker.join()
    worker.start()
    worker.join(60)
    assert errors == ["cannot join the current thread"]

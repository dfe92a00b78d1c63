"""Cancelling jobs, without Spark."""

import threading

import pytest

from spark_sink.spark.jobs import Jobs
from support.given_sessions import given_session
from support.waiting import DEADLINE_S


def fail(_tag: str) -> None:
    raise ConnectionRefusedError


@pytest.mark.parametrize(("is_stopped", "cancel"), [(True, pytest.fail), (False, fail)], ids=["stopped", "its JVM has ended"])
def test_a_session_that_is_gone_hides_no_error_of_the_work(is_stopped: bool, cancel: object) -> None:
    waits = iter([False, False, True])
    Jobs("copy").cancel_until(given_session(is_stopped=is_stopped, cancelJobsWithTag=cancel), lambda _: next(waits))


@pytest.mark.parametrize("stop", [InterruptedError, KeyboardInterrupt])
def test_work_that_is_stopped_is_cancelled(stop: type[BaseException]) -> None:
    begun, cancelled, tags = threading.Event(), threading.Event(), list[str]()

    def work() -> None:
        begun.set()
        assert cancelled.wait(DEADLINE_S)
        raise RuntimeError("[SPARK_JOB_CANCELLED]")

    def is_stopping() -> bool:
        if stop is KeyboardInterrupt:
            raise KeyboardInterrupt
        return begun.is_set()

    def cancel(tag: str) -> None:
        assert tags == [tag]
        cancelled.set()

    with pytest.raises(stop):
        Jobs("copy").run(given_session(addJobTag=tags.append, cancelJobsWithTag=cancel), work, is_stopping)


def test_an_error_of_the_work_is_raised() -> None:
    def work() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Jobs("copy").run(given_session(addJobTag=lambda _: None), work, lambda: False)

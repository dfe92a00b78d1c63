"""Cancelling jobs, without Spark."""

import pytest

from spark_sink.spark.jobs import Jobs
from support.given_sessions import given_session


def fail(_tag: str) -> None:
    raise ConnectionRefusedError


@pytest.mark.parametrize(("is_stopped", "cancel"), [(True, pytest.fail), (False, fail)], ids=["stopped", "its JVM has ended"])
def test_a_session_that_is_gone_hides_no_error_of_the_work(is_stopped: bool, cancel: object) -> None:
    waits = iter([False, False, True])
    Jobs("copy").cancel_until(given_session(is_stopped=is_stopped, cancelJobsWithTag=cancel), lambda _: next(waits))

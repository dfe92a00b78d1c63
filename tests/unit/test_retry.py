"""The retry policy: limits and pauses, with time and chance as arguments."""

from collections.abc import Callable

import pytest

from cdcpipe.retry import RetryPolicy


class PassingError(Exception):
    """An error after which another attempt may succeed."""


def failing(times: int, error: Exception) -> Callable[[], str]:
    """Return a task that fails this many times, and then succeeds."""
    left = [error] * times

    def task() -> str:
        if left:
            raise left.pop()
        return "done"

    return task


def pauses(policy: RetryPolicy, count: int, **arguments: float) -> list[float | None]:
    return [policy.pause_s(failures, **arguments) for failures in range(1, count + 1)]


def test_pauses_double_up_to_the_longest() -> None:
    policy = RetryPolicy(first_pause_s=0.2, longest_pause_s=1.0)
    assert pauses(policy, 5) == [0.2, 0.4, 0.8, 1.0, 1.0]
    assert policy.pause_s(1_000_000) == 1.0


def test_pauses_are_equal_without_a_longest() -> None:
    assert pauses(RetryPolicy(first_pause_s=5.0), 3) == [5.0, 5.0, 5.0]
    assert pauses(RetryPolicy(), 2) == [0.0, 0.0]


def test_chance_shortens_a_pause_by_its_share() -> None:
    policy = RetryPolicy(first_pause_s=8.0, jitter=0.5)
    assert [policy.pause_s(1, chance=chance) for chance in (0.0, 0.5, 1.0)] == [4.0, 6.0, 8.0]


def test_attempts_are_counted_with_the_first_one() -> None:
    assert pauses(RetryPolicy(attempts=3), 4) == [0.0, 0.0, None, None]
    assert pauses(RetryPolicy(attempts=1), 1) == [None]


def test_no_attempt_after_the_time_is_over() -> None:
    policy = RetryPolicy(within_s=60, first_pause_s=1)
    assert [policy.pause_s(9, elapsed_s) for elapsed_s in (0.0, 59.9, 60.0)] == [1, 1, None]


def test_a_call_is_repeated_after_a_passing_error() -> None:
    slept: list[float] = []
    policy = RetryPolicy(attempts=4, first_pause_s=1.0, longest_pause_s=8.0)
    assert policy.call(failing(3, PassingError()), PassingError, sleep=slept.append, clock=lambda: 0.0) == "done"
    assert slept == [1.0, 2.0, 4.0]


def test_a_call_raises_the_last_error() -> None:
    with pytest.raises(PassingError):
        RetryPolicy(attempts=3).call(failing(3, PassingError()), PassingError)


def test_a_call_ends_when_its_time_is_over() -> None:
    times = iter([0.0, 1.0, 2.0, 3.0])
    with pytest.raises(PassingError):
        RetryPolicy(within_s=2.0).call(failing(9, PassingError()), PassingError, clock=lambda: next(times))
    assert next(times) == 3.0


@pytest.mark.parametrize(
    ("passing", "where"),
    [(KeyError, lambda _: True), (PassingError, lambda ex: "busy" in str(ex)), (KeyError, lambda ex: "busy" in str(ex))],
)
def test_any_other_error_is_raised_at_once(passing: type[Exception], where: Callable[[Exception], bool]) -> None:
    task = failing(1, PassingError("gone"))
    with pytest.raises(PassingError):
        RetryPolicy().call(task, passing, where=where)
    assert task() == "done"  # it was called once

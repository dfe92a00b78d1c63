"""Which tables are copied anew, and when: the hours, the order, the pauses."""

import pytest

from spark_sink.schema.table import Table
from spark_sink.snapshot.schedule import Hours, Schedule, parse_hours
from spark_sink.warehouse.wanted_copies import Failures, Reason, WantedCopy

A, B, C, D = (Table("public", name) for name in "abcd")
NOON, MIDNIGHT = 12 * 60, 0
DAY_S, HOUR_S = 86_400.0, 3600.0


def waits(table: Table, found_at: float = 0.0, failures: Failures | None = None) -> WantedCopy:
    return WantedCopy(table, (Reason("it was renamed", 100, found_at),), failures)


def failed(table: Table, count: int, at: float) -> WantedCopy:
    return waits(table, 0.0, Failures(count, at, "it is locked"))


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("now", [0, NOON, 1439], []),
        ("08:30-17:00", [510, NOON, 1019], [0, 509, 1020, 1439]),
        ("22:00-06:00", [1320, 1439, 0, 359], [360, NOON, 1319]),
        ("00:00-00:01", [0], [1, 1439]),
    ],
)
def test_hours(text: str, inside: list[int], outside: list[int]) -> None:
    hours = parse_hours(text)
    assert hours is not None
    assert [minute for minute in (*inside, *outside) if minute in hours] == inside
    schedule = Schedule(hours, 1)
    assert [bool(schedule.choose([waits(A)], 0.0, minute)) for minute in (*inside, *outside)] == [True] * len(inside) + [
        False
    ] * len(outside)


def test_no_hours() -> None:
    assert parse_hours("off") is None
    assert Schedule(None, 1).choose([waits(A)], 0.0, NOON) == []


@pytest.mark.parametrize("text", ["", "on", "8:30-17:00", "08:30", "24:00-01:00", "08:60-09:00", "08:30-08:30", "08:30-17:00 "])
def test_other_hours_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="neither now nor off"):
        parse_hours(text)


def test_the_oldest_come_first_and_so_many_together() -> None:
    schedule = Schedule(Hours(), 2)
    waiting = [waits(A, 30.0), waits(B, 10.0), waits(C, 20.0), waits(D, 40.0)]
    assert schedule.choose(waiting, 100.0, NOON) == [B, C]
    schedule.record_copied([B, C], 100.0)
    assert schedule.choose([waiting[0], waiting[3]], 101.0, NOON) == [A, D]
    assert schedule.choose([], 102.0, NOON) == []


def test_a_table_that_failed_waits_longer_each_time_and_comes_alone() -> None:
    schedule = Schedule(Hours(), 3)
    # Those that have not failed come first, and the failed one does not come with them.
    assert schedule.choose([failed(A, 1, 0.0), waits(B), waits(C)], DAY_S, NOON) == [B, C]
    for count, pause_s in ((1, 30), (2, 60), (3, 120), (8, HOUR_S), (100, HOUR_S)):
        assert schedule.choose([failed(A, count, 1000.0)], 1000.0 + pause_s - 1, NOON) == []
        assert schedule.choose([failed(A, count, 1000.0)], 1000.0 + pause_s, NOON) == [A]
    assert schedule.choose([failed(A, 1, 500.0), failed(B, 1, 400.0), failed(C, 9, 450.0)], 1000.0, NOON) == [B]
    # The clock was set back.
    assert schedule.choose([failed(A, 9, 9000.0)], 1000.0, NOON) == [A]


def test_a_table_that_waits_again_and_again_is_copied_more_and_more_rarely() -> None:
    schedule = Schedule(Hours(), 3)
    now, pauses = 0.0, []
    for _ in range(12):
        assert schedule.choose([waits(A), waits(B)], now, NOON) == [A, B]
        schedule.record_copied([A], now)
        assert schedule.choose([waits(A), waits(B)], now, NOON) == [B]
        pause_s = next(pause_s for pause_s in range(0, int(DAY_S), 60) if A in schedule.choose([waits(A)], now + pause_s, NOON))
        pauses.append(pause_s)
        now += pause_s
    assert pauses[:4] == [60, 120, 240, 480]
    assert pauses[-2:] == [6 * HOUR_S, 6 * HOUR_S]
    # A day without a copy: the pauses are short again.
    now += DAY_S + 1
    schedule.record_copied([A], now)
    assert schedule.choose([waits(A)], now + 60, NOON) == [A]

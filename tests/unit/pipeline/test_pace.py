"""The interval between micro-batches, by a clock that nobody sets."""

from __future__ import annotations

from typing import Any

import pytest

from spark_sink.pipeline.pace import Pace

POLLING = "spark.sql.streaming.pollingDelay"


class Clock:
    """`time.monotonic`, and a wait that passes at once. ``waited`` has what was waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.waited: list[float] = []
        monkeypatch.setattr("spark_sink.pipeline.pace.time.monotonic", lambda: self.now)

    def wait(self, seconds: float) -> None:
        self.waited.append(round(seconds, 3))
        self.now += seconds


def micro_batch(paced: Pace, clock: Clock, took_s: float) -> None:
    began_at = clock.now
    clock.now += took_s
    paced.rest(began_at, clock.wait)


def test_a_micro_batch_waits_for_the_rest_of_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, paced = Clock(monkeypatch), Pace(10.0)
    micro_batch(paced, clock, 3.0)
    assert clock.waited == [7.0]


def test_the_time_before_a_micro_batch_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, paced = Clock(monkeypatch), Pace(10.0)
    micro_batch(paced, clock, 3.0)
    clock.now += 2.0  # Spark plans the next micro-batch
    micro_batch(paced, clock, 3.0)
    assert clock.waited == [7.0, 5.0]


def test_after_a_time_without_segments_the_interval_begins_with_the_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, paced = Clock(monkeypatch), Pace(10.0)
    micro_batch(paced, clock, 3.0)
    clock.now += 25.0
    micro_batch(paced, clock, 3.0)
    assert clock.waited == [7.0, 7.0]


@pytest.mark.parametrize("interval_s", [0.0, 3.0])
def test_a_long_micro_batch_is_followed_by_the_next_at_once(monkeypatch: pytest.MonkeyPatch, interval_s: float) -> None:
    clock, paced = Clock(monkeypatch), Pace(interval_s)
    micro_batch(paced, clock, 4.0)
    assert clock.waited == []


class Session:
    """A session's settings; ``seen`` has the setting with which a query was started, and its trigger."""

    def __init__(self) -> None:
        self.settings = {POLLING: "10ms"}
        self.seen: list[Any] = []
        self.conf = self
        self.set = self.settings.__setitem__

    def trigger(self, **given: str) -> Session:
        self.seen.append(given)
        return self

    def start(self) -> None:
        self.seen.append(self.settings[POLLING])


@pytest.mark.parametrize(("interval_s", "polling"), [(0.0, "10ms"), (0.2, "200ms"), (60.0, "60000ms")])
def test_spark_sleeps_for_the_interval_while_there_are_no_segments(interval_s: float, polling: str) -> None:
    """A trigger interval would have it wait for a time of the system's clock, which may be set back."""
    spark: Any = Session()
    Pace(interval_s).start(spark, spark)
    assert spark.seen == [{"processingTime": "0 seconds"}, polling]

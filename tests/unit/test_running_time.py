"""A pause of the process is no time in which it has run."""

import pytest

from cdcpipe import running_time
from cdcpipe.running_time import RunningTime


def test_a_pause_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([100.0, 100.25, 100.75, 4000.75, 4001.25])
    monkeypatch.setattr(running_time, "monotonic", lambda: next(times))
    running = RunningTime()
    assert [running.seconds() for _ in range(4)] == [0.25, 0.75, 1.75, 2.25]

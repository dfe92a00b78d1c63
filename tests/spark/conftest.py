"""Settings for the tests with the shared Spark session."""

import pytest

from spark_sink.pipeline import runner


@pytest.fixture(autouse=True)
def unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no run ask the doctor or watch its slot: on a busy machine most of them last long enough to start both commands.

    No test looks at what they say, but one in test_runner.py. The commands' runs in tests/system ask and watch as always.
    """
    monkeypatch.setattr(runner, "_WATCH_AFTER_S", 3600.0)

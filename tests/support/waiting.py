"""How tests wait: for a condition, with a deadline."""

import time
from collections.abc import Callable
from typing import Any

DEADLINE_S = 60.0
"""Long enough for a busy machine; a test that meets it has failed."""
SPARK_DEADLINE_S = 240.0
"""For what Spark does."""


def until(condition: Callable[[], Any], what: str = "the condition", deadline_s: float = DEADLINE_S) -> Any:
    """Return the first true value of `condition`."""
    deadline = time.monotonic() + deadline_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not come true within {deadline_s} s")
        time.sleep(0.02)

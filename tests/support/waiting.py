"""Waits for a condition, with a deadline."""

import time
from collections.abc import Callable
from typing import Any

DEADLINE_S = 120.0
"""Long enough for a busy machine. A test that reaches it fails."""
SPARK_DEADLINE_S = 480.0
"""The deadline for operations of Spark."""


def until(condition: Callable[[], Any], what: str = "the condition", deadline_s: float = DEADLINE_S) -> Any:
    """Call `condition` until it returns a true value, and return that value."""
    deadline = time.monotonic() + deadline_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not come true within {deadline_s} s")
        time.sleep(0.02)

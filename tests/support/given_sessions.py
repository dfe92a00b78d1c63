"""A session that is given, as far as it is checked before it is used. Needs no Spark."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

__all__ = ["given_session"]


def given_session(get: Callable[[str], str | None] = {}.get, *, is_stopped: bool = False, **context_has: Any) -> SimpleNamespace:
    """Return a session with the settings that ``get`` returns. ``is_stopped``: as pyspark leaves a session that was stopped.

    ``context_has`` are functions of its SparkContext.
    """
    java_context = SimpleNamespace(sc=lambda: SimpleNamespace(isStopped=lambda: False))
    context = SimpleNamespace(_jsc=None if is_stopped else java_context, **context_has)
    return SimpleNamespace(version="4.2.1", conf=SimpleNamespace(get=get), sparkContext=context)

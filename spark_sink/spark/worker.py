"""What a task does for its process, a Python worker of Spark."""

from __future__ import annotations

import gc
from functools import cache

__all__ = ["settle"]


@cache
def settle() -> None:
    """Let the garbage collector leave out what this process has by now. Call this at the end of a task; later calls do nothing.

    Spark keeps the process for later tasks, and collects its garbage after each of them (pyspark/daemon.py). To look at the objects
    of all imported modules takes 40 ms of CPU time.
    """
    gc.freeze()

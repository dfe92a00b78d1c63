"""Metrics as data: what each one is called, and its value now. No I/O, and no library of a monitoring system.

    SEALS = Metric("cdcpipe_seal_duration_seconds", "histogram", "How long it took to make a segment durable.")
    seals = Histogram()
    with seals.timed():
        ...
    SEALS.reading(seals)        # what cdcpipe/exposition.py shows

Names follow the conventions of Prometheus: ``cdcpipe_``, the thing, the unit. A counter's name gets ``_total`` at its end.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = [
    "PIPELINE",
    "POSITION",
    "SPILL",
    "STREAM_BYTES",
    "STREAM_RECORDS",
    "STREAM_TRANSACTIONS",
    "Histogram",
    "Metric",
    "Reading",
]

_BOUNDS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)


class Histogram:
    """Counts durations by their length. Any thread may add one. Not for something that happens once for each record."""

    def __init__(self, bounds_s: Sequence[float] = _BOUNDS_S) -> None:
        self._bounds_s = bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_s = 0.0
        self._lock = threading.Lock()

    def add(self, seconds: float) -> None:
        """Count a duration."""
        with self._lock:
            self._counts[bisect_left(self._bounds_s, seconds)] += 1
            self._sum_s += seconds

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count how long the block takes, unless it raises an error."""
        began = time.monotonic()
        yield
        self.add(time.monotonic() - began)

    def buckets(self) -> tuple[list[tuple[float, int]], float]:
        """Return how many durations were at most as long as each bound, the last bound being infinite; and their sum."""
        with self._lock:
            counts, sum_s = list(accumulate(self._counts)), self._sum_s
        return list(zip((*self._bounds_s, float("inf")), counts, strict=True)), sum_s


@dataclass(frozen=True, slots=True)
class Metric:
    """What a metric is called, and what it means. A counter's ``name`` is without ``_total``."""

    name: str
    kind: Literal["gauge", "counter", "histogram", "info"]
    help: str
    labels: tuple[str, ...] = ()

    @property
    def full_name(self) -> str:
        """The name under which a monitoring system knows the metric."""
        return self.name + {"counter": "_total", "info": "_info"}.get(self.kind, "")

    def reading(self, value: float | Histogram, *labels: str) -> Reading:
        """Return a value of this metric."""
        assert len(labels) == len(self.labels)
        return Reading(self, labels, value)


class Reading(NamedTuple):
    """The value of a metric at this moment, for these values of its labels."""

    metric: Metric
    labels: tuple[str, ...]
    value: float | Histogram


# --- what both programs show ---

PIPELINE: Final = Metric("cdcpipe_pipeline", "info", "What runs.", ("version", "command", "slot"))
POSITION: Final = Metric(
    "cdcpipe_position_bytes", "gauge", "The position in the WAL, an LSN as a number, that each stage has.", ("stage",)
)
STREAM_RECORDS: Final = Metric("cdcpipe_stream_records", "counter", "Records of the stream since the start.")
STREAM_TRANSACTIONS: Final = Metric("cdcpipe_stream_transactions", "counter", "Transactions of the stream since the start.")
STREAM_BYTES: Final = Metric(
    "cdcpipe_stream_bytes", "counter", "Bytes of records written since the start: to the pipe, or with land and run to the log."
)
SPILL: Final = Metric(
    "cdcpipe_spill_bytes", "gauge", "Bytes of transactions in progress that are in files, because memory has no room."
)

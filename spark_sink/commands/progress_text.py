"""What the progress line says: functions from a progress to text, which do no I/O.

A line consists of parts. If the line is wider than the terminal, `fit` leaves the least important parts out:

    fit([Part("tables 1:0/16B3748"), Part("1,234 rows/s", 2), Part("lag 3.0 KiB 0.4 s", 1)], 40)
    'tables 1:0/16B3748, lag 3.0 KiB 0.4 s'

The width None means that every part is shown, as in a log.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cdcpipe.units import counted, format_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spark_sink.client.slot_monitor import Lag
    from spark_sink.launcher.launcher import Progress
    from spark_sink.pipeline.pipeline import PipelineProgress
    from spark_sink.snapshot.copy import SnapshotProgress

__all__ = ["Part", "Rates", "bar", "fit", "log_text", "snapshot_text", "step_text", "tables_text"]

_BAR_WIDTH = 20


class Part(NamedTuple):
    """A part of a line. Parts with a high ``rank`` are left out first."""

    text: str
    rank: int = 0


class Rates(NamedTuple):
    """How many rows the tables get, and how many records the log gets, each second."""

    rows: float
    records: float


def fit(parts: Sequence[Part], width: int | None) -> str:
    """Return the parts as one line of at most ``width`` characters, the less important ones left out as necessary."""
    kept = list(parts)
    text = ", ".join(part.text for part in kept)
    if width is None:
        return text
    while len(text) > width and len(kept) > 1:
        kept.remove(max(reversed(kept), key=lambda part: part.rank))
        text = ", ".join(part.text for part in kept)
    return text[:width]


def bar(part: float, width: int = _BAR_WIDTH) -> str:
    """Return a bar for a part of the work, from 0 to 1: ``[#####---------------]  25%``."""
    part = min(max(part, 0.0), 1.0)
    done = int(part * width)
    return f"[{'#' * done}{'-' * (width - done)}] {int(part * 100):3}%"


def step_text(step: str, elapsed_s: float, width: int | None) -> str:
    """Return the line of a step before there is anything to count: ``starting Spark, 3 s``."""
    return fit([Part(step), Part(f"{elapsed_s:.0f} s", 1)], width)


def snapshot_text(progress: SnapshotProgress, width: int | None) -> str:
    """Return the line of a snapshot. With a width it has a bar, and says which table it is at."""
    elapsed_s = max(progress.elapsed_s, 1e-3)
    rows = counted(progress.rows, "row")
    if progress.row_estimate > progress.rows:
        rows += f" of about {progress.row_estimate:,}"
    if width is None:
        parts = [Part(f"snapshot: {progress.tables_done} of {counted(progress.tables, 'table')}")]
    else:
        table = min(progress.tables_done + 1, progress.tables)
        parts = [Part(f"snapshot: table {table} of {progress.tables}")]
        parts.append(Part(bar(progress.chunks_done / progress.chunks if progress.chunks else 1.0), 1))
    parts += [Part(rows, 4), Part(f"{progress.rows / elapsed_s:,.0f} rows/s", 3)]
    left = progress.chunks - progress.chunks_done
    if left > 0 and progress.chunks_done:
        left_s = elapsed_s * left / progress.chunks_done
        parts.append(Part(f"{left_s / 60:.0f} min left" if left_s >= 120 else f"{left_s:.0f} s left", 2))
    return fit(parts, width)


def log_text(progress: Progress, lag: Lag | None, records_per_s: float, width: int | None) -> str:
    """Return the line of a launcher without tables."""
    position = Part(f"position {progress.position or '-'}")
    return fit([position, *([] if lag is None else [_lag(lag)]), *_log_parts(progress, records_per_s, 3)], width)


def tables_text(
    progress: Progress, tables: PipelineProgress, lag: Lag | None, rates: Rates, width: int | None, step: str = ""
) -> str:
    """Return the line of a run. ``progress`` is its launcher's; ``step`` is what the run does at its end."""
    parts = [
        Part(f"tables {tables.position or '-'}"),
        *([Part(step, 1)] if step else []),
        Part(f"{rates.rows:,.0f} rows/s", 2),
        Part("lag unknown", 1) if lag is None else _lag(lag),
        Part(f"{counted(tables.changes, 'change')} in {counted(tables.tables, 'table')}", 3),
    ]
    if tables.messages:
        parts.append(Part(counted(tables.messages, "message"), 5))
    parts.append(Part(f"log {progress.position or '-'}", 5))
    return fit([*parts, *_log_parts(progress, rates.records, 6)], width)


def _log_parts(progress: Progress, records_per_s: float, rank: int) -> list[Part]:
    """Return what the log has received, as parts with this rank or higher ones; restarts come before."""
    parts = [
        Part(counted(progress.transactions, "transaction"), rank + 1),
        Part(counted(progress.records, "record"), rank + 3),
        Part(format_size(progress.size), rank + 2),
        Part(f"{records_per_s:,.0f} records/s", rank),
    ]
    if progress.open_size:
        parts.append(Part(f"open {format_size(progress.open_size)}", rank + 4))
    if progress.restarts:
        parts.append(Part(f"{progress.restarts} restarts", rank - 2))
    return parts


def _lag(lag: Lag) -> Part:
    return Part(f"lag {format_size(lag.bytes)} {'≥ ' if lag.at_least else ''}{lag.seconds:.1f} s", 1)

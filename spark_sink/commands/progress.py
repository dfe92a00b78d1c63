"""Shows the progress of a command on stderr: a live line on a terminal, elsewhere a line from time to time."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

import click

from cdcpipe.units import format_size

if TYPE_CHECKING:
    from spark_sink.client.slot_monitor import Lag
    from spark_sink.launcher.launcher import Progress
    from spark_sink.pipeline.pipeline import PipelineProgress
    from spark_sink.pipeline.runner import RunProgress
    from spark_sink.snapshot.copy import SnapshotProgress

__all__ = ["ProgressLine", "RunLine", "SnapshotLine"]


_LOG_INTERVAL_S = 10.0


_TERMINAL_INTERVAL_S = 0.2


_LOOK_INTERVAL_S = 1.0
"""How often to call ``update`` where lines are shown more rarely. The caller must still notice a signal soon."""


class _LiveLine:
    """A line on stderr with the progress. On a terminal it is updated in place; elsewhere changes are printed now and then."""

    def __init__(self, now: float) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._shown_at = now
        self._shown = ""

    @property
    def interval_s(self) -> float:
        """How often to call ``update``, which shows a line only when one is due."""
        return _TERMINAL_INTERVAL_S if self._is_terminal else _LOOK_INTERVAL_S

    def _is_due(self, now: float) -> bool:
        return now - self._shown_at >= (_TERMINAL_INTERVAL_S if self._is_terminal else _LOG_INTERVAL_S)

    def _show(self, text: str, now: float, *, is_last: bool) -> None:
        self._shown_at = now
        if self._is_terminal:
            self.clear()
            click.echo(text if is_last else text[: os.get_terminal_size(2).columns - 1], err=True, nl=is_last)
        elif is_last or text != self._shown:
            click.echo(text, err=True)
        self._shown = text

    def clear(self) -> None:
        """Clear the line on a terminal, before other output."""
        if self._is_terminal:
            click.echo("\r\x1b[K", err=True, nl=False)


class _Rate:
    """The growth of a count per second, since the last update or since the beginning."""

    def __init__(self, now: float) -> None:
        self._began_at = self._at = now
        self._count = 0
        self._rate = 0.0

    def update(self, count: int, now: float, *, is_last: bool) -> float:
        """Return the rate since the last update; with ``is_last`` the rate since the beginning."""
        if is_last:
            return count / max(now - self._began_at, 1e-3)
        if now > self._at:
            self._rate = (count - self._count) / (now - self._at)
            self._at, self._count = now, count
        return self._rate


class ProgressLine(_LiveLine):
    """Shows the progress of a launcher, and of the tables if there are any."""

    def __init__(self, now: float) -> None:
        super().__init__(now)
        self._records, self._rows = _Rate(now), _Rate(now)

    def update(
        self,
        progress: Progress,
        now: float,
        *,
        tables: PipelineProgress | None = None,
        lag: Lag | None = None,
        is_last: bool = False,
    ) -> None:
        """Show the progress if a line is due. ``lag`` is the lag of the tables, or without tables of the log; None if unknown."""
        if not is_last and not self._is_due(now):
            return
        parts = []
        if tables is not None:
            rows = tables.changes + tables.messages
            parts += [
                f"tables {tables.position or '-'}",
                f"{self._rows.update(rows, now, is_last=is_last):,.0f} rows/s",
                "lag unknown" if lag is None else _lag_text(lag),
                f"{tables.changes:,} changes in {tables.tables} tables",
                *([f"{tables.messages:,} messages"] if tables.messages else []),
            ]
        parts += [
            f"{'position' if tables is None else 'log'} {progress.position or '-'}",
            *([] if lag is None or tables is not None else [_lag_text(lag)]),
            f"{progress.transactions:,} transactions",
            f"{progress.records:,} records",
            format_size(progress.size),
            f"{self._records.update(progress.records, now, is_last=is_last):,.0f} records/s",
        ]
        if progress.open_size:
            parts.append(f"open {format_size(progress.open_size)}")
        if progress.restarts:
            parts.append(f"{progress.restarts} restarts")
        self._show(", ".join(parts), now, is_last=is_last)


def _lag_text(lag: Lag) -> str:
    return f"lag {format_size(lag.bytes)} {'≥ ' if lag.at_least else ''}{lag.seconds:.1f} s"


class SnapshotLine(_LiveLine):
    """Shows the progress of a snapshot."""

    def update(self, progress: SnapshotProgress, now: float, *, is_last: bool = False) -> None:
        """Show the progress if a line is due."""
        if is_last or self._is_due(now):
            self._show(self._text(progress), now, is_last=is_last)

    def _text(self, progress: SnapshotProgress) -> str:
        elapsed_s = max(progress.elapsed_s, 1e-3)
        parts = [f"snapshot: {progress.tables_done} of {progress.tables} tables", f"{progress.rows:,} rows"]
        if progress.row_estimate > progress.rows:
            parts[-1] += f" of about {progress.row_estimate:,}"
        parts.append(f"{progress.rows / elapsed_s:,.0f} rows/s")
        left = progress.chunks - progress.chunks_done
        if left and progress.chunks_done:
            left_s = elapsed_s * left / progress.chunks_done
            parts.append(f"{left_s / 60:.0f} min left" if left_s >= 120 else f"{left_s:.0f} s left")
        return ", ".join(parts)


class RunLine:
    """Shows the progress of a run: first of its snapshot, if there is one, then of the tables."""

    def __init__(self) -> None:
        now = time.monotonic()
        self._tables, self._snapshot = ProgressLine(now), SnapshotLine(now)
        self._is_snapshot_shown = False

    @property
    def interval_s(self) -> float:
        """How often to call ``update``."""
        return self._tables.interval_s

    def update(self, progress: RunProgress, *, is_last: bool = False) -> None:
        """Show the progress if a line is due."""
        now = time.monotonic()
        if progress.tables is None:
            if progress.snapshot is not None:
                self._snapshot.update(progress.snapshot, now)
            return
        if progress.snapshot is not None and not self._is_snapshot_shown:
            self._snapshot.update(progress.snapshot, now, is_last=True)
            self._is_snapshot_shown = True
        self._tables.update(progress.launcher, now, tables=progress.tables, lag=progress.lag, is_last=is_last)

    def clear(self) -> None:
        """Clear the line on a terminal, before other output."""
        self._tables.clear()

"""Shows the progress of a command on stderr: a live line on a terminal, elsewhere a line from time to time.

What the line says is in progress_text.py.
"""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Self

from cdcpipe import logs
from cdcpipe.printable import printable
from spark_sink.commands.progress_text import Rates, log_text, snapshot_text, step_text, tables_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from spark_sink.client.slot_monitor import Lag
    from spark_sink.launcher.launcher import Progress
    from spark_sink.pipeline.pipeline import PipelineProgress
    from spark_sink.pipeline.runner import RunProgress
    from spark_sink.snapshot.copy import SnapshotProgress

__all__ = ["LiveLine", "ProgressLine", "RunLine", "SnapshotLine", "terminal_width"]


_LOG_INTERVAL_S = 10.0


_TERMINAL_INTERVAL_S = 0.2


_LOOK_INTERVAL_S = 1.0
"""How often to call ``update`` where lines are shown more rarely. The caller must still notice a signal soon."""


def terminal_width() -> int:
    """Return how many characters a line on the terminal may have; the cursor needs the last column."""
    try:
        columns = os.get_terminal_size(2).columns
    except OSError:  # the terminal was closed
        columns = 0
    return (columns or 80) - 1


class LiveLine:
    """A line on stderr with the progress. On a terminal it is updated in place; elsewhere changes are printed now and then."""

    def __init__(self, now: float) -> None:
        self.is_terminal = sys.stderr.isatty() and not logs.is_json()
        self._shown_at = now
        self._shown = ""

    @property
    def interval_s(self) -> float:
        """How often to call ``update``, which shows a line only when one is due."""
        return _TERMINAL_INTERVAL_S if self.is_terminal else _LOOK_INTERVAL_S

    def is_due(self, now: float) -> bool:
        """Tell whether enough time has passed since the last line."""
        return now - self._shown_at >= (_TERMINAL_INTERVAL_S if self.is_terminal else _LOG_INTERVAL_S)

    def write(self, text: Callable[[int | None], str], now: float, *, is_last: bool) -> None:
        """Show the text for the terminal's width. The last line stays and has all parts, as everything in a log has."""
        self._shown_at = now
        is_live = self.is_terminal and not is_last
        width = terminal_width() if is_live else None
        line = printable(text(width))[:width]
        if self.is_terminal:
            self.clear()
            logs.write(f"{line}\n" if is_last else line)
        elif line != self._shown:
            logs.show(logs.line("info", "progress", line) if logs.is_json() else line)
        self._shown = line

    def clear(self) -> None:
        """Clear the line on a terminal, before other output."""
        if self.is_terminal:
            logs.write("\r\x1b[K")


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


class ProgressLine(LiveLine):
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
        step: str = "",
        is_last: bool = False,
    ) -> None:
        """Show the progress if a line is due. ``lag`` is the lag of the tables, or without tables of the log; None if unknown."""
        if not is_last and not self.is_due(now):
            return
        records = self._records.update(progress.records, now, is_last=is_last)
        if tables is None:
            self.write(lambda width: log_text(progress, lag, records, width), now, is_last=is_last)
        else:
            rates = Rates(self._rows.update(tables.changes + tables.messages, now, is_last=is_last), records)
            self.write(lambda width: tables_text(progress, tables, lag, rates, width, step), now, is_last=is_last)


class SnapshotLine(LiveLine):
    """Shows the progress of a snapshot."""

    def update(self, progress: SnapshotProgress, now: float, *, is_last: bool = False) -> None:
        """Show the progress if a line is due."""
        if is_last or self.is_due(now):
            self.write(lambda width: snapshot_text(progress, width), now, is_last=is_last)


class StepLine(LiveLine):
    """Shows on a terminal what a command is doing before there is a progress; elsewhere nothing."""

    def __init__(self, now: float) -> None:
        super().__init__(now)
        self._step, self._begun_at = "", now

    def update(self, step: str, now: float) -> None:
        """Show the step: a new one at once, the same one if a line is due."""
        if not self.is_terminal or (step == self._step and not self.is_due(now)):
            return
        if step != self._step:
            self._step, self._begun_at = step, now
        self.write(lambda width: step_text(step, now - self._begun_at, width), now, is_last=False)


class RunLine:
    """Shows the progress of a run: what it does before Spark has started, then its snapshot, if there is one, then the tables."""

    def __init__(self) -> None:
        now = time.monotonic()
        self._step, self._snapshot, self._tables = StepLine(now), SnapshotLine(now), ProgressLine(now)
        self._is_snapshot_shown = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    @property
    def interval_s(self) -> float:
        """How often to call ``update``."""
        return self._tables.interval_s

    def say(self, step: str) -> None:
        """Show what the command does now, on a terminal."""
        self._step.update(step, time.monotonic())

    def update(self, progress: RunProgress, *, is_last: bool = False) -> None:
        """Show the progress if a line is due."""
        now = time.monotonic()
        if progress.tables is None:
            if progress.snapshot is not None and progress.snapshot.chunks:
                self._snapshot.update(progress.snapshot, now)
            elif not is_last:
                self._step.update(progress.step, now)
            return
        if progress.snapshot is not None and not self._is_snapshot_shown:
            self._snapshot.update(progress.snapshot, now, is_last=True)
            self._is_snapshot_shown = True
        step = "" if is_last else progress.step
        self._tables.update(progress.launcher, now, tables=progress.tables, lag=progress.lag, step=step, is_last=is_last)

    def clear(self) -> None:
        """Clear the line on a terminal, before other output."""
        self._tables.clear()

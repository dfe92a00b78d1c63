"""The staging log for a caller that asks often: it is listed again only if it may have changed. No pyspark, no pyarrow."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from spark_sink.staging.log import Chain, Position, Segment, epoch_directory, epoch_numbers, read_chain, segments_after

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = ["LogView"]

_SAME_TIME_NS = 3_000_000_000
"""Two changes of a directory at least this far apart have different modification times, in any file system."""
_LISTING_S = 10.0
"""How long a listing may be used again while the directory's time is unchanged. The clock of a file server may differ from ours."""


class LogView:
    """The log for a caller that asks often: lists it again only if one of its directories has changed, and now and then."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._times: dict[Path, int] = {}
        """The directories' modification times at the listing; empty if the log has to be listed again in any case."""
        self._listed_at = 0.0
        self._after_lsn = 0
        """The newest position that was asked for: the listing has no segments up to there."""
        self._chain: Chain = [], [], None

    def end(self) -> Position | None:
        """Return the same as `log_end`."""
        return self._look()[2]

    def segments(self, after: Position | None = None) -> list[Segment]:
        """Return, or raise, the same as `list_segments`."""
        lsn = 0 if after is None else after.lsn
        if lsn < self._after_lsn:
            self._times = {}
        self._after_lsn = lsn
        return segments_after(self._root, self._look(), after)

    def _look(self) -> Chain:
        is_new = time.monotonic() - self._listed_at < _LISTING_S
        if not (is_new and self._times and self._times == _changed_ns(self._times)):
            # An epoch's directory may exist before its epoch.json. So watch all directories, not only described epochs.
            directories = [epoch_directory(self._root, number) for number in epoch_numbers(self._root)]
            times, self._times = _changed_ns([self._root, *directories]), {}
            self._listed_at = time.monotonic()
            self._chain = read_chain(self._root, self._after_lsn)
            # A change during the listing and a change after it may have the same time: then the times prove nothing.
            if times and time.time_ns() - max(times.values()) > _SAME_TIME_NS:
                self._times = times
        return self._chain


def _changed_ns(directories: Iterable[Path]) -> dict[Path, int]:
    """Return the directories' modification times; an empty dict if one of them does not exist any more."""
    try:
        return {directory: directory.stat().st_mtime_ns for directory in directories}
    except FileNotFoundError:
        return {}

"""Commit times of the transactions in a staging log, read from the indexes of its segments."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdcpipe.pgoutput.messages import UNIX_2000_US

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spark_sink.staging.index import SegmentIndex
    from spark_sink.staging.log import Segment

__all__ = ["CommitTimes"]


class CommitTimes:
    """Looks up commit times of the log, in seconds since 1970. The answers are None if numpy or pyarrow are not installed."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._segments = segments
        self._loaded: dict[Segment, SegmentIndex | None] = {}

    def newest(self, lsn: int) -> float | None:
        """Return the commit time of the last transaction that ends at or before ``lsn``."""
        for segment in reversed(self._segments):
            if segment.start_lsn < lsn and (index := self._index(segment)) is not None:
                count = int(index.end_lsn.searchsorted(lsn, side="right"))
                if count:
                    return _seconds(index, count - 1)
        return None

    def oldest_after(self, lsn: int) -> float | None:
        """Return the commit time of the first transaction that ends after ``lsn``."""
        for segment in self._segments:
            if segment.end_lsn > lsn and (index := self._index(segment)) is not None:
                first = int(index.end_lsn.searchsorted(lsn, side="right"))
                if first < len(index.end_lsn):
                    return _seconds(index, first)
        return None

    def _index(self, segment: Segment) -> SegmentIndex | None:
        if segment not in self._loaded:
            self._loaded[segment] = _load(segment)
        return self._loaded[segment]


def _load(segment: Segment) -> SegmentIndex | None:
    try:
        from spark_sink.staging import index as segment_index
    except ImportError:  # numpy or pyarrow is not installed
        return None
    from spark_sink.staging.log import StagingError

    try:
        return segment_index.load(segment.path)
    except (OSError, StagingError):
        if segment.path.exists():
            raise
        return None  # removed just now, because all readers have read it


def _seconds(index: SegmentIndex, transaction: int) -> float:
    return float(index.commit_time_us[transaction] + UNIX_2000_US) / 1e6

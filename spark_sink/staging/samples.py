"""The last day of a launcher or a run: how much came, and how far the tables were behind. For ``status --html``. No pyspark.

`run` and `land` add a sample each minute to ``history.jsonl`` in the staging directory, a JSON object on each line. The file is a
note for people: it is not made durable, it is cut off after a day, and a line that cannot be read is left out.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

from spark_sink.files.local import DamagedFileError, open_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["Counts", "Recorder", "Sample", "read"]

_logger = logging.getLogger(__name__)

_NAME: Final = "history.jsonl"
_INTERVAL_S: Final = 60.0
_FIRST_S: Final = 10.0
"""When the first sample is written: a short run leaves one, too."""
_KEPT: Final = 1440
"""How many samples are kept when the file is cut off: a day. It is cut off at twice this number."""


@dataclass(frozen=True, slots=True)
class Counts:
    """What a program has counted since its start, and how far its last stage is behind the server (None if unknown)."""

    records: int
    bytes: int
    changes: int | None = None
    lag_bytes: int | None = None
    lag_s: float | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """What came in the ``seconds`` before ``time`` (since 1970), and the lag at its end. ``changes`` are None without tables."""

    time: float
    seconds: float
    records: int
    bytes: int
    changes: int | None
    lag_bytes: int | None
    lag_s: float | None


class Recorder:
    """Writes the samples of one program. The owner of the staging directory's lock calls ``tick`` at each turn of its loop.

    ``before`` is what the program has counted until ``now``. It does not come into the samples: it may have come in hours, while
    the tables were copied.
    """

    def __init__(
        self, root: Path, now: float, before: Counts, *, interval_s: float = _INTERVAL_S, first_s: float = _FIRST_S
    ) -> None:
        self._path = root / _NAME
        self._interval_s = interval_s
        self._since = now
        self._due_at = now + first_s
        self._before = before
        self._has_failed = False

    def tick(self, now: float, time_s: float, count: Callable[[], Counts]) -> None:
        """Write a sample if one is due. ``now`` is `time.monotonic()`, ``time_s`` is in seconds since 1970."""
        if now < self._due_at:
            return
        counts, before = count(), self._before
        changes = None if counts.changes is None else counts.changes - (before.changes or 0)
        sample = Sample(
            time=round(time_s, 3),
            seconds=round(now - self._since, 3),
            records=counts.records - before.records,
            bytes=counts.bytes - before.bytes,
            changes=changes,
            lag_bytes=counts.lag_bytes,
            lag_s=None if counts.lag_s is None else round(counts.lag_s, 3),
        )
        self._since, self._due_at, self._before = now, now + self._interval_s, counts
        try:
            self._write(json.dumps(asdict(sample)) + "\n")
        except (OSError, DamagedFileError) as ex:  # a full disk, which will end the program elsewhere
            if not self._has_failed:
                said = f"{self._path}: {ex.strerror}" if isinstance(ex, OSError) else ex.message
                _logger.warning("the history of status --html is not written: %s", said)
            self._has_failed = True

    def _write(self, line: str) -> None:
        with open(open_file(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW), "r+b") as stream:
            lines = stream.readlines()
            if len(lines) >= 2 * _KEPT:
                stream.truncate(0)
                stream.writelines(lines[-_KEPT:])
            stream.write(line.encode())


def read(root: Path) -> list[Sample]:
    """Return the samples in order of their time; empty if none were written."""
    try:
        fd = open_file(root / _NAME, os.O_RDONLY)
    except FileNotFoundError:
        return []
    with open(fd, errors="replace") as stream:
        lines = stream.readlines()
    found = []
    for line in lines:
        try:
            found.append(Sample(**json.loads(line)))
        except (ValueError, TypeError):  # half a line, after a crash; or one of another version
            continue
    return sorted(found, key=lambda sample: sample.time)

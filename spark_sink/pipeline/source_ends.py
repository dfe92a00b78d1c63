"""Decides whether to start a stream of segments again after the Python process of its source has failed. No Spark.

Spark runs the source of a stream in a Python process of its own. This process only lists segments, so its end loses nothing: a new
stream goes on from the checkpoint. The process may start too late for Spark on a busy machine. The system may kill it for lack of
memory.
"""

from __future__ import annotations

import re
from typing import Final

from cdcpipe.retry import RetryPolicy

__all__ = ["ENDED", "SourceEnds", "has_ended"]

_LATE: Final = "Python worker failed to connect back"
"""Spark's error if the process has not started within ten seconds. This limit can't be changed."""

_LOST: Final = re.compile(
    r"^Caused by: java\.(?:io\.EOFException|io\.IOException|net\.SocketException|nio\.channels\.\w+)\b.*\n"
    r"(?:\s+at .*\n)*?\s+at [\w.]*\.PythonStreaming\w*Runner\.",
    re.MULTILINE,
)
"""In Java's stack trace: the pipe to the process was closed. An error that the source raises has another class."""

_STARTS: Final = RetryPolicy(attempts=11)
"""How often to start a stream if no micro-batch was written in between."""

ENDED: Final = "the Python process that finds new segments for Spark has ended"


def has_ended(ex: BaseException) -> bool:
    """Tell whether Spark's error says that the running process has ended. Spark gives the reason in the stack trace only."""
    return _LOST.search(str(getattr(ex, "_stackTrace", None) or "")) is not None


class SourceEnds:
    """Counts the starts of one pipeline's stream that were in vain."""

    def __init__(self) -> None:
        self._failures = 0
        self._batches = 0

    def warning(self, ex: BaseException, batches: int) -> str | None:
        """Return what to say before the stream is started again; None if it is not to be.

        ``batches`` is the number of micro-batches that the pipeline has written.
        """
        if _LATE in str(ex):
            said = "a Python process took Spark more than ten seconds to start; beginning again"
        elif has_ended(ex):
            said = f"{ENDED} (the system's log tells whether it lacked memory: dmesg); starting it again"
        else:
            return None
        if batches > self._batches:
            self._failures, self._batches = 0, batches
        self._failures += 1
        return None if _STARTS.pause_s(self._failures) is None else said

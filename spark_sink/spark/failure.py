"""Explains an error of Spark that no other part of cdcpipe explains: its reason in one line, and a hint. No pyspark.

    explained(Py4JJavaError(…))
    Spark failed: No space left on device
    hint: the file system is full, of bytes (df) or of files (df -i): make room; then start again

An error that is not of Spark stays as it is.
"""

from __future__ import annotations

from typing import Final

from cdcpipe.errors import CdcpipeError
from spark_sink.files.system_hints import hint_in
from spark_sink.spark.failed_start import reason_of

__all__ = ["SparkFailedError", "explained"]

_PACKAGES: Final = ("py4j", "pyspark")
_OTHERS: Final = "-v shows where this happened. If nothing on this machine is the cause, it is a defect of cdcpipe"


class SparkFailedError(CdcpipeError):
    """A call to Spark failed."""


def explained(ex: BaseException) -> BaseException:
    """Return the error to raise for ``ex``: if Spark raised it, one with its reason and a hint, otherwise ``ex`` itself."""
    if type(ex).__module__.partition(".")[0] not in _PACKAGES:
        return ex
    reason = reason_of(ex)
    error = SparkFailedError(f"Spark failed: {reason}", hint=hint_in(reason) or _OTHERS)
    error.__cause__ = ex
    return error

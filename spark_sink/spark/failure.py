"""Explains an error of Spark that no other part of cdcpipe explains: its reason in one line, and a hint. No pyspark.

    explained(Py4JJavaError(…))
    Spark failed: No space left on device
    hint: the file system is full, of bytes (df) or of files (df -i): make room; then start again

An error that is not of Spark stays as it is.

    reason_of(ex)       # the reason alone, for a message of one's own
    said_of(ex)         # the same of any error that a call into Spark may raise
"""

from __future__ import annotations

import re
from typing import Final

from cdcpipe.error_texts import SETTING, unexpected
from cdcpipe.errors import CdcpipeError
from spark_sink.files.system_hints import WORKER_ENDED, hint_in
from spark_sink.spark import java_texts

__all__ = ["SparkFailedError", "explained", "raised_of", "reason_of", "said_of", "text_of"]

_CAUSE: Final = re.compile(r"^(?:Caused by)?: (?:(?:[\w$]+\.)+([\w$]+)(?:: |$))?(.*)$", re.MULTILINE)
"""A Java exception in the text of a stack trace: its class and its message. Either may be missing."""
_WITHHELD: Final = f"(its text may have values of rows: {SETTING}=1 shows it)"
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


def raised_of(ex: BaseException) -> tuple[str, str] | None:
    """Return class and message of an exception that a Python worker raised, from the traceback in Spark's error; None if none.

    A message that may have values of rows is left out: it is then the class.
    """
    raised = re.findall(r"^((?:[a-z_]+\.)*)([A-Z]\w*(?:Error|Invalid)): (.+)$", str(ex), re.MULTILINE)
    if not raised:
        return None
    module, name, message = raised[-1]
    return name, message if java_texts.is_shown(module, name) else f"{name} {_WITHHELD}"


def reason_of(ex: BaseException) -> str:
    """Return the reason of an error in one line, without values of rows. Spark may have wrapped the error."""
    if raised := raised_of(ex):
        return raised[1]
    if (condition := java_texts.condition_of(str(ex))) is not None:
        return f"[{condition}] {_WITHHELD}"
    kind = type(ex)
    if not java_texts.is_shown(f"{kind.__module__}.", kind.__name__):
        return f"{unexpected(ex)} {_WITHHELD}"
    return text_of(ex)


def text_of(ex: BaseException) -> str:
    """Return the reason in one line, as `reason_of` does, of an error that cannot have values of rows: none are left out."""
    text = str(ex).strip()
    if WORKER_ENDED in text:  # after it, Spark gives advice for those who look for a defect in the worker
        return WORKER_ENDED
    # The first line names the call from Python. The lines of Java's exceptions follow, with their causes.
    causes = [message if message and java_texts.is_of_java_shown(kind) else kind for kind, message in _CAUSE.findall(text)]
    if not causes:
        return text.partition("\n")[0] or type(ex).__name__
    return causes[0] if causes[-1] in causes[0] else f"{causes[0].rstrip('.')}: {causes[-1]}"


def said_of(ex: BaseException) -> str:
    """Return what to say of an error of cdcpipe, or of Spark: the message, or the reason."""
    return ex.message if isinstance(ex, CdcpipeError) else reason_of(ex)

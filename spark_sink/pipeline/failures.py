"""What ends a pipeline: the errors of its own, and its own error for an error of Spark. No Spark."""

from __future__ import annotations

from cdcpipe.errors import CdcpipeError
from spark_sink.files.system_hints import hint_in
from spark_sink.pipeline.source_ends import ENDED, has_ended
from spark_sink.spark import callbacks
from spark_sink.spark.failure import reason_of

__all__ = ["PipelineError", "StoppedError", "own_error", "stopped_elsewhere"]


class PipelineError(CdcpipeError):
    """Spark failed during a micro-batch, or something else has stopped the query."""


class StoppedError(Exception):
    """A micro-batch was not written, because the pipeline was asked to stop. Raised once its query is stopping."""

    def __init__(self) -> None:
        # Spark takes an error with this text for the interruption that it caused itself.
        super().__init__("py4j.protocol.Py4JJavaError: An error occurred while calling stop: java.lang.InterruptedException")


def stopped_elsewhere(what: str, owner: str) -> PipelineError:
    """Return the error to raise if ``what`` has ended before its time and without an error, but ``owner`` has not stopped it."""
    return PipelineError(
        f"{what} was stopped, but not by {owner}, before the tables had all changes",
        hint=f"start again: nothing is lost. To end the work, call stop() of {owner}",
    )


def own_error(ex: BaseException) -> BaseException:
    """Return the project's own error for an error of Spark, in one line."""
    if isinstance(ex, CdcpipeError | StoppedError):
        return ex
    if (cause := callbacks.failure()) is not None:
        return cause
    reason = ENDED if has_ended(ex) else reason_of(ex)
    return PipelineError(f"the tables could not be brought further: {reason}", hint=hint_in(reason))

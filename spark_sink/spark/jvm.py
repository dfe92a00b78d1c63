"""Starts Spark's JVM, and keeps its stderr apart from ours (jvm_output.py). Under spark-submit the JVM runs already."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from cdcpipe.errors import CdcpipeError
from cdcpipe.threads import at_exit
from spark_sink.client import guard
from spark_sink.files.lock import share_with_child
from spark_sink.files.system_hints import hint_of
from spark_sink.spark import secret_settings
from spark_sink.spark.environment import naming_all_paths
from spark_sink.spark.home import GATEWAY, without_zip
from spark_sink.spark.jvm_output import JvmOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from pyspark import SparkContext

__all__ = [
    "END_S",
    "at_start",
    "has_ended",
    "lacks",
    "log_lost_connections",
    "may_have_been_asked",
    "output",
    "ran_out_of_memory",
    "show_held",
    "shown_on_error",
    "start",
]

_logger = logging.getLogger(__name__)

END_S: Final = 1.0
"""How long to wait after an error for an end of the JVM. If the JVM has ended, that is the cause of the error."""

_OUT_OF_MEMORY: Final = 52
"""The exit code of a JVM that Spark has ended because of an OutOfMemoryError (its SparkExitCode.OOM)."""

_output: JvmOutput | None = None


def output() -> JvmOutput | None:
    """Return what takes the JVM's stderr; None if this process has not started the JVM."""
    return _output


def show_held() -> None:
    """Show the last lines of the JVM's stderr that were held back, before an error that ends a command."""
    if _output is not None:
        _output.show_held()


def at_start() -> list[str]:
    """Return the last lines that the JVM wrote to its stderr before the session was ready."""
    return [] if _output is None else _output.at_start()


@contextmanager
def shown_on_error() -> Iterator[None]:
    """Call `show_held` if an error leaves the ``with``."""
    try:
        yield
    except Exception:
        show_held()
        raise


def start(settings: Mapping[str, str], on_step: Callable[[str], None] | None, locks: Iterable[Path] = ()) -> None:
    """Start Spark's JVM, unless it runs, in the process group that a watchdog ends when this process is gone.

    The JVM itself ends when its stdin ends. But it reads its stdin only after it has sent its port to this process. Without the
    watchdog, a JVM whose driver is killed before that would stay for ever.

    ``locks`` are lock files. What this process holds of them when it is killed, the JVM holds until it has ended.

    Settings with a secret are not in the JVM's command line (secret_settings.py): the caller sets them when it makes the session.
    """
    global _output  # noqa: PLW0603 - a process has one JVM
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway

    if SparkContext._gateway is not None or GATEWAY in os.environ:  # noqa: SLF001
        return
    conf = SparkConf(loadDefaults=False).setAll(list(secret_settings.for_command_line(settings).items()))
    _output = JvmOutput(holds=not _logger.isEnabledFor(logging.INFO), on_step=on_step)
    try:
        with naming_all_paths(), without_zip(settings["spark.master"]):
            kept = {"stderr": _output.writer, "pass_fds": _inherited(locks)}
            gateway = guard.start_in_group(lambda group: launch_gateway(conf, {"process_group": group, **kept}))
    finally:
        _output.close_writer()
    at_exit(_output.take)  # an entry of the log that came just before the end is shown
    SparkContext._ensure_initialized(gateway=gateway)  # noqa: SLF001 - the parameter that SparkContext() passes on
    _end_without_memory(SparkContext._jvm)  # noqa: SLF001 - the JVM just started


def _end_without_memory(java: Any) -> None:
    """Let an OutOfMemoryError end the JVM in any thread. Spark sees to that in tasks, and on executors, but not in its driver.

    There the error only ended its thread. If this was the scheduler's, every later job waited for ever. If it is, the JVM takes 30
    seconds to end: the application waits for that thread, and Hadoop sets this limit to it. With -XX:+ExitOnOutOfMemoryError, Java
    would also end where Spark handles the error: it then writes to disk what its memory has no room for.
    """
    handler = java.org.apache.spark.util.SparkUncaughtExceptionHandler(False)  # False: it only logs other exceptions
    java.java.lang.Thread.setDefaultUncaughtExceptionHandler(handler)


def lacks(class_name: str) -> bool:
    """Tell whether this process started a JVM before that can't load a class. A JVM takes up jars only when it starts.

    pyspark keeps its JVM when a session is stopped, and makes the next session in it.
    """
    from pyspark import SparkContext

    if SparkContext._gateway is None or GATEWAY in os.environ or has_ended(0):  # noqa: SLF001
        return False
    return not SparkContext._jvm.org.apache.spark.util.Utils.classIsLoadable(class_name)  # noqa: SLF001


def _inherited(locks: Iterable[Path]) -> list[int]:
    """Return the descriptors of the lock files for the JVM. If one can't be opened, that is no error of Spark."""
    try:
        return [fd for lock in locks for fd in share_with_child(lock)]
    except OSError as ex:
        raise CdcpipeError(f"cannot open the lock file {ex.filename} for Spark: {ex.strerror}", hint=hint_of(ex)) from ex


def has_ended(timeout_s: float) -> bool:
    """Wait until the JVM of this process has ended; return False if it still runs after ``timeout_s``, or if there is none."""
    from pyspark import SparkContext

    process = getattr(SparkContext._gateway, "proc", None)  # noqa: SLF001 - there is no other way to know it
    try:
        ended = process is not None and process.wait(timeout_s) is not None
    except subprocess.TimeoutExpired:
        return False
    if ended and _output is not None:
        _output.take()  # its last words come before our error
    return ended


def may_have_been_asked() -> bool:
    """Tell whether a request to stop may have ended the JVM of this process: neither SIGKILL nor a lack of memory did."""
    return _exit_code() not in (-signal.SIGKILL, _OUT_OF_MEMORY)


def ran_out_of_memory() -> bool:
    """Tell whether an OutOfMemoryError of Java has ended the JVM of this process."""
    return _exit_code() == _OUT_OF_MEMORY


def _exit_code() -> int | None:
    """Return the exit code of the JVM of this process; None if it runs, or if there is none."""
    from pyspark import SparkContext

    process = getattr(SparkContext._gateway, "proc", None)  # noqa: SLF001 - as in `has_ended`
    return None if process is None else process.poll()


def log_lost_connections(context: SparkContext) -> None:
    """Log it with -v alone if the JVM ends before the connection on which it sends accumulators. pyspark prints a traceback."""
    server = context._accumulatorServer  # noqa: SLF001 - there is no other way to it
    server.handle_error = lambda *_: _logger.info("a connection of the JVM has ended", exc_info=True)  # noqa: LOG014

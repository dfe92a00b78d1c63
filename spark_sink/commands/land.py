"""``cdcpipe-spark land``: runs the launcher without Spark."""

from __future__ import annotations

import logging
import time
from typing import Any

import click
import cloup

from cdcpipe.exposition import Address
from spark_sink.client.keyless import warnings_of
from spark_sink.client.slot_monitor import SlotMonitor
from spark_sink.commands.configured import ConfiguredCommand
from spark_sink.commands.options import (
    CONTEXT_SETTINGS,
    launcher_config,
    launcher_options,
    log_to_stderr,
    monitoring_options,
    verbose_option,
)
from spark_sink.commands.progress import ProgressLine
from spark_sink.commands.service_manager import ServiceManager
from spark_sink.commands.signals import on_signals
from spark_sink.launcher.launcher import Launcher
from spark_sink.metrics.collector import LandMetrics
from spark_sink.staging import last_error, samples

__all__ = ["command"]

_logger = logging.getLogger(__name__)

_EXAMPLE = """\b
Example:
  cdcpipe-spark land -d shop -S shop_cdc --publication shop -c --staging staging --available-now
"""


@cloup.command("land", cls=ConfiguredCommand, context_settings=CONTEXT_SETTINGS, epilog=_EXAMPLE)
@launcher_options
@monitoring_options
@verbose_option
def command(*, metrics: Address | None, **options: Any) -> None:
    """Take a slot's changes to a staging directory. Needs no Spark and no Java.

    The server gets a confirmation only for changes that are durable in the staging directory. SIGINT and SIGTERM end the command
    cleanly. After a kill, start the command again: it continues where the log ends.
    """
    config = launcher_config(**options)
    log_to_stderr(verbose=config.verbose)
    monitor = SlotMonitor(config.connection, config.slot, command=config.command)
    launcher = Launcher(config, monitor)
    launcher.logs_error = False  # the command's last line says it
    service = ServiceManager()
    stop = service.told_before(launcher.request_stop)
    with LandMetrics(launcher, monitor).served(metrics), on_signals(stop) as asked:
        line = ProgressLine(time.monotonic())
        try:
            if metrics is not None:
                monitor.start()  # before the slot is free: the launcher may wait for it
            launcher.start()
            if launcher.prepared is not None:
                for text in warnings_of(table for table in launcher.prepared.tables if table["refused"]):
                    _logger.warning("%s", text)
            service.tick(is_streaming=True)

            def count() -> samples.Counts:
                return samples.Counts(launcher.progress.records, launcher.progress.size)

            recorder = samples.Recorder(config.staging, time.monotonic(), count())
            while not launcher.wait(line.interval_s):
                progress, now = launcher.progress, time.monotonic()
                line.update(progress, now)
                service.tick(is_streaming=True)
                recorder.tick(now, time.time(), count)
        except Exception as ex:
            launcher.stop()  # it may still hold the lock of the directory: then nothing would be recorded
            last_error.note(config.staging, "land", ex)
            raise
        finally:
            line.clear()
            launcher.stop()
            monitor.stop()
        last_error.clear(config.staging)
        line.update(launcher.progress, time.monotonic(), is_last=True)
    if config.available_now and not launcher.is_complete:
        click.get_current_context().exit(asked.exit_code)

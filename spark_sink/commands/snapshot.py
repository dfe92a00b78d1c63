"""``cdcpipe-spark snapshot``: copies tables into an existing warehouse."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any

import click
import cloup

from cdcpipe.errors import CdcpipeError, InvalidArgumentsError
from cdcpipe.lsn import format_lsn
from cdcpipe.printable import printable
from cdcpipe.units import counted
from spark_sink.client.connection import connection_arguments
from spark_sink.client.exported import SnapshotError
from spark_sink.commands.configured import ConfiguredCommand
from spark_sink.commands.options import (
    CONTEXT_SETTINGS,
    connection_options,
    log_to_stderr,
    noted_staging_option,
    snapshot_options,
    verbose_option,
    warehouse_options,
)
from spark_sink.commands.progress import SnapshotLine
from spark_sink.commands.signals import on_signals
from spark_sink.commands.spark_options import spark_options, warehouse_session
from spark_sink.files.lock import hold_alone
from spark_sink.launcher.config import LauncherConfig
from spark_sink.snapshot.tables import SNAPSHOT_LOCK, TableSnapshot
from spark_sink.status.staging_directory import staging_directory
from spark_sink.warehouse.errors import WarehouseError
from spark_sink.warehouse.lock import lock_file
from spark_sink.warehouse.warehouse import Warehouse

_logger = logging.getLogger(__name__)


_EXAMPLE = """\b
Example:
  cdcpipe-spark snapshot -d shop --warehouse warehouse --table public.fruit
"""


@cloup.command("snapshot", cls=ConfiguredCommand, context_settings=CONTEXT_SETTINGS, epilog=_EXAMPLE)
@connection_options
@warehouse_options(
    cloup.option("--table", "tables", multiple=True, metavar="SCHEMA.NAME", help="Copy this published table; repeatable."),
    noted_staging_option,
)
@cloup.option_group("Snapshot", *snapshot_options)
@spark_options
@verbose_option
def command(
    *,
    warehouse: Path,
    tables: tuple[str, ...],
    staging: Path | None,
    snapshot_chunk_bytes: int,
    snapshot_hold_s: float | None,
    jars: Path | None,
    master: str | None,
    confs: tuple[str, ...],
    verbose: bool,
    **connection: Any,
) -> None:
    """Copy tables into an existing warehouse, anew or for the first time. A pipeline may run meanwhile.

    Each table gets the rows that one snapshot of the server shows, and follows the stream from there. The changelog gets these rows
    with _cdc_op 'snapshot', and one commit replaces the replica. After a kill, start the command again.
    """
    log_to_stderr(verbose=verbose)
    house = Warehouse.existing(warehouse)
    if not tables:
        raise InvalidArgumentsError(
            "no table to copy",
            hint=f"name each: --table SCHEMA.NAME; {warehouse} has {', '.join(map(str, house.tables())) or 'none'}",
        )
    source = house.source()
    staging = staging_directory(staging, house)
    if not source.publications:
        raise WarehouseError(f"{warehouse} does not say what its publications are", hint="start cdcpipe-spark run once")
    config = LauncherConfig(source.slot, staging, source.publications, connection_arguments(**connection), verbose=verbose)
    stopping = threading.Event()
    snapshot = TableSnapshot(config, house, tables, snapshot_chunk_bytes, snapshot_hold_s or 0.0)
    lock = house.local_root(staging) / SNAPSHOT_LOCK
    lock.parent.mkdir(parents=True, exist_ok=True)
    with hold_alone(lock) as is_alone, on_signals(stopping.set) as asked:
        if not is_alone:
            raise SnapshotError(
                f"tables in {warehouse} are being copied: by another cdcpipe-spark snapshot, or by run --heal",
                hint="wait until that has ended",
            )
        try:
            snapshot.prepare(stopping.is_set)
            locks = [lock_file(house.local_root(staging))]
            with warehouse_session(house, "cdcpipe snapshot", jars=jars, master=master, confs=confs, locks=locks) as spark:
                snapshot.start(spark, stopping.is_set)
                _show(snapshot, stopping)
                snapshot.stop()
        except InterruptedError:
            pass
        except CdcpipeError:
            if not stopping.is_set():
                raise
        finally:
            snapshot.stop()
    for table, (rows, position) in sorted(snapshot.copied.items()):
        click.echo(printable(f"{table}: {counted(rows, 'row')} as of {format_lsn(position.lsn)}"))
    left = [name for name in tables if name not in map(str, snapshot.copied)]
    if left:
        _logger.warning("stopped; not copied: %s", ", ".join(left))
        click.get_current_context().exit(asked.exit_code)


def _show(snapshot: TableSnapshot, stopping: threading.Event) -> None:
    """Show the progress of a snapshot until it ends, or until ``stopping`` is set."""
    line = SnapshotLine(time.monotonic())
    try:
        while not snapshot.wait(line.interval_s):
            if stopping.is_set():
                snapshot.stop()
            line.update(snapshot.progress, time.monotonic())
        line.update(snapshot.progress, time.monotonic(), is_last=True)
    finally:
        line.clear()

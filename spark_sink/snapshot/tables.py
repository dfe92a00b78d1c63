"""Tables copied anew, or for the first time, while the stream goes on or stands still: ``cdcpipe-spark snapshot``.

    with hold_alone(...):
    snapshot = TableSnapshot(config, warehouse, ["public.fruit"])
    snapshot.prepare(lambda: False)
    snapshot.start(spark, staging)          # returns at once
    snapshot.wait()

For tables that came into the publication later, whose slot was made without a snapshot, or in which old rows lack what the stream
does not say (ADD COLUMN … DEFAULT). The rows have the position of the snapshot, and the tables of the warehouse may be before
it or past it.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cdcpipe.errors import CdcpipeError, InvalidArgumentsError
from cdcpipe.lsn import format_lsn
from spark_sink.commands.options import (
    CONTEXT_SETTINGS,
    DIRECTORY,
    SIZE,
    SnapshotLine,
    connection_arguments,
    connection_options,
    log_to_stderr,
    snapshot_hold_option,
)
from spark_sink.commands.signals import on_signals
from spark_sink.commands.spark_options import spark_options, warehouse_option, warehouse_session
from spark_sink.launcher.launcher import LauncherConfig
from spark_sink.replica import merge as replica
from spark_sink.snapshot.copy import CHUNK_BYTES, Snapshot
from spark_sink.snapshot.initial import is_unfinished
from spark_sink.snapshot.plan import SnapshotError
from spark_sink.snapshot.table import table_of
from spark_sink.warehouse.lock import TableLock, hold_alone
from spark_sink.warehouse.warehouse import Warehouse, WarehouseError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from spark_sink.snapshot.plan import Plan, TablePlan
    from spark_sink.staging.log import Epoch

__all__ = ["TableSnapshot", "command"]

_logger = logging.getLogger(__name__)


class TableSnapshot(Snapshot):
    """Copies the tables named "schema.name", whatever the warehouse has of them. One at a time in a warehouse."""

    def __init__(
        self,
        config: LauncherConfig,
        warehouse: Warehouse,
        tables: Sequence[str],
        chunk_bytes: int = CHUNK_BYTES,
        hold_s: float = 0.0,
    ) -> None:
        super().__init__(config, warehouse, "snapshot_tables", chunk_bytes, hold_s)
        self._names = tuple(dict.fromkeys(tables))

    def prepare(self, is_stopping: Callable[[], bool]) -> None:
        """Get the snapshot; InterruptedError once ``is_stopping`` says so. Raise for what is certain to fail."""
        if is_unfinished(self.warehouse):
            raise WarehouseError(
                f"the initial snapshot of {self.warehouse.name} is not finished",
                hint="wait for cdcpipe-spark run, or start it again; or give it up there with --snapshot never",
            )
        export = self._take(is_stopping)
        self._check_source("the server is", system_id=export.prepared.system_id, database=export.prepared.database)
        self._check_published([f"{table['schema']}.{table['name']}" for table in export.prepared.tables])

    def _bind(self, epoch: Epoch) -> None:
        self._check_source(f"{self.config.staging} those of", system_id=epoch.system_id, database=epoch.database, slot=epoch.slot)

    def _check_source(self, theirs: str, **values: str) -> None:
        source = self.warehouse.source()
        for name, value in values.items():
            if getattr(source, name) != value:
                raise WarehouseError(
                    f"{self.warehouse.name} holds the changes of {name} {getattr(source, name)!r}, {theirs} {value!r}",
                    hint="connect to the server and the database that the changes come from, and name their staging directory",
                )

    def _begin(self) -> None:
        assert self._spark is not None
        with TableLock(self.warehouse.local_root(self.config.staging)).exclusive(lambda: self._stopping):
            replica.finish_snapshots(self._spark, self.warehouse)

    def _choose(self, plan: Plan) -> list[TablePlan]:
        published = {str(table_of(table)): table for table in plan.tables}
        self._check_published(published)
        return [published[name] for name in self._names if name not in map(str, self.copied)]

    def _check_published(self, published: Collection[str]) -> None:
        missing = [name for name in self._names if name not in published]
        if missing:
            raise SnapshotError(
                f"not published: {', '.join(missing)}; what is: {', '.join(sorted(published)) or 'nothing'}",
                hint="ALTER PUBLICATION … ADD TABLE; of a partitioned table the root or the leaves are published",
            )


_EXAMPLE = """\b
Example:
  cdcpipe-spark snapshot -d shop --warehouse /srv/lake --table public.fruit"""


@click.command("snapshot", context_settings=CONTEXT_SETTINGS, epilog=_EXAMPLE)
@connection_options
@warehouse_option
@click.option(
    "--table", "tables", multiple=True, metavar="SCHEMA.NAME", help="The table to copy, which has to be published. Repeatable."
)
@click.option(
    "--staging",
    type=DIRECTORY,
    metavar="DIR",
    help="The staging directory, where it is not where the warehouse says.",
)
@click.option(
    "--snapshot-chunk-size",
    type=SIZE,
    default="32MiB",
    show_default=True,
    help="A table is read in pieces of about this size, several at a time.",
)
@snapshot_hold_option
@spark_options
@click.option("-v", "--verbose", is_flag=True, help="Say on stderr what happens.")
def command(
    *,
    warehouse: Path,
    tables: tuple[str, ...],
    staging: Path | None,
    snapshot_chunk_size: int,
    snapshot_hold: float | None,
    jars: Path | None,
    master: str | None,
    confs: tuple[str, ...],
    verbose: bool,
    **connection: Any,
) -> None:
    """Copy tables into a warehouse that is there, anew or for the first time, while cdcpipe-spark run goes on or not.

    Each table is then what one snapshot of the server shows, and what the stream has after it: the rows come to its changelog as
    _cdc_op 'snapshot', and its replica is made anew in one commit. May be killed at any time: start it again.
    """
    log_to_stderr(verbose=verbose)
    house = Warehouse.existing(warehouse)
    if not tables:
        raise InvalidArgumentsError(
            "no table to copy",
            hint=f"name each: --table SCHEMA.NAME; {warehouse} has {', '.join(map(str, house.tables())) or 'none'}",
        )
    source = house.source()
    staging = staging or source.staging
    if staging is None:
        raise InvalidArgumentsError(f"{warehouse} does not say where its staging directory is", hint="name it: --staging DIR")
    if not source.publications:
        raise WarehouseError(f"{warehouse} does not say what its publications are", hint="start cdcpipe-spark run once")
    config = LauncherConfig(source.slot, staging, source.publications, connection_arguments(**connection), verbose=verbose)
    stopping = threading.Event()
    snapshot = TableSnapshot(config, house, tables, snapshot_chunk_size, snapshot_hold or 0.0)
    lock = house.local_root(staging) / "_cdcpipe/snapshot.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with hold_alone(lock) as is_alone, on_signals(stopping.set) as asked:
        if not is_alone:
            raise SnapshotError(f"another cdcpipe-spark snapshot is at work in {warehouse}", hint="wait for its end")
        try:
            snapshot.prepare(stopping.is_set)
            with warehouse_session(house, "cdcpipe snapshot", jars=jars, master=master, confs=confs) as spark:
                snapshot.start(spark, staging)
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
        click.echo(f"{table}: {rows:,} rows as of {format_lsn(position.lsn)}")
    left = [name for name in tables if name not in map(str, snapshot.copied)]
    if left:
        _logger.warning("stopped; not copied: %s", ", ".join(left))
        click.get_current_context().exit(asked.exit_code)


def _show(snapshot: TableSnapshot, stopping: threading.Event) -> None:
    """Show how far it is until it ends, or is to."""
    line = SnapshotLine(time.monotonic())
    try:
        while not snapshot.wait(line.interval_s):
            if stopping.is_set():
                snapshot.stop()
            line.update(snapshot.progress, time.monotonic())
        line.update(snapshot.progress, time.monotonic(), is_last=True)
    finally:
        line.clear()

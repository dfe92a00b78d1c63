"""``cdcpipe-spark purge``: removes old changes from changelogs."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import click
import cloup

from cdcpipe.errors import InvalidArgumentsError
from cdcpipe.printable import printable
from cdcpipe.units import counted
from spark_sink.commands.configured import ConfiguredCommand
from spark_sink.commands.options import CONTEXT_SETTINGS, log_to_stderr, verbose_option, warehouse_options
from spark_sink.commands.spark_options import spark_options, warehouse_session
from spark_sink.replica import as_of
from spark_sink.upkeep.purge import find_table, purge
from spark_sink.warehouse.lock import lock_file
from spark_sink.warehouse.warehouse import Warehouse

_EXAMPLE = """\b
Example:
  cdcpipe-spark purge --warehouse warehouse --before '2026-03-01 12:30' --dry-run
"""


@cloup.command("purge", cls=ConfiguredCommand, context_settings=CONTEXT_SETTINGS, epilog=_EXAMPLE)
@warehouse_options(
    cloup.option(
        "--before",
        "before_text",
        required=True,
        metavar="TIME|LSN",
        help="Remove changes that committed before this ISO 8601 time (UTC unless it says otherwise), LSN, or EPOCH:LSN.",
    ),
    cloup.option(
        "--table",
        "tables",
        multiple=True,
        metavar="SCHEMA.NAME",
        show_default="all, and _cdc_message",
        help="Purge only this table's changelog, or with _cdc_message that of the logical messages; repeatable.",
    ),
    cloup.option("--dry-run", is_flag=True, help="Print what would be removed, and remove nothing."),
)
@spark_options
@verbose_option
def command(
    *,
    warehouse: Path,
    before_text: str,
    tables: tuple[str, ...],
    dry_run: bool,
    jars: Path | None,
    master: str | None,
    confs: tuple[str, ...],
    verbose: bool,
) -> None:
    """Remove old changes from the changelogs, for good. A pipeline may run meanwhile.

    Replicas stay as they are, and changes that they do not have yet are kept. Afterwards as-of can't show the removed past, and a
    lost replica can't be made again, until cdcpipe-spark snapshot --table copies the table again. With Parquet, only changes from
    before a table's last snapshot can be removed. Delta's files are deleted when they are old enough (run --vacuum-retention).
    After a kill, start the command again.
    """
    log_to_stderr(verbose=verbose)
    before = as_of.parse_at(before_text)
    if isinstance(before, datetime) and before > datetime.now(UTC):
        raise InvalidArgumentsError(f"{before.isoformat(' ')} is still to come")
    house = Warehouse.existing(warehouse)
    for name in tables:
        find_table(house, name)
    locks = [] if dry_run else [lock_file(house.local_root())]
    with warehouse_session(house, "cdcpipe purge", jars=jars, master=master, confs=confs, locks=locks) as spark:
        found = purge(spark, house.root, before, tables=tables, is_dry_run=dry_run)
    for each in found:
        text = f"{each.table}: {counted(each.rows, 'row')} {'would be ' if dry_run else ''}removed"
        click.echo(printable(text + (f"; {counted(each.kept, 'older row')} kept: {each.reason}" if each.kept else "")))

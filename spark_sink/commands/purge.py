"""``cdcpipe-spark purge``: removes old changes from changelogs."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import click

from cdcpipe.errors import InvalidArgumentsError
from spark_sink.commands.options import CONTEXT_SETTINGS, log_to_stderr
from spark_sink.commands.spark_options import spark_options, warehouse_option, warehouse_session
from spark_sink.replica import as_of
from spark_sink.upkeep.purge import find_table, purge
from spark_sink.warehouse.warehouse import Warehouse

_EXAMPLE = """\b
Example:
  cdcpipe-spark purge --warehouse /srv/lake --before '2026-03-01' --dry-run"""


@click.command("purge", context_settings=CONTEXT_SETTINGS, epilog=_EXAMPLE)
@warehouse_option
@click.option(
    "--before",
    "before_text",
    required=True,
    metavar="TIME|LSN",
    help="What committed before that goes: an ISO 8601 time, in UTC unless it says otherwise, an LSN, or EPOCH:LSN.",
)
@click.option(
    "--table",
    "tables",
    multiple=True,
    metavar="SCHEMA.NAME",
    help="Only from this table's changelog, or the logical messages' (_cdc_message). Repeatable.",
)
@click.option("--dry-run", is_flag=True, help="Say what would go, and leave it.")
@spark_options
@click.option("-v", "--verbose", is_flag=True, help="Say on stderr what happens.")
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
    """Remove old changes from changelogs, for good, while cdcpipe-spark run goes on or not.

    The replicas stay as they are, and what they do not have yet is kept. What a table was before the place can't be told any more
    (as-of), nor can its replica be made again if it is lost, until cdcpipe-spark snapshot --table gives it a new beginning. With
    Parquet only what is before a table's last snapshot can go. Delta's files go when VACUUM finds them old enough (run
    --vacuum-retention). May be killed at any time: start it again.
    """
    log_to_stderr(verbose=verbose)
    before = as_of.parse_at(before_text)
    if isinstance(before, datetime) and before > datetime.now(UTC):
        raise InvalidArgumentsError(f"{before.isoformat(' ')} is still to come")
    house = Warehouse.existing(warehouse)
    for name in tables:
        find_table(house, name)
    with warehouse_session(house, "cdcpipe purge", jars=jars, master=master, confs=confs) as spark:
        found = purge(spark, house.root, before, tables=tables, is_dry_run=dry_run)
    for each in found:
        text = f"{each.table}: {each.rows:,} rows {'would be ' if dry_run else ''}removed"
        click.echo(text + (f"; {each.kept:,} older ones kept: {each.reason}" if each.kept else ""))

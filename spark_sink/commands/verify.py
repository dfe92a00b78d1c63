"""``cdcpipe-spark verify``: compares the replicas with PostgreSQL, and prints which rows differ."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import cloup

from cdcpipe.pipe.exitcode import ExitCode
from cdcpipe.printable import json_text, printable
from cdcpipe.units import count_from, counted, parse_seconds
from spark_sink.client.connection import connection_arguments
from spark_sink.commands.configured import ConfiguredCommand
from spark_sink.commands.options import (
    CONTEXT_SETTINGS,
    connection_options,
    log_to_stderr,
    noted_staging_option,
    verbose_option,
    warehouse_options,
)
from spark_sink.commands.progress import LiveLine
from spark_sink.commands.progress_text import bar
from spark_sink.commands.spark_options import spark_options, warehouse_session
from spark_sink.status.staging_directory import staging_directory
from spark_sink.verify.comparison import DIFFERENT, NOT_COMPARED, TableResult, verify
from spark_sink.verify.visibility import check_taken
from spark_sink.warehouse.warehouse import Warehouse

if TYPE_CHECKING:
    from collections.abc import Sequence

_logger = logging.getLogger(__name__)


_EXAMPLE = """\b
Example:
  cdcpipe-spark verify -d shop --warehouse warehouse
"""


@cloup.command("verify", cls=ConfiguredCommand, context_settings=CONTEXT_SETTINGS, epilog=_EXAMPLE)
@connection_options
@warehouse_options(
    cloup.option(
        "--table",
        "tables",
        multiple=True,
        metavar="SCHEMA.NAME",
        show_default="all that have a key",
        help="Compare only this table; repeatable.",
    ),
    noted_staging_option,
    cloup.option(
        "--timeout",
        type=parse_seconds,
        metavar="SECS",
        default="300",
        show_default=True,
        help="Wait at most this long for the tables to get all changes that the server has when the command begins.",
    ),
)
@cloup.option_group(
    "Output",
    cloup.option(
        "--max-keys",
        type=count_from(0),
        metavar="N",
        default="10",
        show_default=True,
        help="Print at most this many keys of each table that differs.",
    ),
    cloup.option("--json", "as_json", is_flag=True, help="Print one JSON object, for programs."),
)
@spark_options
@verbose_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    *,
    warehouse: Path,
    tables: tuple[str, ...],
    staging: Path | None,
    max_keys: int,
    timeout: float,
    as_json: bool,
    jars: Path | None,
    master: str | None,
    confs: tuple[str, ...],
    verbose: bool,
    **connection: Any,
) -> None:
    """Compare the replicas with PostgreSQL's tables, row by row, as of one moment. Changes may continue on both sides meanwhile.

    Both sides count rows and compute checksums; no rows are sent. As with pg_dump, the tables are locked against ALTER and TRUNCATE
    meanwhile. Many tables are compared in parts, each part as of a moment of its own. If a table differs, the keys of the first
    rows that differ are printed.

    Exit codes: 0 if all tables are equal, 10 if one differs, 11 if none differs but one could not be compared, also because the
    warehouse does not have it. Any other code: the comparison did not take place.
    """
    log_to_stderr(verbose=verbose)
    house = Warehouse.existing(warehouse)
    for name in tables:
        house.find(name)
    staging = staging_directory(staging, house)
    server = connection_arguments(**connection)
    line = ProgressBar()
    try:
        check_taken(server, house, staging, line.show)
        line.show("starting Spark", 0)
        with warehouse_session(house, "cdcpipe verify", jars=jars, master=master, confs=confs) as spark:
            results = verify(
                spark,
                house.root,
                server,
                tables=tables,
                staging=staging,
                max_keys=max_keys,
                timeout_s=timeout,
                tell=line.show,
            )
    finally:
        line.clear()
    click.echo(_json(results) if as_json else "\n".join(_lines(results)))
    ctx.exit(exit_code(results))


def exit_code(results: Sequence[TableResult]) -> int:
    """Return the command's exit code."""
    if any(result.problem is None and not result.is_equal for result in results):
        return DIFFERENT
    return NOT_COMPARED if not results or any(result.problem is not None for result in results) else ExitCode.SUCCESS


def _json(results: Sequence[TableResult]) -> str:
    return json_text(
        {
            str(result.table): {
                "equal": result.is_equal,
                "server_rows": result.server_rows if result.problem is None else None,
                "replica_rows": result.replica_rows if result.problem is None else None,
                "problem": result.problem,
                "not_compared": list(result.left_out),
                "compared_as_hashes": list(result.hashed),
                "without_deleted": result.without_deleted,
                "differences": [{"kind": difference.kind, "key": difference.key} for difference in result.differences],
            }
            for result in results
        },
        indent=1,
    )


def _lines(results: Sequence[TableResult]) -> list[str]:
    lines = []
    for result in results:
        if result.problem is not None:
            lines.append(f"{result.table}: not compared: {result.problem}")
        elif result.is_equal:
            lines.append(f"{result.table}: equal, {counted(result.server_rows, 'row')}{_left_out(result)}")
        else:
            lines.append(
                f"{result.table}: DIFFERENT, {counted(result.server_rows, 'row')} in PostgreSQL,"
                f" {result.replica_rows:,} in the replica{_left_out(result)}"
            )
            lines += [f"  {difference.kind} {json.dumps(difference.key, ensure_ascii=False)}" for difference in result.differences]
    return [*map(printable, lines)] or ["no table to compare"]


def _left_out(result: TableResult) -> str:
    """Return what to say of masked columns and deleted rows."""
    said = f"; masked, not compared: {', '.join(result.left_out)}" if result.left_out else ""
    said += f"; compared as hashes: {', '.join(result.hashed)}" if result.hashed else ""
    return said + ("; without the deleted rows that the replica keeps" if result.without_deleted else "")


class ProgressBar(LiveLine):
    """Shows what the command does: on a terminal as a bar, elsewhere as a line from time to time, as the other commands do."""

    def __init__(self) -> None:
        super().__init__(time.monotonic())
        self._step = ""

    def show(self, text: str, part: float) -> None:
        """Show the present step, and the part of the work that is done, from 0 to 1."""
        now = time.monotonic()
        if self.is_terminal or self.is_due(now):
            self.write(lambda width: text if width is None else f"{bar(part)}  {text}"[:width], now, is_last=False)
        elif text != self._step:
            _logger.info("%s", text)
        self._step = text

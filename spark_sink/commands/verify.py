"""``cdcpipe-spark verify``: compares the replicas with PostgreSQL, and says which rows differ."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cdcpipe.pipe.exitcode import ExitCode
from spark_sink.commands.options import CONTEXT_SETTINGS, connection_arguments, connection_options, log_to_stderr
from spark_sink.commands.parameters import DIRECTORY
from spark_sink.commands.spark_options import spark_options, warehouse_option, warehouse_session
from spark_sink.verify.comparison import DIFFERENT, NOT_COMPARED, TableResult, verify
from spark_sink.warehouse.warehouse import Warehouse

if TYPE_CHECKING:
    from collections.abc import Sequence

_logger = logging.getLogger(__name__)


_EXAMPLE = """\b
Example:
  cdcpipe-spark verify -d shop --warehouse /srv/lake --table public.fruit"""


@click.command("verify", context_settings=CONTEXT_SETTINGS, epilog=_EXAMPLE)
@connection_options
@warehouse_option
@click.option("--table", "tables", multiple=True, metavar="SCHEMA.NAME", help="Only this table. Repeatable.")
@click.option(
    "--staging",
    type=DIRECTORY,
    metavar="DIR",
    help="The staging directory, where it is not where the warehouse says.",
)
@click.option(
    "--max-keys",
    type=click.IntRange(min=0),
    default=10,
    show_default=True,
    help="Name so many keys of each table that differs.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    default=300.0,
    show_default=True,
    metavar="SECS",
    help="How long the tables may take to get what the server has when it begins.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, for programs.")
@spark_options
@click.option("-v", "--verbose", is_flag=True, help="Say on stderr what happens.")
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
    """Compare the replicas with PostgreSQL's tables, row by row, as of one moment, while both go on.

    By the number of rows and a checksum made on both sides; no rows are sent. Tables are locked against ALTER and
    TRUNCATE meanwhile, as by pg_dump. Exit code 0: all are equal; 10: some table differs, and the keys of the first rows
    that do are printed; 11: none differs, but one could not be compared; another one: the comparison did not take place.
    """
    log_to_stderr(verbose=verbose)
    house = Warehouse.existing(warehouse)
    for name in tables:
        house.find(name)
    bar = ProgressBar()
    try:
        bar.show("starting Spark", 0)
        with warehouse_session(house, "cdcpipe verify", jars=jars, master=master, confs=confs) as spark:
            results = verify(
                spark,
                house.root,
                connection_arguments(**connection),
                tables=tables,
                staging=staging,
                max_keys=max_keys,
                timeout_s=timeout,
                tell=bar.show,
            )
    finally:
        bar.clear()
    click.echo(_json(results) if as_json else "\n".join(_lines(results)))
    ctx.exit(exit_code(results))


def exit_code(results: Sequence[TableResult]) -> int:
    """Return the command's exit code."""
    if any(result.problem is None and not result.is_equal for result in results):
        return DIFFERENT
    return NOT_COMPARED if not results or any(result.problem is not None for result in results) else ExitCode.SUCCESS


def _json(results: Sequence[TableResult]) -> str:
    return json.dumps(
        {
            str(result.table): {
                "equal": result.is_equal,
                "server_rows": result.server_rows,
                "replica_rows": result.replica_rows,
                "problem": result.problem,
                "differences": [{"kind": difference.kind, "key": difference.key} for difference in result.differences],
            }
            for result in results
        },
        indent=1,
        ensure_ascii=False,
    )


def _lines(results: Sequence[TableResult]) -> list[str]:
    lines = []
    for result in results:
        if result.problem is not None:
            lines.append(f"{result.table}: not compared: {result.problem}")
        elif result.is_equal:
            lines.append(f"{result.table}: equal, {result.server_rows:,} rows")
        else:
            lines.append(
                f"{result.table}: DIFFERENT, {result.server_rows:,} rows in PostgreSQL, {result.replica_rows:,} in the replica"
            )
            lines += [f"  {difference.kind} {json.dumps(difference.key, ensure_ascii=False)}" for difference in result.differences]
    return lines or ["no table to compare"]


class ProgressBar:
    """A progress bar on stderr, if that is a terminal."""

    _WIDTH = 24

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._shown = ""

    def show(self, text: str, part: float) -> None:
        """Show what is being done, and which part of all is done."""
        if not self._is_terminal:
            if text != self._shown:
                _logger.info("%s", text)
            self._shown = text
            return
        done = round(part * self._WIDTH)
        click.echo(f"\r\x1b[K[{'#' * done}{'.' * (self._WIDTH - done)}] {part:4.0%}  {text}", err=True, nl=False)

    def clear(self) -> None:
        """Make room for something else."""
        if self._is_terminal:
            click.echo("\r\x1b[K", err=True, nl=False)

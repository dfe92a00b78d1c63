"""``cdcpipe-spark as-of``: prints a table as it was at a time or an LSN."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
import cloup
from pyspark.sql import functions as F  # noqa: N812 - the usual name for this module

from cdcpipe import logs
from cdcpipe.errors import InvalidArgumentsError
from cdcpipe.printable import printable_json
from cdcpipe.units import count_from
from spark_sink.commands.configured import ConfiguredCommand
from spark_sink.commands.options import CONTEXT_SETTINGS, log_to_stderr, verbose_option, warehouse_options
from spark_sink.commands.spark_options import spark_options, warehouse_session
from spark_sink.replica.as_of import parse_at, read_as_of
from spark_sink.warehouse.warehouse import Warehouse

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


_EXAMPLE = """\b
Example:
  cdcpipe-spark as-of --warehouse warehouse --table public.fruit --at "$(date -u '+%F %T')"
"""


@cloup.command("as-of", cls=ConfiguredCommand, context_settings=CONTEXT_SETTINGS, epilog=_EXAMPLE)
@warehouse_options(
    cloup.option("--table", required=True, metavar="SCHEMA.NAME", help="Show this table."),
    cloup.option(
        "--at",
        "at_text",
        required=True,
        metavar="TIME|LSN",
        help="Show the table before its first transaction that committed later than this ISO 8601 time (UTC unless it says"
        " otherwise); or as of this LSN, or EPOCH:LSN.",
    ),
)
@cloup.option_group(
    "Output",
    cloup.option(
        "--limit",
        type=count_from(0),
        metavar="N",
        default="20",
        show_default=True,
        help="Print at most this many rows; 0: all.",
    ),
    cloup.option(
        "--output",
        type=click.Path(path_type=Path),
        metavar="DIR",
        help="Write all rows as Parquet files to this new directory, and print none.",
    ),
)
@spark_options
@verbose_option
def command(
    *,
    warehouse: Path,
    table: str,
    at_text: str,
    limit: int,
    output: Path | None,
    jars: Path | None,
    master: str | None,
    confs: tuple[str, ...],
    verbose: bool,
) -> None:
    """Print a table as it was at a time or an LSN, from its changelog: one JSON object for each row."""
    log_to_stderr(verbose=verbose)
    at = parse_at(at_text)
    house = Warehouse.existing(warehouse)
    house.find(table)
    if output is not None and output.exists():
        raise InvalidArgumentsError(f"{output} exists already", hint="give a directory that does not exist yet")
    with warehouse_session(house, "cdcpipe as-of", jars=jars, master=master, confs=confs) as spark:
        rows = read_as_of(spark, house.root, table, at)
        if output is not None:
            rows.write.parquet(str(output.absolute()))
        else:
            print_rows(rows, limit)


def print_rows(rows: DataFrame, limit: int) -> None:
    """Print at most ``limit`` rows (0: all), each as a JSON object."""
    options = {
        "ignoreNullFields": "false",
        "timestampFormat": "yyyy-MM-dd HH:mm:ss.SSSSSSXXX",
        "timestampNTZFormat": "yyyy-MM-dd HH:mm:ss.SSSSSS",
    }
    lines = rows.select(F.to_json(F.struct("*"), options).alias("line"))
    for number, row in enumerate((lines.limit(limit + 1) if limit else lines).toLocalIterator()):
        if limit and number == limit:
            logs.show(f"there are more rows than these {limit}: --limit 0 shows all")
            break
        click.echo(printable_json(row["line"]))

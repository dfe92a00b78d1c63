"""``cdcpipe-spark doctor``: finds problems of a pipeline before it runs."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import cloup

from cdcpipe.doctor.findings import has_errors, printed
from cdcpipe.options import PUBLICATION, SLOT, take_new_publication
from spark_sink.client.connection import connection_arguments
from spark_sink.commands.configured import ConfiguredCommand
from spark_sink.commands.options import (
    CONTEXT_SETTINGS,
    connection_options,
    log_to_stderr,
    new_publication_options,
    verbose_option,
)
from spark_sink.commands.parameters import DIRECTORY, PLACE
from spark_sink.commands.signals import kept
from spark_sink.commands.spark_options import parse_settings, session_options
from spark_sink.doctor.pipeline_doctor import PlannedRun, examine
from spark_sink.warehouse.formats import FORMATS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pyspark.sql import SparkSession

_EXAMPLE = """\b
Example:
  cdcpipe-spark doctor -d shop -S shop_cdc --publication shop -c --staging staging --warehouse warehouse
"""


@cloup.command("doctor", cls=ConfiguredCommand, context_settings=CONTEXT_SETTINGS, epilog=_EXAMPLE)
@connection_options
@cloup.option_group(
    "Pipeline",
    cloup.option(*SLOT.names, required=True, **SLOT.settings),
    cloup.option(*PUBLICATION.names, required=True, **PUBLICATION.settings),
    cloup.option("-c", "--create-slot", is_flag=True, help="Check a start with -c, which makes the missing publications and slot."),
    *new_publication_options,
    cloup.option("--staging", required=True, type=DIRECTORY, metavar="DIR", help="Check this staging directory."),
    cloup.option(
        "--warehouse",
        type=PLACE,
        metavar="DIR|URL",
        show_default="none, as for cdcpipe-spark land",
        help="Check this warehouse, and Spark.",
    ),
    cloup.option(
        "--format",
        "table_format",
        type=click.Choice(list(FORMATS)),
        default="delta",
        show_default=True,
        help="Check what tables in this format need.",
    ),
    cloup.option(
        "--snapshot",
        type=click.Choice(["initial", "never"]),
        show_default="as for run",
        help="Check a run that begins with a copy of the tables' rows, or without.",
    ),
)
@cloup.option_group(
    "Spark",
    *session_options,
    cloup.option(
        "--staging-shared",
        type=click.Choice(["yes", "no"]),
        default="yes",
        show_default=True,
        help="Say whether executors must see the staging directory.",
    ),
    cloup.option("--no-spark", is_flag=True, help="Do not start Spark, and leave out its workers."),
)
@cloup.option_group(
    "Output",
    cloup.option("--json", "as_json", is_flag=True, help="Print one JSON object, for programs."),
)
@verbose_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    *,
    slot: str,
    publications: tuple[str, ...],
    create_slot: bool,
    staging: Path,
    warehouse: Path | None,
    table_format: str,
    snapshot: str | None,
    master: str | None,
    confs: tuple[str, ...],
    jars: Path | None,
    staging_shared: str,
    no_spark: bool,
    as_json: bool,
    verbose: bool,
    **options: Any,
) -> None:
    """Find what would go wrong with a pipeline, now or later. Each finding is a line, with the way to mend it.

    Give the same options as for cdcpipe-spark run or land, as far as they are listed below. The command changes nothing on the
    server. It writes a few small files in the directories, and removes them. The exit code is 1 if an error is found.
    """
    log_to_stderr(verbose=verbose)
    settings = parse_settings(confs)
    new_publication = take_new_publication(options)
    planned = PlannedRun(
        connection=connection_arguments(**options),
        slot=slot,
        publications=publications,
        staging=staging.absolute(),
        new_publication=new_publication,
        create_slot=create_slot,
        snapshot=snapshot,
        warehouse=warehouse,
        format=table_format,
        jars=jars,
        conf=settings,
        staging_shared=staging_shared == "yes",
    )
    start = partial(_session, master=master, table_format=table_format, settings=settings, jars=jars)
    findings = examine(planned, None if no_spark else start)
    click.echo(printed(findings, as_json=as_json))
    ctx.exit(int(has_errors(findings)))


@contextmanager
def _session(*, master: str | None, table_format: str, settings: Mapping[str, str], jars: Path | None) -> Iterator[SparkSession]:
    from spark_sink.spark import jvm, session

    with kept():
        spark = session.build(app_name="cdcpipe doctor", master=master, format=table_format, conf=settings, jars_dir=jars)
    try:
        with jvm.shown_on_error():
            yield spark
    finally:
        session.stop(spark)

"""What the commands that look at a warehouse share: its directory, and the Spark session to look at it with."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cdcpipe.errors import InvalidArgumentsError
from spark_sink.commands import signals
from spark_sink.commands.options import Command, together
from spark_sink.commands.parameters import PLACE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

    from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["parse_settings", "spark_options", "warehouse_option", "warehouse_session"]


def warehouse_option(command: Command) -> Command:
    """Add ``--warehouse``, for a warehouse that is there."""
    return click.option(
        "--warehouse",
        required=True,
        type=PLACE,
        metavar="DIR|URL",
        help="The warehouse: where the tables are.",
    )(command)


spark_options = together(
    click.option(
        "--jars",
        type=click.Path(path_type=Path),
        metavar="DIR",
        help="Jars to give to Spark, Delta Lake's two among them, where Maven Central can't be reached.",
    ),
    click.option("--master", metavar="URL", help="Spark's master.  [default: local[2]; under spark-submit the one given there]"),
    click.option("--conf", "confs", multiple=True, metavar="KEY=VALUE", help="A setting of Spark. Repeatable."),
)
"""What `warehouse_session` takes."""


def parse_settings(confs: tuple[str, ...]) -> dict[str, str]:
    """Return Spark's settings from the values of ``--conf``."""
    settings = {}
    for conf in confs:
        key, equals, value = conf.partition("=")
        if not key or not equals:
            raise InvalidArgumentsError(f"--conf takes KEY=VALUE, not {conf!r}")
        settings[key] = value
    return settings


@contextmanager
def warehouse_session(
    warehouse: Warehouse, app_name: str, *, jars: Path | None, master: str | None, confs: tuple[str, ...]
) -> Iterator[SparkSession]:
    """Start a Spark session that reads the warehouse's format, and stop it at the end."""
    from spark_sink.spark import session

    with signals.kept():
        spark = session.build(app_name=app_name, master=master, format=warehouse.format, conf=parse_settings(confs), jars_dir=jars)
    try:
        session.check_reach(spark, warehouse.root)
        yield spark
    finally:
        spark.stop()

"""Shared parts of the commands that need Spark: the options of a session, and a session that reads a warehouse."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click
import cloup

from cdcpipe.errors import InvalidArgumentsError
from spark_sink.commands import signals

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pyspark.sql import SparkSession

    from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["parse_settings", "session_options", "spark_options", "warehouse_session"]


session_options = (
    cloup.option(
        "--master",
        metavar="URL",
        show_default="local[2]; under spark-submit the one given there",
        help="Run Spark with this master.",
    ),
    cloup.option("--conf", "confs", multiple=True, metavar="KEY=VALUE", help="Give this setting to Spark; repeatable."),
    cloup.option(
        "--jars",
        type=click.Path(path_type=Path),
        metavar="DIR",
        show_default="Delta Lake comes from Maven Central, once",
        help="Give Spark the jars in this directory, including Delta Lake's two.",
    ),
)

spark_options = cloup.option_group("Spark", *session_options)
"""The options whose values `warehouse_session` takes."""


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
    warehouse: Warehouse,
    app_name: str,
    *,
    jars: Path | None,
    master: str | None,
    confs: tuple[str, ...],
    locks: Iterable[Path] = (),
) -> Iterator[SparkSession]:
    """Start a Spark session that reads the warehouse's format, and stop it at the end.

    If Spark's JVM ends meanwhile, the error that leaves the ``with`` says so. A command that writes passes its ``locks``
    (`session.build`).
    """
    from spark_sink.spark import jvm, session

    with signals.kept():
        spark = session.build(
            app_name=app_name,
            master=master,
            format=warehouse.format.name,
            conf=parse_settings(confs),
            jars_dir=jars,
            locks=locks,
        )
    try:
        with jvm.shown_on_error():
            session.check_reach(spark, warehouse.root)
            yield spark
    except Exception as ex:
        if jvm.has_ended(jvm.END_S):
            raise session.ended_error() from ex
        raise
    finally:
        session.stop(spark)

"""Which session a run takes: the one that it is given, the one that is there, or none, so that it makes its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spark_sink.spark import java_home, refused_settings, session, shared
from spark_sink.spark.connect import refuse
from spark_sink.spark.existing import existing
from spark_sink.spark.home import check_named

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import SparkSession

__all__ = ["take"]


def take(given: SparkSession | None, format: str, conf: Mapping[str, str]) -> SparkSession | None:  # noqa: A002
    """Return the session that a run takes; None if it has to make one, with ``conf``, or to share one of other runs.

    Raises InitError if the session does not fit, or if what a new one needs is missing on this machine.
    """
    spark = given or existing()
    if spark is not None:
        refuse(spark)  # it has no application that could tell who has made it
        if not shared.is_made_by_runs(spark):
            session.check(spark, format)
            return spark
    if given is not None:  # nobody keeps it until the run comes to it: the last of those runs may have stopped it by then
        session.check(given, format)
    session.check_jvm(format)
    refused_settings.refuse(conf.get)
    java_home.find_java()
    check_named()
    return None

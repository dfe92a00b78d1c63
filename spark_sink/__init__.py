"""Brings the changes of a PostgreSQL database to Spark tables. Only these names are public, for programs and notebooks.

    from spark_sink import LauncherConfig, RunConfig, run                        # all that `cdcpipe-spark run` does
    from spark_sink import Runner                                                # the same, with progress and a way to stop it
    from spark_sink import Launcher, Pipeline                                    # its two halves: land a slot, write the tables
    from spark_sink import build_session, read_replica, read_as_of, read_history, register_views, register_source  # read the tables

Each name is imported at its first use, because the launcher needs no pyspark.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from spark_sink.spark import without_pandas

if TYPE_CHECKING:
    from spark_sink.launcher.config import LauncherConfig
    from spark_sink.launcher.launcher import Launcher
    from spark_sink.pipeline.config import RunConfig
    from spark_sink.pipeline.pipeline import Pipeline
    from spark_sink.pipeline.runner import Runner, run
    from spark_sink.replica.as_of import read_as_of
    from spark_sink.replica.current import read_replica, register_views
    from spark_sink.replica.history import read_history
    from spark_sink.source.datasource import register as register_source
    from spark_sink.spark.session import build as build_session
    from spark_sink.staging.filler import SealPolicy
    from spark_sink.staging.readers import Retention

__all__ = [
    "Launcher",
    "LauncherConfig",
    "Pipeline",
    "Retention",
    "RunConfig",
    "Runner",
    "SealPolicy",
    "build_session",
    "read_as_of",
    "read_history",
    "read_replica",
    "register_source",
    "register_views",
    "run",
]

without_pandas.apply()  # here, because Spark's Python workers import this first

_HOMES = {
    "Launcher": ("launcher.launcher", "Launcher"),
    "LauncherConfig": ("launcher.config", "LauncherConfig"),
    "Pipeline": ("pipeline.pipeline", "Pipeline"),
    "Retention": ("staging.readers", "Retention"),
    "RunConfig": ("pipeline.config", "RunConfig"),
    "Runner": ("pipeline.runner", "Runner"),
    "SealPolicy": ("staging.filler", "SealPolicy"),
    "build_session": ("spark.session", "build"),
    "read_as_of": ("replica.as_of", "read_as_of"),
    "read_history": ("replica.history", "read_history"),
    "read_replica": ("replica.current", "read_replica"),
    "register_source": ("source.datasource", "register"),
    "register_views": ("replica.current", "register_views"),
    "run": ("pipeline.runner", "run"),
}


def __dir__() -> list[str]:
    """Return the public names, so that a notebook completes them."""
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    module, attribute = _HOMES[name]
    return getattr(import_module(f"spark_sink.{module}"), attribute)

"""From the pipe to Spark tables: the launcher, the staging log, the data source, the tables.

What is named here is imported when it is asked for: the launcher needs numpy, `Pipeline` pyspark, and ``status`` neither.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spark_sink.launcher.launcher import Launcher, LauncherConfig
    from spark_sink.pipeline.pipeline import Pipeline

__all__ = ["Launcher", "LauncherConfig", "Pipeline"]

_MODULES = {"Launcher": "launcher", "LauncherConfig": "launcher", "Pipeline": "pipeline"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"spark_sink.{_MODULES[name]}"), name)
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)

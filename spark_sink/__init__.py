"""From the pipe to Spark tables: the launcher, the staging log, the data source, the tables.

`Pipeline` needs pyspark; it is imported when it is asked for, and nothing else here is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spark_sink.launcher import Launcher, LauncherConfig

if TYPE_CHECKING:
    from spark_sink.pipeline import Pipeline

__all__ = ["Launcher", "LauncherConfig", "Pipeline"]


def __getattr__(name: str) -> Any:
    if name == "Pipeline":
        from spark_sink.pipeline import Pipeline

        return Pipeline
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)

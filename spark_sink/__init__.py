"""From the pipe to Spark tables: the launcher, the staging log, the data source, the tables."""

from spark_sink.launcher import Launcher, LauncherConfig

__all__ = ["Launcher", "LauncherConfig"]

"""Refuses Spark Connect: its Spark is in another process, and a run needs Spark's JVM in its own.

It is refused before there is a slot. pyspark's own errors would name an option that nobody gave, and show the token of the address.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from cdcpipe.errors import InitError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["refuse", "refuse_chosen"]


def refuse(spark: SparkSession) -> None:
    """Raise InitError if this is a session of Spark Connect."""
    if type(spark).__module__.startswith("pyspark.sql.connect."):
        raise InitError(
            "this is a session of Spark Connect, and cdcpipe needs Spark in this process",
            hint="let cdcpipe make the session, in a program that has not used Spark Connect",
        )


def refuse_chosen() -> None:
    """Raise InitError if the environment makes pyspark choose Spark Connect for a new session. Never shows a value."""
    chosen = [name for name in ("SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED") if name in os.environ]
    mode = os.environ.get("SPARK_API_MODE", "").lower()
    if mode == "connect":
        chosen.append("SPARK_API_MODE")
    elif mode != "classic" and os.environ.get("SPARK_CONNECT_MODE") == "1":
        chosen.append("SPARK_CONNECT_MODE")
    if chosen:
        raise InitError(
            f"{chosen[0]} is set: a new Spark session would be one of Spark Connect, and cdcpipe needs Spark in this process",
            hint=f"unset {' and '.join(chosen)}, and start the program again",
        )

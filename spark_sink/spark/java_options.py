"""The options of Spark's JVM: how it compiles, logs, and where it keeps temporary files."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from cdcpipe import logs
from spark_sink.files.temporary import directory_of_process

__all__ = ["java_options"]

_logger = logging.getLogger(__name__)

_TIMES_LATER: Final = 30
_C2_THRESHOLDS: Final = {"Invocation": 5_000, "MinInvocation": 600, "Compile": 15_000, "BackEdge": 40_000}
_LATE_C2: Final = " ".join(f"-XX:Tier4{name}Threshold={_TIMES_LATER * number}" for name, number in _C2_THRESHOLDS.items())
"""HotSpot compiles a method with C2 after 30 times as many calls and loops as by default (docs/decisions/0089).

Our JVM plans small micro-batches and touches few rows. C2 would take two thirds of its CPU time in the first seconds, when the
stream and the Python workers need the processors. A large merge still reaches C2 within its first second.
"""

_ONE_LOG_CONTEXT: Final = "org.apache.logging.log4j.core.selector.BasicContextSelector"
"""Spark asks log4j for a new logger several times for each plan. By default log4j walks the stack each time, to find the class
loader whose configuration counts. The JVM has one configuration. The walks took 1 % of the JVM's CPU time.
"""


def java_options() -> str:
    """Return the options of Spark's JVM, as one text for the setting spark.driver.extraJavaOptions."""
    # -UsePerfData: counters for jstat would wake an idle JVM twenty times a second.
    log = "json" if logs.is_json() else "full" if _logger.isEnabledFor(logging.INFO) else "short"
    file = Path(__file__).resolve().with_name("log4j2.properties").as_uri()
    logs_of_spark = f"-Dlog4j2.configurationFile={file} -Dlog4j2.contextSelector={_ONE_LOG_CONTEXT} -Dcdcpipe.log={log}"
    return f"-XX:-UsePerfData {_LATE_C2} {logs_of_spark}{_temporary_option()}"


def _temporary_option() -> str:
    """Return the option that lets Java put temporary files into the directory of this process. Java itself knows /tmp alone.

    Spark keeps what its memory has no room for there, unless the setting spark.local.dir names another place.
    """
    quoted = str(directory_of_process()).replace("\\", r"\\").replace('"', r"\"")
    return f' "-Djava.io.tmpdir={quoted}"'

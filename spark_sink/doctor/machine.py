"""Checks whether this machine has what the pipeline needs: Java, Python packages, Delta Lake's jars."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from cdcpipe.doctor.findings import Verdict, error, ok
from cdcpipe.errors import CdcpipeError
from spark_sink.spark.java_home import find_java
from spark_sink.spark.session import DELTA_VERSION, find_jars

__all__ = ["INSTALL", "installed", "jars", "java", "packages"]

INSTALL: Final = "pip install 'cdcpipe[spark]'"

_PACKAGES: Final = ("pyspark", "pyarrow", "numpy", "pandas", "pyroaring", "adbc-driver-manager", "adbc-driver-postgresql")
_SPARK: Final = "4.2."


def java() -> Iterator[Verdict]:
    """Judge whether a Java is installed that Spark can use."""
    try:
        yield ok(f"Java is {find_java()}")
    except CdcpipeError as ex:
        yield error(ex.message, "Spark needs it", ex.hint or "install one")


def installed() -> dict[str, str | None]:
    """Return the versions of the Python packages that the pipeline needs; None for a package that is not installed."""
    versions: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def packages(found: Mapping[str, str | None]) -> Iterator[Verdict]:
    """Judge whether the packages are installed, and whether this program supports the version of pyspark."""
    missing = [name for name, version in found.items() if version is None]
    pyspark = found.get("pyspark") or ""
    if missing:
        yield error(f"{', '.join(missing)} not installed", "the tables need them", INSTALL)
    elif not pyspark.startswith(_SPARK):
        yield error(f"pyspark is {pyspark}", f"cdcpipe needs Spark {_SPARK}x", INSTALL)
    else:
        yield ok(f"Python {platform.python_version()}, pyspark {pyspark}, pyarrow {found.get('pyarrow')}")


def jars(format: str, directory: Path | None, conf: Mapping[str, str]) -> Iterator[Verdict]:  # noqa: A002 - Spark's own word for it
    """Judge whether Delta Lake's jars are on this machine. Jars that Spark downloads are tested by starting Spark."""
    try:
        found = find_jars(format, directory, conf)
    except CdcpipeError as ex:
        yield error(ex.message, "Spark does not start without them", ex.hint or "give the jars: --jars DIR")
        return
    if found is None:
        yield ok(f"Delta Lake {DELTA_VERSION} is not here yet: Spark fetches it from Maven Central when it starts")
    elif found:
        yield ok(f"Spark gets {len(found)} jars from {Path(found[0]).parent}")
    else:
        yield ok("Spark needs no jars of ours")

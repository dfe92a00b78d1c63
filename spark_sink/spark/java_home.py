"""Finds a Java that is new enough for Spark."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
from pathlib import Path

from cdcpipe.errors import InitError
from spark_sink.spark.home import user_home

__all__ = ["export_java", "find_java"]

_logger = logging.getLogger(__name__)

_JAVA_MINIMUM = 17


def find_java() -> Path:
    """Return a Java home of version 17 or newer: from JAVA_HOME, PATH, or the directories of distributions and SDKMAN."""
    tried: list[str] = []
    for home in _java_homes():
        version = _java_version(home)
        if version is not None and version >= _JAVA_MINIMUM:
            return home
        tried.append(f"{home} ({'no Java that starts' if version is None else version})")
    Path.cwd()  # without a current directory, no Java starts: then this raises FileNotFoundError
    found = f"; found only {', '.join(tried)}" if tried else ""
    raise InitError(
        f"no Java {_JAVA_MINIMUM} or newer{found}",
        hint="install one (Debian, Ubuntu: apt-get install openjdk-21-jre-headless; Debian 12: openjdk-17-jre-headless)"
        " or set JAVA_HOME to it",
    )


def export_java() -> None:
    """Set JAVA_HOME to the Java that `find_java` finds; warn if JAVA_HOME named another place."""
    java, configured = find_java(), os.environ.get("JAVA_HOME")
    if configured and java != Path(configured):
        _logger.warning("JAVA_HOME is %s, which has no Java %d or newer: using %s", configured, _JAVA_MINIMUM, java)
    os.environ["JAVA_HOME"] = str(java)


def _java_homes() -> list[Path]:
    """Return the directories that may be a Java home, best first, each once."""
    homes: list[Path] = []
    if configured := os.environ.get("JAVA_HOME"):
        homes.append(Path(configured))
    if command := shutil.which("java"):
        homes.append(Path(command).resolve().parent.parent)
    for directory in (
        Path("/usr/lib/jvm"),
        user_home() / ".sdkman/candidates/java",
        Path("/Library/Java/JavaVirtualMachines"),
    ):
        if directory.is_dir():
            homes += sorted(path.resolve() for path in directory.iterdir() if (path / "bin/java").exists())
            homes += sorted(directory.glob("*/Contents/Home"))
    return list(dict.fromkeys(homes))


def _java_version(home: Path) -> int | None:
    """Return the major version of the Java in ``home``; None if there is no Java that runs."""
    try:
        done = subprocess.run([home / "bin/java", "-version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r'version "(?:1\.)?(\d+)', done.stderr)
    return int(match[1]) if match else None

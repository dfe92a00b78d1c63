"""The processes of a running pipeline: finds them, tells the role of each, and kills those of given roles.

`environment` is for the processes that the scripts start: they import the packages of this checkout.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import psutil

__all__ = ["children", "environment", "is_open", "kill", "role", "running"]

_ROOT = Path(__file__).parents[2]


def environment(**defaults: str) -> dict[str, str]:
    """Return the environment of this process, with ``defaults`` and this checkout first on Python's path."""
    path = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return defaults | os.environ | {"PYTHONPATH": os.pathsep.join(path)}


def children(pid: int) -> list[int]:
    """Return the process ids of a process's own children."""
    try:
        return [child.pid for child in psutil.Process(pid).children()]
    except psutil.NoSuchProcess:
        return []


def running(pid: int) -> dict[psutil.Process, list[str]]:
    """Return a process and all its descendants, with their command lines.

    A process that has just ended, or is a zombie, has no command line. It is left out.
    """
    found = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):  # reading a zombie raises one of these
                if command := process.cmdline():
                    found[process] = command
    return found


def is_open(path: Path) -> bool:
    """Tell whether a process has a file open."""
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # the process has just ended
            if descriptor.samefile(path):
                return True
    return False


def role(command: list[str]) -> str:
    """Return the role of one of the pipeline's processes, from its command line."""
    if Path(command[0]).name == "java":
        if any("CoarseGrainedExecutorBackend" in each for each in command):
            return "executor"
        # Without Spark in it, it is "java -version", or writes the command line of the JVM.
        return "JVM" if "org.apache.spark.deploy.SparkSubmit" in command else "java"
    if "spark_sink" in command:
        return "driver"
    if command[-1].endswith("spark_sink/client/watchdog.py"):
        return "watchdog"
    if "cli" not in command:
        return "Python worker"
    if "--then-stream" in command:  # it prepares the slot first
        return "streamer"
    return {"prepare": "prepare", "slot": "slot monitor"}.get(command[command.index("cli") + 1], "streamer")


def kill(pid: int, *roles: str) -> int:
    """Send SIGKILL to the descendants of a process that have these roles. Return their number."""
    count = 0
    for process, command in running(pid).items():
        if role(command) in roles:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
                count += 1
    return count

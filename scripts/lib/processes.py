"""The processes of a running pipeline: finds them, tells the role of each, and kills those of given roles."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

__all__ = ["kill", "role", "running"]


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


def role(command: list[str]) -> str:
    """Return the role of one of the pipeline's processes, from its command line."""
    if Path(command[0]).name == "java":
        return "executor" if any("CoarseGrainedExecutorBackend" in each for each in command) else "JVM"
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

"""A pipeline's processes, what each of them is, and the end of some of them."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

__all__ = ["kill", "role", "running"]


def running(pid: int) -> dict[psutil.Process, list[str]]:
    """Return a process and all that it started, in whichever generation, with their command lines.

    One that has just ended, or that nobody has waited for, has no command line and is left out.
    """
    found = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):  # a zombie's error is one of these
                if command := process.cmdline():
                    found[process] = command
    return found


def role(command: list[str]) -> str:
    """Say what a process of the pipeline is, of its command line."""
    if Path(command[0]).name == "java":
        return "executor" if any("CoarseGrainedExecutorBackend" in each for each in command) else "JVM"
    if "spark_sink" in command:
        return "driver"
    if command[-1].endswith("spark_sink/client/watchdog.py"):
        return "watchdog"
    if "cli" not in command:
        return "Python worker"
    return {"prepare": "prepare", "slot": "slot monitor"}.get(command[command.index("cli") + 1], "streamer")


def kill(pid: int, *roles: str) -> int:
    """Kill -9 the processes of these roles that a process has started; return how many were there."""
    count = 0
    for process, command in running(pid).items():
        if role(command) in roles:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
                count += 1
    return count

"""The error with which the last `run` or `land` on a staging directory ended, kept there for ``cdcpipe-spark status``. No pyspark.

It stays until one of them ends well. Its time tells whether it is older than the launcher that runs now. While a process has the
directory's lock no other process notes anything: a second `run` that is refused says nothing about the work that goes on.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from typing import TYPE_CHECKING, Any

from cdcpipe.errors import CdcpipeError
from cdcpipe.pipe.exitcode import ExitCode
from spark_sink.files.local import read_json, write_json
from spark_sink.staging.lock import lock_owner

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["clear", "note", "read"]

_logger = logging.getLogger(__name__)

_NAME = "last_error.json"


def note(root: Path, command: str, error: Exception) -> None:
    """Write an error down, if the staging directory is there to write it to, and nobody else's."""
    if not root.is_dir() or _is_in_use(root):
        return
    found: dict[str, Any] = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "command": command}
    if isinstance(error, CdcpipeError):
        found |= {"message": error.message, "hint": error.hint, "exit_code": int(error.exit_code)}
    else:  # its text may hold anything, a row's values too
        found |= {"message": f"unexpected {type(error).__name__}", "hint": None, "exit_code": int(ExitCode.SYSTEM_ERROR)}
    try:
        write_json(root / _NAME, found)
    except OSError as ex:  # a full disk, perhaps the very error; that one is told all the same
        _logger.warning("the error could not be noted in %s: %s", root, ex)


def clear(root: Path) -> None:
    """Forget the error: the work has ended well. Unless the directory is somebody else's by now."""
    if _is_in_use(root):
        return
    try:
        (root / _NAME).unlink(missing_ok=True)
    except OSError as ex:
        _logger.warning("the last error could not be removed from %s: %s", root, ex)


def _is_in_use(root: Path) -> bool:
    """Tell whether another process has the directory's lock."""
    owner = lock_owner(root)
    return owner is not None and (owner.get("pid"), owner.get("host")) != (os.getpid(), socket.gethostname())


def read(root: Path) -> dict[str, Any] | None:
    """Return what was noted (time, command, message, hint, exit_code), None if nothing was."""
    return read_json(root / _NAME)

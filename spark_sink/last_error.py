"""The last error with which somebody's work on a staging directory ended, kept there for ``cdcpipe-spark status``. No pyspark.

It stays until there is another: its time tells whether it is older than the launcher that runs now.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from cdcpipe.errors import CdcpipeError
from cdcpipe.pipe.exitcode import ExitCode
from spark_sink.staging import read_json, write_json

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["note", "read"]

_logger = logging.getLogger(__name__)

_NAME = "last_error.json"


def note(root: Path, command: str, error: Exception) -> None:
    """Write an error down, if the staging directory is there to write it to."""
    if not root.is_dir():
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


def read(root: Path) -> dict[str, Any] | None:
    """Return what was noted (time, command, message, hint, exit_code), None if nothing was."""
    return read_json(root / _NAME)

"""Keeps the error of the last `run` or `land` in the staging directory, for ``cdcpipe-spark status``. No pyspark.

The error stays there until a `run` or `land` ends without an error. A launcher that is killed leaves the error of an earlier one
there. So compare its time with that of the last start, which the lock file keeps (lock.py).

While the directory's lock is held, nothing is recorded: the error of a second `run` that is refused must not look like an error of
the first, which may be in the same process. So a command records its error after it has released the lock.

`note` and `clear` raise no error of the system: such an error would hide the command's own result.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from cdcpipe.errors import CdcpipeError, LostSlotError
from cdcpipe.pipe.exitcode import ExitCode
from spark_sink.files.local import DamagedFileError, read_json, write_json
from spark_sink.staging.lock import lock_owner

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["LOST_SLOT", "OTHER", "clear", "note", "read"]

_logger = logging.getLogger(__name__)

_NAME = "last_error.json"

LOST_SLOT, OTHER = "lost_slot", "other"
"""The kinds of errors. The exit code of a lost slot is that of a wrong password, too, and an alert has to know it."""


def note(root: Path, command: str, error: BaseException) -> None:
    """Record an error, if the staging directory exists and nobody holds its lock. A warehouse stays as it is."""
    if _is_in_use(root):
        return
    found: dict[str, Any] = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "command": command}
    found["kind"] = LOST_SLOT if isinstance(error, LostSlotError) else OTHER
    if isinstance(error, CdcpipeError):
        found |= {"message": error.message, "hint": error.hint, "exit_code": int(error.exit_code)}
    else:  # the text of another exception may contain values of rows
        found |= {"message": f"unexpected {type(error).__name__}", "hint": None, "exit_code": int(ExitCode.SYSTEM_ERROR)}
    try:
        if root.is_dir() and not (root / "_cdcpipe").is_dir():  # the warehouse may have been given as --staging by mistake
            write_json(root / _NAME, found)
    except OSError as ex:  # a full disk, perhaps the cause of the error itself, which the command still reports
        _logger.warning("cannot record the error in %s: %s", root, ex)


def clear(root: Path) -> None:
    """Delete the recorded error after a good end, unless somebody holds the directory's lock by now."""
    if _is_in_use(root):
        return
    try:
        (root / _NAME).unlink(missing_ok=True)
    except OSError as ex:
        _logger.warning("cannot remove the last error from %s: %s", root, ex)


def _is_in_use(root: Path) -> bool:
    """Tell whether somebody holds the directory's lock."""
    try:
        return lock_owner(root) is not None
    except PermissionError:  # the lock of another user
        return True
    except (DamagedFileError, OSError):  # no file, or a file system without locks: the command's own error says so
        return False


def read(root: Path) -> dict[str, Any] | None:
    """Return the recorded error (time, command, kind, message, hint, exit_code); None if there is none, or the file is damaged."""
    try:
        return read_json(root / _NAME)
    except DamagedFileError:
        return None

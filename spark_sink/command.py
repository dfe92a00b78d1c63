"""The ``cdcpipe`` command as a subprocess: how it is run, and what it says when it ends. No pyspark."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from spark_sink.restart import Failure

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["COMMAND", "environment", "failure_of", "is_report"]

COMMAND = (sys.executable, "-P", "-m", "cli")

_ERROR_PREFIX, _HINT_PREFIX = "cdcpipe: error: ", "cdcpipe: hint: "


def environment(temporary: Path | None = None) -> dict[str, str]:
    """Return our environment, with this package's directory where modules are looked for last, and ``temporary`` as $TMPDIR."""
    root = str(Path(__file__).resolve().parent.parent)
    changed = {"PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), root]))}
    if temporary is not None:
        changed["TMPDIR"] = str(temporary.absolute())
    return os.environ | changed


def is_report(line: str) -> bool:
    """Return whether a line on stderr belongs to the command's last words, which `failure_of` repeats."""
    return line.startswith((_ERROR_PREFIX, _HINT_PREFIX))


def failure_of(code: int, said: Sequence[str], end_lsn: int = 0) -> Failure:
    """Return how it ended, from its exit code and the lines that it wrote to stderr."""
    errors = [line.removeprefix(_ERROR_PREFIX) for line in said if line.startswith(_ERROR_PREFIX)]
    hints = [line.removeprefix(_HINT_PREFIX) for line in said if line.startswith(_HINT_PREFIX)]
    message = errors[-1] if errors else said[-1] if said else ""
    return Failure(code, end_lsn, message, hints[-1] if errors and hints else None)

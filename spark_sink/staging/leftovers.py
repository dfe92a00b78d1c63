"""Deletes what earlier launchers and readers left in a staging directory. No pyspark.

None of it is part of the log. Only the launcher that holds the lock may call these functions.
"""

from __future__ import annotations

import re
import time
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING

from spark_sink.files.local import TEMPORARY_PREFIX
from spark_sink.staging.log import epoch_directory, epoch_numbers, list_epochs
from spark_sink.staging.readers import remove_epoch

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["remove_empty_epochs", "remove_leftovers"]

_INDEX = re.compile(r"\..+\.idx\.[0-9]+-[0-9]+", re.ASCII)
"""The name of a half-written index (index.py). A reader that is still writing it goes on without the file."""
_SHARED_S = 86400.0
"""The age of a half-written file that nobody is writing any more, where other programs than the launcher write, too.

These are the root (`snapshot`, `doctor`) and `readers/` (pipelines). A program whose file is deleted would fail.
"""


def remove_leftovers(root: Path, before: int | None = None) -> None:
    """Delete open segments and half-written files in epochs with a lower number than ``before``, or in all.

    In the root and in `readers/`, delete half-written files that are old.
    """
    for number in epoch_numbers(root):
        if before is None or number < before:
            for path in list(epoch_directory(root, number).iterdir()):
                if path.suffix == ".open" or path.name.startswith(TEMPORARY_PREFIX) or _INDEX.fullmatch(path.name):
                    path.unlink(missing_ok=True)
    for directory in (root, root / "readers"):
        for path in directory.glob(f"{TEMPORARY_PREFIX}*"):
            with suppress(FileNotFoundError):  # it has got its name
                if time.time() - path.stat().st_mtime > _SHARED_S:
                    path.unlink()


def remove_empty_epochs(root: Path, before: int) -> None:
    """Delete the epochs with a lower number than ``before`` that have no sealed segment, except those that the log needs."""
    epochs = list_epochs(root)
    kept = {each.number for each in epochs if each.is_news}  # the chain of epochs, or a reader, needs these
    # A reader that is at the start of an empty epoch before a gap goes on from there.
    kept |= {before_gap.number for before_gap, each in pairwise(epochs) if each.gap is not None}
    for number in epoch_numbers(root):
        if number < before and number not in kept and not any(epoch_directory(root, number).glob("*.cdc")):
            remove_epoch(root, number)

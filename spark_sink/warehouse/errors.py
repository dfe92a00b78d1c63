"""The errors of a warehouse. No pyspark."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from cdcpipe.errors import CdcpipeError
from spark_sink.files.local import RESTORE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["WarehouseError", "undamaged"]


class WarehouseError(CdcpipeError):
    """The warehouse has the changes of another source, is damaged, or lacks changes that an operation needs."""


@contextmanager
def undamaged(path: Path, hint: str = RESTORE) -> Iterator[None]:
    """Make a WarehouseError of what reading values out of a JSON file raises if they are not there, or others."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as ex:
        raise WarehouseError(f"{path} is damaged: {ex!r}", hint=hint) from ex

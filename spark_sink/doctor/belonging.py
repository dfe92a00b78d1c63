"""Checks whether slot, staging directory and warehouse belong together, and how the tables of a new warehouse begin."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from cdcpipe.doctor.findings import Verdict, error, ok, warning
from cdcpipe.errors import CdcpipeError
from spark_sink.warehouse.belonging import check_belonging
from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["begin", "together"]

_WHY: Final = "run refuses them"


def together(root: Path, table_format: str, staging: Path, slot: str) -> Iterator[Verdict]:
    """Judge whether ``run`` accepts the three. Reads the small files with which each side records the other."""
    try:
        house = Warehouse(root, table_format)
        if house.exists:
            house = Warehouse.existing(root)  # with the choices of its first run
        check_belonging(house, staging, slot)
    except CdcpipeError as ex:
        yield error(ex.message, _WHY, ex.hint or "give the directories of this slot")
    else:
        yield ok(f"{house.name} and {staging} {'belong together' if house.exists else 'can be used together'}")


def begin(
    root: Path, table_format: str, server: Mapping[str, Any], *, creates_slot: bool, snapshot: str | None
) -> Iterator[Verdict]:
    """Judge whether a new warehouse begins with a copy of the tables' rows, given the facts about the server.

    With ``--snapshot`` the user has said what the tables begin with.
    """
    if creates_slot or snapshot is not None or not server.get("slot_exists") or Warehouse(root, table_format).exists:
        return
    yield warning(
        "the warehouse is new, and the slot is not",
        "its tables begin without the rows from before the slot's first change",
        "run with --snapshot initial, or with -c",
    )

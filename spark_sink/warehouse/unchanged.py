"""Checks that a start of `run` has not changed how a warehouse is written, while another command works with it. No pyspark."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spark_sink.warehouse import mask_settings
from spark_sink.warehouse.errors import WarehouseError
from spark_sink.warehouse.warehouse import Warehouse, choices

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["check_unchanged"]


def check_unchanged(house: Warehouse, names: Collection[str] | None = None) -> None:
    """Raise WarehouseError if the recorded choices, or the noted masks, are not those of ``house`` any more.

    Call this before a replica is made anew, with the tables' lock: with former choices it may lose deleted rows that were kept
    meanwhile. Call it also before tables are compared with what the server computes for these masks. Of the choices, only those
    in ``names`` count, if given.
    """
    own, recorded = choices(house), choices(Warehouse.existing(house.root))
    changed = [
        f"{name} is {recorded[name]} now, and was {own[name]}"
        for name in (own if names is None else names)
        if recorded[name] != own[name]
    ]
    if changed:
        raise WarehouseError(
            f"a start of run has changed how {house.name} is written since this command began: {', '.join(changed)}",
            hint="start the command again: it then works with the tables as that run does",
        )
    mask_settings.check_unchanged(house)

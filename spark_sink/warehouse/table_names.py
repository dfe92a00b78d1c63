"""The names of a warehouse's tables behind the gaps of the log, where a server may have lost renames. No pyspark.

    names(house)                # which table the server means now: by an OID and a name that it tells
    mask_names(house, tables)   # by which names a mask is for a table
    house.recorded_names()      # what to print, and what is in the catalog: the names that the tables have reached
    record_names(house)         # for the process that records names: tables that are behind a gap get their former names

A server that has lost changes has lost their renames, too. The tables keep these names until they are behind the lost changes, so
that each printed name is the one to which its rows belong. Both are equal without such a gap.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from spark_sink.schema.table import AFTER_ALL
from spark_sink.warehouse import gaps

if TYPE_CHECKING:
    from collections.abc import Iterable

    from spark_sink.schema.names import Names
    from spark_sink.schema.table import Table
    from spark_sink.staging.log import Epoch
    from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["mask_names", "names", "record_names"]

_logger = logging.getLogger(__name__)


def names(house: Warehouse, epochs: Iterable[Epoch] = ()) -> Names:
    """Return the names of the tables as the server of now has them. They go only by OIDs that the server at a place has.

    Tables whose renames were lost have their former names behind these changes, even if the tables have not come there yet.
    ``epochs`` are those of the log, for a caller that comes before its gaps are recorded (`gaps.record`).
    """
    found = _with_servers(house, epochs)
    for naming in found.undone(AFTER_ALL):
        found.add(naming)
    return found


def _with_servers(house: Warehouse, epochs: Iterable[Epoch] = ()) -> Names:
    found, known = house.recorded_names(), gaps.read(house)
    found.servers = gaps.servers([*known, *gaps.unrecorded(known, epochs)])
    return found


def mask_names(house: Warehouse, tables: Iterable[Table], epochs: Iterable[Epoch] = ()) -> dict[Table, set[tuple[str, str]]]:
    """Return for each table the names by which a mask is for it.

    They are the name of its directories, the last name that is recorded, and the one that it has again if the server has lost a
    rename: the rows of the gap's copy come under this name. ``epochs`` are as in `names`.
    """
    recorded, now = house.recorded_names(), names(house, epochs)
    return {table: recorded.first_and_last(table) | now.first_and_last(table) for table in tables}


def record_names(house: Warehouse) -> Names:
    """Return the names of the tables; record and log each former name that a table has again.

    Only the process that records names may call this. Tables that are not behind the lost changes yet keep the names that these
    gave: more of these changes may come.
    """
    found = _with_servers(house)
    if not found.servers.lost(AFTER_ALL):  # a warehouse without a gap may have no source yet
        return found
    position = house.source().position
    new = found.undone((0, 0) if position is None else (position.lsn + 1, -1))
    for naming in new:
        found.add(naming)
    if new:
        house.write_names(found)
    for each in new:
        _logger.warning("the server has lost the change of a name: %s is %s again, and its tables go on", each.former, each.name)
    return found

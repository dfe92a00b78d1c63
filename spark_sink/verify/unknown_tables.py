"""Names the published tables of which the warehouse has no table: nobody compares them, so nobody may believe that they are equal.

A table comes to the warehouse with its first change or with a copy of its rows. Before that it is not there: after ``--snapshot
never``, or for a moment after CREATE TABLE. Such a table with a key counts as one that could not be compared. Without a key it has
no replica anyway, and is only named, as the other tables without a key are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spark_sink.client import keyless
from spark_sink.schema.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["unknown_tables"]


def unknown_tables(house: Warehouse, published: Iterable[Mapping[str, Any]]) -> list[tuple[Table, bool]]:
    """Return the published tables that the warehouse does not have, in order, each with whether it has a key.

    ``published`` is what ``cdcpipe checksum`` has answered.
    """
    names = {(table.now.schema, table.now.name) for table in house.tables()}
    numbers = {versions[-1].relation_id for versions in house.all_versions().values()}
    unknown = [each for each in published if _is_unknown(each, names, numbers)]
    return sorted((Table(str(each["schema"]), str(each["name"])), keyless.has_key(each)) for each in unknown)


def _is_unknown(each: Mapping[str, Any], names: set[tuple[str, str]], numbers: set[int]) -> bool:
    """Tell whether the warehouse has no table of this name, nor this table under an earlier name. Columns have to be there."""
    return bool(each["columns"]) and (each["schema"], each["name"]) not in names and int(each["relation_id"]) not in numbers

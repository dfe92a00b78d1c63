"""Names of a catalog's database that are refused, and names of tables that were renamed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from cdcpipe.errors import InvalidArgumentsError
from spark_sink.pipeline.catalog import CatalogDatabase, parse_database
from spark_sink.schema.names import Names, Naming
from spark_sink.schema.table import Table
from spark_sink.warehouse.warehouse import Warehouse, WarehouseError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("name", ["", ".", "a.", ".b", "a.b.c"])
def test_invalid_names(name: str) -> None:
    with pytest.raises(InvalidArgumentsError, match="--catalog-database takes"):
        parse_database(name)


def test_a_renamed_table_leaves_its_name_before_its_tables_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table without a key has no replica. Its new name may be the same in the catalog."""
    old, new = Table("public", "Log"), Table("public", "log")
    catalog = SimpleNamespace(databaseExists=lambda _: True, tableExists=lambda _: False)
    spark: Any = SimpleNamespace(catalog=catalog, conf=SimpleNamespace(get=lambda *_: "hive"))
    house = Warehouse(tmp_path, "delta")
    names = CatalogDatabase(spark, "shop", house)
    names.register([old])
    with pytest.raises(WarehouseError, match=r"would both be shop\.public__log"):
        names.register([new])
    monkeypatch.setattr(house, "names", lambda: Names([Naming((5, 0), 7, old, new, old)]))
    names.rename()
    names.register([old])

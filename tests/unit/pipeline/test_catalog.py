"""Names of a catalog's database that are refused, of tables that were renamed, and of tables that are not there any more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors.exceptions.base import AnalysisException

from cdcpipe.errors import InvalidArgumentsError
from spark_sink.pipeline.catalog import CatalogDatabase, parse_database
from spark_sink.pipeline.history_views import HistoryViews
from spark_sink.schema.names import Names, Naming
from spark_sink.schema.table import Table
from spark_sink.warehouse.errors import WarehouseError
from spark_sink.warehouse.warehouse import Warehouse

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
    monkeypatch.setattr(house, "recorded_names", lambda: Names([Naming((5, 0), 7, old, new, old)]))
    names.rename()
    names.register([old])


FRUIT = Table("public", "fruit")


class LeftError(AnalysisException):
    """What Delta says of a name whose table is not at its place."""

    def __init__(self, place: object) -> None:
        super().__init__(f"{place} does not exist")
        self._place = place

    def getCondition(self) -> str:  # noqa: N802 - Spark's name
        return "DELTA_PATH_DOES_NOT_EXIST"

    def getMessageParameters(self) -> dict[str, str]:  # noqa: N802 - Spark's name
        return {"path": f"file:{self._place}"}


class LeftNames:
    """A session whose catalog has names of tables that are not at their places. It takes statements that drop one."""

    def __init__(self, places: dict[str, object]) -> None:
        self.places = places
        self.catalog = SimpleNamespace(databaseExists=lambda _: True, tableExists=self._exists)
        self.conf = SimpleNamespace(get=lambda *_: "hive")

    def _exists(self, name: str) -> bool:
        if name in self.places:
            raise LeftError(self.places[name])
        return False

    def sql(self, statement: str) -> None:
        assert statement.startswith("DROP TABLE ")
        del self.places[statement.removeprefix("DROP TABLE ")]


@pytest.mark.parametrize(
    ("history", "place", "is_dropped"),
    [("off", "history/public.fruit", True), ("view", "history/public.fruit", True), ("off", "replica/public.fruit", False)],
)
def test_a_stored_history_that_was_deleted(tmp_path: Path, history: str, place: str, *, is_dropped: bool) -> None:
    """Each run ended with an error of Delta Lake. With --history table, a new history has the name."""
    spark: Any = LeftNames({"h": tmp_path / place})
    HistoryViews(spark, Warehouse(tmp_path, "delta", history=history)).drop([FRUIT], "h")
    assert ("h" not in spark.places) == is_dropped


def test_the_name_of_a_stored_history_stays_while_histories_are_stored(tmp_path: Path) -> None:
    spark: Any = LeftNames({"h": tmp_path / "history/public.fruit"})
    HistoryViews(spark, Warehouse(tmp_path, "delta", history="table")).drop([FRUIT], "h")
    assert spark.places


def test_a_renamed_table_leaves_the_name_of_a_moved_warehouse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So it does if its replica was deleted. A name that something else has had stays."""
    house = Warehouse(tmp_path, "delta")
    left = {"__changelog": "/former/changelog/public.fruit", "": house.replica(FRUIT), "__history": "/elsewhere/public.fruit"}
    spark: Any = LeftNames({f"`shop`.`public__fruit{name}`": place for name, place in left.items()})
    names = CatalogDatabase(spark, "shop", house)
    monkeypatch.setattr(house, "recorded_names", lambda: Names([Naming((5, 0), 7, FRUIT, Table("public", "pear"), FRUIT)]))
    names.rename()
    assert list(spark.places) == ["`shop`.`public__fruit__history`"]


class FullCatalog:
    """A session whose catalog has a name for each table at a place, and counts how often it is asked."""

    def __init__(self, places: dict[str, Path]) -> None:
        self.places = places
        self.asked = 0
        self.catalog = SimpleNamespace(databaseExists=lambda _: True, tableExists=self._exists)
        self.conf = SimpleNamespace(get=lambda *_: "hive")

    def _exists(self, name: str) -> bool:
        self.asked += 1
        return name in self.places

    def sql(self, statement: str) -> Any:
        self.asked += 1
        name = statement.rsplit(" ", 1)[1]
        if statement.startswith("DROP TABLE"):
            del self.places[name]
        location = [{"col_name": "Location", "data_type": f"file:{self.places.get(name)}"}]
        return SimpleNamespace(collect=lambda: location if statement.startswith("DESCRIBE") else [])


def test_a_table_that_is_renamed_each_night(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each start and each night looked up the name of today's table once for each table that had it: 7,000 calls for 1,000."""
    house = Warehouse(tmp_path, "delta")
    nights = [Table("public", "orders", number) for number in range(1_001)]

    def night(number: int) -> Naming:
        return Naming((number, 0), number, Table("public", "orders"), Table("public", f"orders_{number}"), nights[number])

    def called(name: str, table: Table) -> dict[str, Path]:
        return {f"`shop`.`{name}__changelog`": house.changelog(table), f"`shop`.`{name}`": house.replica(table)}

    known = Names(map(night, range(999)))
    monkeypatch.setattr(house, "recorded_names", lambda: known)
    spark: Any = FullCatalog(called("public__orders", nights[999]))
    names = CatalogDatabase(spark, "shop", house)
    names.rename()
    at_start, spark.asked = spark.asked, 0
    assert len(spark.places) == 2  # they are those of a table that has no other name
    names.rename()
    assert (at_start, spark.asked) == (7, 0)
    known.add(night(999))
    spark.places |= called("public__orders_998", nights[998])
    names.rename()
    assert spark.places == called("public__orders_998", nights[998])
    # A table that has its former name again leaves it once more.
    for place, former, name in ((1_000, "orders_998", "orders"), (1_001, "orders", "orders_998")):
        known.add(Naming((place, 0), 998, Table("public", former), Table("public", name), nights[998]))
        spark.places = called(f"public__{former}", nights[998])
        names.rename()
        assert not spark.places


def test_a_name_is_dropped_whichever_table_had_it_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    house = Warehouse(tmp_path, "delta")
    tables = [Table("public", "orders", number) for number in range(3)]
    known = Names(Naming((table.number, 0), table.number, FRUIT, Table("public", f"o{table.number}"), table) for table in tables)
    monkeypatch.setattr(house, "recorded_names", lambda: known)
    for table in tables:
        spark: Any = FullCatalog({"`shop`.`public__fruit`": house.replica(table)})
        CatalogDatabase(spark, "shop", house).rename()
        assert not spark.places

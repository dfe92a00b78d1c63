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
    monkeypatch.setattr(house, "names", lambda: Names([Naming((5, 0), 7, old, new, old)]))
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
    HistoryViews(spark, Warehouse(tmp_path, "delta", history=history)).drop(FRUIT, "h")
    assert ("h" not in spark.places) == is_dropped


def test_the_name_of_a_stored_history_stays_while_histories_are_stored(tmp_path: Path) -> None:
    spark: Any = LeftNames({"h": tmp_path / "history/public.fruit"})
    HistoryViews(spark, Warehouse(tmp_path, "delta", history="table")).drop(FRUIT, "h")
    assert spark.places


def test_a_renamed_table_leaves_the_name_of_a_moved_warehouse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So it does if its replica was deleted. A name that something else has had stays."""
    house = Warehouse(tmp_path, "delta")
    left = {"__changelog": "/former/changelog/public.fruit", "": house.replica(FRUIT), "__history": "/elsewhere/public.fruit"}
    spark: Any = LeftNames({f"`shop`.`public__fruit{name}`": place for name, place in left.items()})
    names = CatalogDatabase(spark, "shop", house)
    monkeypatch.setattr(house, "names", lambda: Names([Naming((5, 0), 7, FRUIT, Table("public", "pear"), FRUIT)]))
    names.rename()
    assert list(spark.places) == ["`shop`.`public__fruit__history`"]

"""What two looks at the catalog tell: which tables have rows that the stream does not have."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from cdcpipe.errors import CdcpipeError
from cdcpipe.lsn import LSN
from spark_sink.client.prepare import Prepared
from spark_sink.launcher.config import LauncherConfig
from spark_sink.schema.table import Table
from spark_sink.snapshot import publication
from spark_sink.snapshot.publication import ATTACHED, CAME, CAME_BACK, KEY, REPLACED, REWRITTEN, Finding, compare, read, seen, write
from spark_sink.staging.log import Epoch
from spark_sink.warehouse.warehouse import Warehouse, WarehouseError

EPOCH = Epoch(1, "7123", 1, "shop", "slot", ("p",), {}, 0)
T = Table("public", "t")


def part(relation_id: int = 100, file: int = 1, definition: str = "a", has_rows: bool | None = None) -> dict[str, Any]:
    return {
        "relation_id": relation_id,
        "file": file,
        "definition": definition,
        "is_attached": has_rows is not None,
        "has_rows": has_rows,
    }


def table(name: str = "t", **changes: Any) -> dict[str, Any]:
    found = {"schema": "public", "name": name, "relation_id": 100, "replica_identity": "d", "primary_key": ["id"], "columns": [{}]}
    return found | {"published_by": [7], "parts": [part()]} | changes


def found(*tables: dict[str, Any], lsn: int = 200, system_id: str = "7123") -> Prepared:
    return Prepared(180000, system_id, 1, "shop", LSN(lsn), LSN(0), tables)


def not_keyed(_: Table) -> bool:
    return False


BEFORE = seen(found(table(), lsn=100))


@pytest.mark.parametrize(
    ("now", "findings"),
    [
        (table(), []),
        # Since the look before: somebody may have copied it meanwhile.
        (table("u"), [Finding(Table("public", "u"), 100, CAME)]),
        (table("without_columns", columns=[]), []),
        (table(relation_id=101), [Finding(T, 200, REPLACED)]),
        (table(published_by=[8]), [Finding(T, 200, CAME_BACK)]),
        (table(published_by=[7, 8]), []),
        (table(parts=[part(file=2, definition="b")]), [Finding(T, 200, REWRITTEN)]),
        # VACUUM FULL, or TRUNCATE.
        (table(parts=[part(file=2)]), []),
        # ADD COLUMN with a constant.
        (table(parts=[part(definition="b")]), []),
        (table(parts=[part(), part(101, has_rows=True)]), [Finding(T, 200, ATTACHED)]),
        (table(parts=[part(), part(101, has_rows=False)]), []),
        (table(parts=[part(), part(101)]), []),
        (table(parts=[]), []),
        (
            table(published_by=[9], parts=[part(file=2, definition="b"), part(101, has_rows=True)]),
            [Finding(T, 200, CAME_BACK), Finding(T, 200, REWRITTEN), Finding(T, 200, ATTACHED)],
        ),
    ],
)
def test_what_two_looks_tell(now: dict[str, Any], findings: list[Finding]) -> None:
    assert compare(BEFORE, found(now), not_keyed) == findings


def test_a_table_that_gets_a_key() -> None:
    keyless = seen(found(table(primary_key=[]), lsn=100))
    assert compare(keyless, found(table()), not_keyed) == [Finding(T, 200, KEY)]
    assert compare(keyless, found(table(primary_key=[], replica_identity="i")), not_keyed) == [Finding(T, 200, KEY)]
    assert compare(keyless, found(table()), lambda _: True) == []  # the stream has told it
    assert compare(keyless, found(table(primary_key=[])), not_keyed) == []
    assert compare(BEFORE, found(table(primary_key=[])), not_keyed) == []


def test_the_first_look_only_records() -> None:
    """So does the first look at another server, and one after a record that was made without parts."""
    assert compare(None, found(table()), not_keyed) == []
    assert compare(BEFORE, found(table("u"), system_id="7999"), not_keyed) == []
    without = seen(found({name: value for name, value in table().items() if name not in ("parts", "published_by")}))
    assert compare(without, found(table(parts=[part(101, 2, "b", has_rows=True)], published_by=[8])), not_keyed) == []


def test_the_record_in_the_warehouse(tmp_path: Path) -> None:
    house = Warehouse(tmp_path, "delta")
    house.open(EPOCH)
    assert read(house) is None
    without = {name: value for name, value in table("Without").items() if name not in ("parts", "published_by")}
    now = seen(found(table(parts=[part(), part(101, 2, "b")]), without))
    write(house, now)
    assert read(house) == now
    write(house, replace(now, lsn=300))
    assert read(house) == replace(now, lsn=300)
    (tmp_path / "_cdcpipe/published.json").write_text("{}")
    with pytest.raises(WarehouseError, match="is damaged"):
        read(house)


def test_the_first_run_makes_the_first_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a new warehouse, and in one of an older version; but not in one that the run is about to refuse."""
    answers: list[Any] = []

    def look(*_: Any) -> Prepared:
        answer = answers.pop()
        if isinstance(answer, Exception):
            raise answer
        return cast("Prepared", answer)

    monkeypatch.setattr(publication, "look", look)
    config = LauncherConfig("slot", tmp_path)
    prepared = found({name: value for name, value in table().items() if name not in ("parts", "published_by")}, lsn=100)

    new = Warehouse(tmp_path / "new", "delta")
    answers.append(found(table()))
    publication.begin(new, config, prepared, lambda: False)
    assert read(new) == seen(found(table()))
    publication.begin(new, config, prepared, lambda: False)  # asks nobody

    away = Warehouse(tmp_path / "away", "delta")
    answers.append(CdcpipeError("the server is away"))
    publication.begin(away, config, prepared, lambda: False)
    assert read(away) == seen(prepared)

    older = Warehouse(tmp_path / "older", "delta")
    older.open(EPOCH)
    for other in (LauncherConfig("another", tmp_path), config):
        answers[:] = [found(table())]
        publication.begin(older, other, prepared, lambda: False)
        assert (read(older) is None) == (other.slot == "another")

"""Published tables that the warehouse lacks: they are asked for on the connection that compares."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from spark_sink.schema.table import Table
from spark_sink.staging.log import Epoch
from spark_sink.verify import comparison
from spark_sink.warehouse.warehouse import Warehouse
from support.descriptions import ID, version

EPOCH = Epoch(1, "7123", 1, "shop", "slot", ("p",), {}, 0)


class Server:
    """A `ChecksumServer` whose role may do nothing else."""

    def ask(self, request: Any) -> list[dict[str, Any]]:
        assert request == {"published": ("p",)}
        there = {"schema": "public", "replica_identity": "d", "primary_key": ["id"], "columns": ["id"]}
        return [
            there | {"name": "lacking", "relation_id": 1},
            there | {"name": "renamed", "relation_id": 16384},
            there | {"name": "fruit", "relation_id": 3},
            there | {"name": "empty", "relation_id": 4, "columns": []},
            there | {"name": "keyless", "relation_id": 5, "primary_key": []},
        ]


def test_they_count_as_not_compared(tmp_path: Path) -> None:
    house = Warehouse(tmp_path, "delta")
    house.open(EPOCH)
    for name, relation_id in (("fruit", 3), ("former", 16384)):
        house.write_versions(Table("public", name), [replace(version(1, 0, ID), relation_id=relation_id)])
    [result] = comparison._unknown(house, Server(), lambda *_: None)
    assert str(result.table) == "public.lacking"
    assert "the warehouse has no such table" in str(result.problem)

"""Creates a staging directory and a warehouse with one small table, without a server and without Spark."""

from pathlib import Path

from cdcpipe.pgoutput.messages import Insert
from spark_sink.schema.table import Table, Version
from spark_sink.staging.log import Epoch, Position, log_end
from spark_sink.staging.readers import register_reader
from spark_sink.warehouse.belonging import record_staging
from spark_sink.warehouse.warehouse import Warehouse
from support.delta_log import added, commit
from support.pgoutput_build import build
from support.segments import START_LSN, Log, relation


def make_pipeline(tmp_path: Path) -> Path:
    """Create a staging directory and a warehouse with one table. The replica is one transaction behind."""
    log = Log(tmp_path / "staging")
    fruit = relation(1, "fruit", ("id", 23))
    for number in range(3):
        log.segment([build(Insert(None, 1, (b"%d" % number,)))], before=[fruit])
    house = Warehouse(tmp_path / "warehouse", "delta")
    house.open(Epoch(1, "7123456789", 1, "db", "s", ("p",), {}, START_LSN))
    record_staging(house, tmp_path / "staging")
    end = log_end(tmp_path / "staging")
    assert end is not None
    house.record(Position(1, START_LSN))
    house.record(end)
    table = Table("public", "fruit")
    house.write_versions(table, [Version(0, 0, 1, ("id",), ("id",))])
    register_reader(tmp_path / "staging", "tables", Position(1, START_LSN + 0x200), house.name)
    for path, lsn, rows in ((house.changelog(table), end.lsn, 3), (house.replica(table), START_LSN + 0x200, 2)):
        transaction = {"txn": {"appId": "cdcpipe", "version": int(lsn)}}
        commit(path / "_delta_log", 0, {"commitInfo": {"timestamp": 1_700_000_000_000}}, transaction, added("a", rows))
    return tmp_path

"""The log of a Delta table, replayed without Spark."""

from pathlib import Path

import pytest

from spark_sink.delta import log as delta_log
from spark_sink.delta.log import read_table
from support.delta_log import added, commit


def test_a_log_is_replayed(tmp_path: Path) -> None:
    log = tmp_path / "_delta_log"
    assert read_table(tmp_path) is None
    commit(log, 0, {"commitInfo": {"timestamp": 1000}}, {"metaData": {}}, added("a", 10), added("b", 5))
    first = read_table(tmp_path)
    assert first == delta_log.TableState(version=0, lsn=None, written_ms=1000, rows=15, sizes=(10, 10))
    vector = {"storageType": "u", "pathOrInlineDv": "x", "offset": 1, "sizeInBytes": 34, "cardinality": 4}
    commit(
        log,
        1,
        {"commitInfo": {"timestamp": 2000}},
        {"txn": {"appId": "cdcpipe", "version": 77}},
        {"txn": {"appId": "somebody", "version": 99}},
        {"remove": {"path": "a"}},
        added("a", 10, vector=vector),
    )
    assert read_table(tmp_path, first) == delta_log.TableState(1, 77, 2000, 11, (10, 10))
    commit(log, 2, {"remove": {"path": "a", "deletionVector": vector}}, added("c", None))
    state = read_table(tmp_path)
    assert state is not None
    assert (state.files, state.rows, state.lsn) == (2, None, 77)
    assert read_table(tmp_path, state) is state
    (log / f"{3:020d}.json").write_text("{")
    with pytest.raises(ValueError, match="Expecting"):
        read_table(tmp_path)

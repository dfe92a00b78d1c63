"""The end of a copy, without Spark and without a server."""

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spark_sink.launcher.config import LauncherConfig
from spark_sink.snapshot import copy as module
from spark_sink.snapshot.copy import Snapshot
from spark_sink.staging import copied
from spark_sink.staging.log import Epoch
from spark_sink.warehouse.warehouse import Warehouse
from support.waiting import DEADLINE_S


class Copy(Snapshot):
    """Its only job begins just after the jobs were cancelled, and runs until they are cancelled again."""

    def __init__(self, directory: Path) -> None:
        super().__init__(LauncherConfig("s", directory / "staging"), Warehouse(directory / "warehouse", "delta"), "copy", 1, 0.0)
        self.cancelled, self.cancelled_later = threading.Event(), threading.Event()

    def cancel(self, _tag: str) -> None:
        (self.cancelled_later if self.cancelled.is_set() else self.cancelled).set()

    def _copy(self) -> None:
        self.cancelled.wait(DEADLINE_S)
        assert self.cancelled_later.wait(DEADLINE_S)


def test_a_stop_cancels_also_a_job_that_is_about_to_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CANCEL_INTERVAL_S", 0.01)
    snapshot = Copy(tmp_path)
    spark = SimpleNamespace(sparkContext=SimpleNamespace(cancelJobsWithTag=snapshot.cancel))
    monkeypatch.setattr(snapshot, "_spark", spark)
    snapshot._thread.start()
    snapshot.stop()
    assert snapshot.wait(0)


def test_a_later_snapshot_has_the_epoch_that_the_launcher_has_begun_since(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a failover. In the epoch before, its rows would come before changes that they have already."""
    first, second = (Epoch(number, "7123", 1, "shop", "slot", ("p",), {}, lsn) for number, lsn in ((1, 0), (2, 0x100)))
    house = Warehouse(tmp_path / "warehouse", "delta")
    house.open(first)
    made: Any = Snapshot(LauncherConfig("slot", tmp_path / "staging"), house, "snapshot", 1, 0.0)
    prepared = SimpleNamespace(server_version=180000)
    made._export = SimpleNamespace(connection={}, prepared=prepared, name="x", consistent_point=0x200)
    made._spark, made._counts, made._epochs = SimpleNamespace(), (0, 0), [first]
    monkeypatch.setattr(module, "list_epochs", lambda _: [first, second])
    monkeypatch.setattr(copied, "record", lambda *_: None)
    made._plan = lambda *_: SimpleNamespace(time_us=0, is_utf8=True)
    made._choose = lambda *_: []
    assert made._copy_round(is_first=True) == []
    assert json.loads((made._scratch / "position.json").read_text()) == {"epoch": 2, "lsn": 0x200}

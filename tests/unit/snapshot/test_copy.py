"""The end of a copy, without Spark and without a server."""

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from spark_sink.launcher.config import LauncherConfig
from spark_sink.snapshot import copy as module
from spark_sink.snapshot.copy import Snapshot
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

"""The initial snapshot, without Spark and without a server: which one it takes, and when it leaves the slot to the launcher."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from cdcpipe.lsn import LSN
from spark_sink.snapshot import copy
from spark_sink.snapshot.initial import InitialSnapshot
from spark_sink.warehouse.warehouse import Warehouse
from support.fake_streamer import make_fake
from support.staged import make_epoch

if TYPE_CHECKING:
    from pathlib import Path

    from support.fake_streamer import Fake


class Exports:
    """Stands in for `ExportedSnapshot`: the first is the one at 0/200 that a killed run has left, the next is new."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self.creates_slot: list[bool] = []
        monkeypatch.setattr(copy, "ExportedSnapshot", self.take)

    def take(self, config: Any, *_: Any, **_options: Any) -> Any:
        self.creates_slot.append(config.create_slot)
        is_left_over = not self.done
        lsn = LSN(0x200 if is_left_over else 0x300)
        self.done.append(f"{lsn} taken")
        return SimpleNamespace(consistent_point=lsn, is_left_over=is_left_over, close=lambda: self.done.append(f"{lsn} dropped"))


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    return make_fake(tmp_path, monkeypatch)


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> Exports:
    return Exports(monkeypatch)


def prepare(server: Fake, mode: str | None = "initial") -> InitialSnapshot:
    house = Warehouse(server.directory / "warehouse", "delta")
    snapshot = InitialSnapshot(replace(server.config(), create_slot=True), house, mode)
    snapshot.prepare(lambda: False)
    return snapshot


@pytest.mark.parametrize("start_lsn", [None, 0x100, 0x210])
def test_a_snapshot_from_before_the_log_is_not_used(server: Fake, exports: Exports, start_lsn: int | None) -> None:
    """The staging directory was lost. The log had changes from after the snapshot, and the slot has confirmed them."""
    if start_lsn is not None:
        make_epoch(server.staging, 1, start_lsn)  # otherwise the launcher is about to begin it
    prepare(server)
    taken_anew = ["0/200 taken", "0/200 dropped", "0/300 taken"]
    assert exports.done == (["0/200 taken"] if start_lsn == 0x100 else taken_anew)

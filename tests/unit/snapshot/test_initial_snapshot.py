"""The initial snapshot, without Spark and without a server: which one it takes, and when it leaves the slot to the launcher."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from upath import UPath

from cdcpipe.lsn import LSN
from cdcpipe.pipe.exitcode import ExitCode
from spark_sink.schema.table import Table
from spark_sink.snapshot import copy
from spark_sink.snapshot.initial import InitialSnapshot
from spark_sink.staging.gap import Gap
from spark_sink.staging.log import Epoch
from spark_sink.warehouse.initial_copy import is_begun
from spark_sink.warehouse.warehouse import Warehouse
from support.descriptions import ID, version
from support.fake_streamer import make_fake
from support.staged import make_epoch

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.fake_streamer import Fake


class Exports:
    """Stands in for `ExportedSnapshot`: the first is the one at 0/200 that a killed run has left, the next is new."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self.creates_slot: list[bool] = []
        monkeypatch.setattr(copy, "ExportedSnapshot", self.take)

    def take(self, config: Any, *_: Any, on_held: Callable[[], None], **_options: Any) -> Any:
        on_held()
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


def test_the_first_copy_into_an_object_store_is_made_before_there_is_a_staging_directory(server: Fake, tmp_path: Path) -> None:
    house = Warehouse(UPath(f"memory://{tmp_path.name}"), "delta")
    snapshot = InitialSnapshot(replace(server.config(), staging=tmp_path / "none"), house, "initial")
    assert not snapshot.progress.waits_for_tables


def copy_one(server: Fake) -> None:
    """Leave what a killed run leaves: one table is copied, and the snapshot is not complete."""
    house = Warehouse(server.directory / "warehouse", "delta")
    house.open(Epoch(1, "7", 1, "db", "s", ("p",), {}, 0x100))
    house.write_versions(Table("public", "fruit"), [replace(version(0x200, 0, ID), snapshot=((1, "id"),))])
    InitialSnapshot(server.config(), house)._note(is_complete=False)


@pytest.mark.parametrize("is_log_there", [True, False])
@pytest.mark.parametrize("is_copied", [True, False])
@pytest.mark.parametrize("mode", [None, "initial"])
@pytest.mark.parametrize("failure", [{"exit": ExitCode.SLOT_NOT_EXIST}, {}])
def test_only_a_new_pipeline_gets_a_slot(
    server: Fake, exports: Exports, mode: str | None, failure: dict[str, Any], *, is_log_there: bool, is_copied: bool
) -> None:
    """A slot that is gone is a gap. The launcher took a new one for the former one, as after pg_upgrade, or on a wrong server."""
    if is_log_there:
        make_epoch(server.staging, 1, 0x100)
    if is_copied:
        copy_one(server)
    server.set_turns([failure])
    snapshot = prepare(server, mode)
    is_new = not is_log_there and not is_copied
    assert all("-c" not in start for start in server.starts)
    assert snapshot.is_needed == bool(exports.done) == (is_new or not failure)
    assert is_begun(snapshot.warehouse) == (is_copied or snapshot.is_needed)
    if snapshot.is_needed:
        snapshot._take_another()  # the server has restarted, and may have lost the slot
        assert exports.creates_slot[0] is is_new
        assert not exports.creates_slot[-1]


def test_a_slot_that_another_server_of_the_names_had_not(server: Fake, exports: Exports) -> None:
    """A standby has answered, and then the primary, where the launcher finds the slot and no gap."""
    copy_one(server)
    server.set_turns([{"exit": ExitCode.SLOT_NOT_EXIST}, {}])
    snapshot = prepare(server)
    assert (snapshot.is_left, snapshot.is_needed, exports.done) == (True, False, [])
    snapshot.prepare(lambda: False)
    assert (snapshot.is_left, snapshot.is_needed) == (False, True)
    assert exports.done


@pytest.mark.parametrize("has_gap", [True, False])
def test_new_tables_that_begin_without_their_rows_are_named(
    server: Fake, caplog: pytest.LogCaptureFixture, *, has_gap: bool
) -> None:
    """Behind a gap of the log, all tables are copied."""
    gap = {"gap": Gap(0x100, "the slot was lost", 1.0, 2.0).to_json()} if has_gap else {}
    make_epoch(server.staging, 1, 0x200, **gap)
    snapshot = InitialSnapshot(server.config(), Warehouse(server.directory / "warehouse", "delta"))
    snapshot.prepare(lambda: False)
    assert not snapshot.is_needed
    assert ("begin without the rows" in caplog.text) == (not has_gap)

"""The copy of all tables after a gap, without Spark: when it may begin."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cdcpipe.errors import CdcpipeError, InvalidArgumentsError, UnreachableError
from cdcpipe.lsn import LSN
from cdcpipe.pgoutput.messages import Column, Relation
from cdcpipe.pipe.exitcode import ExitCode
from cdcpipe.retry import RetryPolicy
from spark_sink.client.prepare import Prepared
from spark_sink.snapshot import copy, two_looks
from spark_sink.snapshot import gap as module
from spark_sink.snapshot import plan as plan_module
from spark_sink.snapshot.gap import GapSnapshot
from spark_sink.snapshot.homes import Homes
from spark_sink.snapshot.initial import InitialSnapshot
from spark_sink.snapshot.plan import Plan, TablePlan
from spark_sink.snapshot.tables import TableSnapshot
from spark_sink.staging.gap import Gap
from spark_sink.staging.log import Epoch, OtherSourceError
from spark_sink.warehouse import gaps
from spark_sink.warehouse.initial_copy import is_unfinished
from spark_sink.warehouse.last_look import Seen, read, write
from spark_sink.warehouse.warehouse import Warehouse
from support.fake_streamer import Fake, make_fake
from support.staged import make_epoch

EPOCH = Epoch(2, "7", 2, "db", "s", ("p",), {}, 0x500, gap=Gap(0x400, "the server was promoted", 1.0, 2.0))


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Return a server on another timeline, whose WAL passes the end of the gap, 0/500, at the third look."""
    monkeypatch.setattr(module, "_LOOK_S", 0.0)
    made = make_fake(tmp_path, monkeypatch)
    made.set_turns([{"wal_lsn": lsn, "timeline": 2} for lsn in ("0/450", "0/4FF", "0/500", "0/600")])
    make_epoch(made.staging, 2, 0x500, timeline=2)
    return made


@pytest.fixture
def snapshot(server: Fake, tmp_path: Path) -> GapSnapshot:
    house = Warehouse(tmp_path / "warehouse", "delta")
    house.open(EPOCH)
    gaps.record(house, [EPOCH])
    return GapSnapshot(replace(server.config(), available_now=False), house)


class Exports:
    """Stands in for `ExportedSnapshot`: snapshots at these positions, the first of which another run has left."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *lsns: int) -> None:
        self.lsns = list(lsns)
        self.done: list[str] = []
        monkeypatch.setattr(copy, "ExportedSnapshot", self.take)

    def take(self, *_: Any, **_options: Any) -> Any:
        lsn, is_left_over = LSN(self.lsns.pop(0)), not self.done
        self.done.append(f"{lsn} taken")
        return SimpleNamespace(consistent_point=lsn, is_left_over=is_left_over, close=lambda: self.done.append(f"{lsn} dropped"))


def looks(server: Fake) -> int:
    return sum("prepare" in json.loads(line) for line in server.read("starts"))


@pytest.fixture(autouse=True)
def catalog(monkeypatch: pytest.MonkeyPatch) -> list[Prepared | CdcpipeError]:
    """What the looks at the catalog find. After the last one, they find nothing."""
    answers: list[Prepared | CdcpipeError] = []

    def look(*_: Any) -> Prepared:
        answer = answers.pop(0) if answers else CdcpipeError("the server is away")
        if isinstance(answer, CdcpipeError):
            raise answer
        return answer

    monkeypatch.setattr(two_looks, "look", look)
    return answers


def test_it_begins_once_the_wal_has_passed_the_gap(server: Fake, snapshot: GapSnapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    exports = Exports(monkeypatch, 0x510)
    snapshot.prepare(lambda: False)
    assert (looks(server), exports.done) == (3, ["0/510 taken"])
    # So does the next one, if the server drops this one during the copies.
    server.set_turns([{"wal_lsn": lsn, "timeline": 2} for lsn in ("0/450", "0/500")])
    (server.directory / "starts").unlink()
    exports.lsns.append(0x520)
    snapshot._take_another()
    assert (looks(server), exports.done) == (2, ["0/510 taken", "0/510 dropped", "0/520 taken"])


def test_a_server_that_restarts_before_it_has_passed_the_gap_is_waited_for(
    server: Fake, snapshot: GapSnapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failover a server often restarts. One look that met this ended the run."""
    monkeypatch.setattr(copy, "_RESTART", RetryPolicy(attempts=3))
    away = [
        {"exit": int(ExitCode.INIT_FAILED), "stderr": f"cdcpipe: error: {UnreachableError.BEGINNING}Connection refused\n"},
        {"exit": int(ExitCode.PG_CLOSED), "stderr": "cdcpipe: error: the server closed the connection\n"},
    ]
    behind, there = ({"wal_lsn": lsn, "timeline": 2} for lsn in ("0/450", "0/500"))
    server.set_turns([behind, *away, behind, *away, there])
    exports = Exports(monkeypatch, 0x510)
    snapshot.prepare(lambda: False)
    assert (looks(server), exports.done) == (7, ["0/510 taken"])


def test_a_server_that_the_launcher_waits_for_is_left_to_the_launcher(
    server: Fake, snapshot: GapSnapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher outlasts a restart of any length, and makes a slot that is missing. A look of the copy's own ended the run."""
    waits = iter([True, True, False])
    waiting = GapSnapshot(replace(server.config(), available_now=False), snapshot.warehouse, is_ahead=lambda: next(waits))
    server.set_turns([{"wal_lsn": "0/500", "timeline": 2}])
    exports = Exports(monkeypatch, 0x510)
    waiting.prepare(lambda: False)
    assert (looks(server), exports.done, list(waits)) == (1, ["0/510 taken"], [])
    with pytest.raises(InterruptedError):
        GapSnapshot(server.config(), snapshot.warehouse, is_ahead=lambda: True).prepare(lambda: True)


def test_the_first_look_at_another_server_comes_before_the_copies(
    snapshot: GapSnapshot,
    monkeypatch: pytest.MonkeyPatch,
    catalog: list[Prepared | CdcpipeError],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It only records. After copies of hours it took for known what had been attached or rewritten meanwhile."""
    house = snapshot.warehouse
    write(house, Seen("6", 0x300, {}))
    catalog.append(Prepared(180000, "7", 2, "db", LSN(0x505), LSN(0), ()))
    exports, taken = Exports(monkeypatch, 0x510, 0x520), []
    take = exports.take

    def noting(*args: Any, **options: Any) -> Any:
        taken.append(read(house))
        return take(*args, **options)

    monkeypatch.setattr(copy, "ExportedSnapshot", noting)
    snapshot.prepare(lambda: False)
    assert taken == [Seen("7", 0x505, {}, epoch=2)]
    assert "could not look" not in caplog.text
    snapshot.prepare(lambda: False)  # a look that fails does not keep the tables from their copies
    assert "before the next look: the server is away" in caplog.text


def test_a_snapshot_from_before_the_gap_is_not_used(server: Fake, snapshot: GapSnapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run took it after an earlier gap, and was killed. The server has it still, but not the changes that were lost since."""
    exports = Exports(monkeypatch, 0x4F0, 0x510)
    snapshot.prepare(lambda: False)
    assert exports.done == ["0/4F0 taken", "0/4F0 dropped", "0/510 taken"]
    assert not snapshot._is_begun


def test_an_old_primary_is_not_waited_for(server: Fake, snapshot: GapSnapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its WAL may never pass the end of the gap. And no slot is made there, also with -c."""
    server.set_turns([{"wal_lsn": "0/450"}])
    exports = Exports(monkeypatch)
    with pytest.raises(OtherSourceError, match="this server is an old primary"):
        snapshot.prepare(lambda: False)
    assert (looks(server), exports.done) == (1, [])
    assert not GapSnapshot(replace(server.config(), create_slot=True), snapshot.warehouse).config.create_slot


def test_a_stop_ends_the_wait(server: Fake, snapshot: GapSnapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    exports = Exports(monkeypatch)
    with pytest.raises(InterruptedError):
        snapshot.prepare(lambda: looks(server) >= 2)
    assert (looks(server), exports.done) == (2, [])


def test_a_gap_that_comes_during_the_copies_stays_open(snapshot: GapSnapshot) -> None:
    """A micro-batch records it meanwhile. The copies are from before it."""
    later = replace(EPOCH, number=3, start_lsn=0x900, gap=Gap(0x800, "the slot was moved", 3.0, 4.0))
    gaps.record(snapshot.warehouse, [EPOCH, later])
    InitialSnapshot(snapshot.config, snapshot.warehouse)._note(is_complete=False)  # it was left out, because there was no slot
    assert snapshot.record_if_healed([])
    assert not is_unfinished(snapshot.warehouse)
    assert [each.healed_lsn for each in gaps.read(snapshot.warehouse)] == [0x500, None]
    assert gaps.open_gap(snapshot.warehouse) == gaps.TablesGap(later.gap, later.start)
    assert GapSnapshot(snapshot.config, snapshot.warehouse).record_if_healed([])
    assert gaps.open_gap(snapshot.warehouse) is None


def published(name: str, *columns: str) -> dict[str, Any]:
    return {"relation_id": 16400 + len(columns), "schema": "public", "name": name, "columns": list(columns)}


def planned(name: str, *columns: str) -> TablePlan:
    described = tuple(Column(0, each, 23, -1) for each in columns)
    return TablePlan(Relation(None, 16400 + len(columns), "public", name, "d", described), (), (), None, (), 0)


def test_a_table_without_columns_is_not_copied(snapshot: GapSnapshot) -> None:
    """Its version would say nothing, so that no copy of it would ever count as one."""
    plan = Plan((planned("bare"), planned("t", "id")), is_utf8=True)
    assert [each.relation.name for each in snapshot._choose(plan, Homes(snapshot.warehouse))] == ["t"]
    assert not snapshot.record_if_healed([published("bare"), published("t", "id")])
    assert gaps.open_gap(snapshot.warehouse) is not None
    assert snapshot.record_if_healed([published("bare")])
    assert gaps.open_gap(snapshot.warehouse) is None


def test_such_a_table_is_refused_if_it_is_named(snapshot: GapSnapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    named = TableSnapshot(snapshot.config, snapshot.warehouse, ["public.t", "public.bare"])
    prepared = SimpleNamespace(system_id="7", database="db", tables=[published("bare"), published("t", "id")])
    monkeypatch.setattr(named, "_take", lambda _: SimpleNamespace(prepared=prepared))
    refusal = r"^no column is published of: public\.bare; "
    with pytest.raises(InvalidArgumentsError, match=refusal):
        named.prepare(lambda: False)
    prepared.tables[0]["columns"] = ["id"]
    named.prepare(lambda: False)
    plan = Plan((planned("bare"), planned("t", "id")), is_utf8=True)
    with pytest.raises(InvalidArgumentsError, match=refusal):  # the column was dropped since
        named._choose(plan, Homes(snapshot.warehouse))


def test_the_plan_is_asked_only_for_the_tables_to_copy(snapshot: GapSnapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan waits for tables that are locked. A copy must not wait for the others."""
    asked: list[Sequence[str]] = []
    monkeypatch.setattr(plan_module, "make_plan", lambda *arguments: asked.append(arguments[-1]))
    for each in (snapshot, TableSnapshot(snapshot.config, snapshot.warehouse, ["public.t"])):
        each._plan("", "")
    assert asked == [(), ("public.t",)]

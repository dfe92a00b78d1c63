"""The launcher with a fake streamer, for faults that a real one rarely has."""

import errno
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cdcpipe.errors import (
    CdcpipeError,
    GapError,
    InitError,
    InvalidArgumentsError,
    LostSlotError,
    OtherServerError,
    RewoundServerError,
    ServerError,
    SlotDoesNotExistError,
    SlotInUseError,
    UnreachableError,
)
from cdcpipe.lsn import LSN, format_lsn
from cdcpipe.publishing import NewPublication
from cdcpipe.retry import RetryPolicy
from spark_sink.client import process
from spark_sink.client.failure import Failure
from spark_sink.client.slot_monitor import Lag
from spark_sink.files.local import write_json
from spark_sink.launcher import landing, opening, restart, sealer, streamer
from spark_sink.launcher import launcher as launcher_module
from spark_sink.launcher.continuity import FedTables
from spark_sink.launcher.launcher import Launcher
from spark_sink.launcher.restart import RestartPolicy
from spark_sink.staging import account, copied, lock, recorded_gap
from spark_sink.staging.changes import count_changes
from spark_sink.staging.filler import SealPolicy
from spark_sink.staging.gap import Gap
from spark_sink.staging.lock import StagingLock, lock_owner
from spark_sink.staging.log import (
    Epoch,
    OtherSourceError,
    Position,
    StagingError,
    former_system_ids,
    list_epochs,
    list_segments,
    log_end,
)
from spark_sink.staging.readers import register_reader
from spark_sink.staging.writer import Failpoint, StagingWriter
from spark_sink.warehouse.warehouse import Warehouse
from support.cli_process import run_spark_cli
from support.fake_streamer import WORK, Fake, make_fake
from support.pgoutput_stream import encode_stream
from support.waiting import until


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Fake]:
    return partial(make_fake, tmp_path, monkeypatch)


def test_all_that_is_available_is_landed_and_confirmed(fake: Callable[..., Fake]):
    made = fake()
    launcher = made.run()
    made.check(WORK)
    progress = launcher.progress
    assert progress.position == (1, WORK[-1].end_lsn)
    assert progress.transactions == len(WORK)
    assert progress.segments == len(list_segments(made.staging)) > 3
    assert progress.size == sum(segment.path.stat().st_size for segment in list_segments(made.staging))
    assert (progress.restarts, progress.last_error, progress.open_size) == (0, None, 0)
    assert made.confirmed_lsn == WORK[-1].end_lsn
    assert made.read("commands")[-1] == "q"
    assert made.starts == [
        ["prepare", "--then-stream", "--quiet", "-d", "db", "-S", "s", "--publication", "p"],
        (
            "-d db -S s --publication p -H --whole-transactions -o streaming=parallel -o messages=true"
            f" --startpos 0/100 --expect 7/1 --expect-lsn 0/100 --idle-positions --endpos 0/{WORK[-1].end_lsn + 1:X} --endpos-wait"
        ).split(),
    ]
    assert all(segment.index_path.exists() for segment in list_segments(made.staging))


def test_the_options_of_the_slot_are_for_prepare(fake: Callable[..., Fake]):
    made = fake([])
    made.run(create_slot=True, new_publication=NewPublication.of(tables=("a.b", "c.*")), verbose=True)
    assert made.starts[0][-5:] == ["-c", "--table", "a.b", "--table", "c.*"]
    assert made.starts[1][0] == "-v"
    assert "-c" not in made.starts[1]


@pytest.mark.parametrize(("version", "streaming"), [(140000, "on"), (159999, "on"), (160000, "parallel"), (190000, "parallel")])
def test_a_server_is_asked_for_what_it_has(fake: Callable[..., Fake], version: int, streaming: str):
    made = fake([], [{"server_version": version}])
    made.run()
    assert f"streaming={streaming}" in made.starts[1]
    assert list_epochs(made.staging)[0].options == {"streaming": streaming, "messages": "true"}


def test_large_transactions_are_held_in_the_staging_directory(fake: Callable[..., Fake], tmp_path: Path):
    made = fake([])
    made.run()
    assert made.read("temporary")[-1] == str(made.staging)
    made.run(spill=tmp_path)
    assert made.read("temporary")[-1] == str(tmp_path)


def test_the_next_run_goes_on_where_the_log_ends(fake: Callable[..., Fake]):
    made = fake(WORK[:10])
    made.run()
    made.set_transactions(WORK)
    (made.directory / "confirmed").unlink()  # the last F was lost
    made.run()
    made.check(WORK)
    assert f"0/{WORK[9].end_lsn:X}" in made.starts[-1]


def test_publications_that_a_start_leaves_out_are_named(fake: Callable[..., Fake], caplog: pytest.LogCaptureFixture):
    """The server forgets the changes of their tables."""
    made = fake(WORK[:10])
    for publications, left_out in ((("p", "q"), ()), (("q", "p"), ()), (("p",), ("q",)), (("p",), ()), (("p", "q"), ())):
        caplog.clear()
        made.run(publications=publications)
        assert list_epochs(made.staging)[-1].left_out == left_out
        assert ("the last start had q, too, and this one does not" in caplog.text) == bool(left_out)


@pytest.mark.parametrize(
    "turn", [{"exit": 3}, {"exit": 5, "stderr": "cdcpipe: error: x\n"}, {"exit": 9}, {"signal": 9}, {"signal": 15}]
)
@pytest.mark.parametrize("cut", [0, 40, 700, 1500])
def test_a_streamer_that_ends_is_no_loss_and_no_duplicate(fake: Callable[..., Fake], turn: dict[str, Any], cut: int):
    made = fake(WORK, [{}, {"bytes": cut, "piece": 50, **turn}, {"bytes": cut + 600, **turn}])
    launcher = made.run()
    made.check(WORK)
    assert launcher.progress.restarts == 2
    assert launcher.progress.last_error
    assert len(list_epochs(made.staging)) == 1
    starts = [LSN.parse(arguments[arguments.index("--startpos") + 1]) for arguments in made.starts[1:]]
    assert starts == sorted(starts)


BUSY = {"exit": 9, "stderr": "cdcpipe: error: the slot is in use\n"}


def test_a_slot_that_stays_in_use_ends_a_launcher_that_has_not_had_it(fake: Callable[..., Fake], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(restart, "_REFUSAL_S", 0.0)
    with pytest.raises(SlotInUseError, match="the slot is in use"):
        fake(WORK, [BUSY] * 5).run()


def test_a_launcher_that_has_had_its_slot_waits_for_it(fake: Callable[..., Fake], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(restart, "_REFUSAL_S", 0.0)
    made = fake(WORK, [{}, {"bytes": 700, "exit": 3}, BUSY, BUSY, BUSY])
    assert made.run().progress.restarts == 4
    made.check(WORK)


def test_the_warning_of_a_streamer_that_is_started_again_says_what_to_do(
    fake: Callable[..., Fake], caplog: pytest.LogCaptureFixture
):
    made = fake(WORK, [{}, {"exit": 3, "stderr": "cdcpipe: error: it is so\ncdcpipe: hint: do this\n"}])
    made.run()
    (said,) = [record.getMessage() for record in caplog.records if "starting it again" in record.getMessage()]
    assert said.startswith("the streamer ended with 3: it is so (hint: do this); starting it again in ")


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (1, InvalidArgumentsError),
        (2, InitError),
        (8, SlotDoesNotExistError),
        (4, CdcpipeError),
        (6, CdcpipeError),
        (7, CdcpipeError),
    ],
)
@pytest.mark.parametrize("at", ["prepare", "stream"])
def test_a_streamer_that_gives_up_ends_the_launcher(fake: Callable[..., Fake], code: int, kind: type[CdcpipeError], at: str):
    turn = {"exit": code, "stderr": "cdcpipe: warning\ncdcpipe: error: it is so\ncdcpipe: hint: do this\n", "bytes": 1500}
    made = fake(WORK, [turn] if at == "prepare" else [{}, turn])
    with pytest.raises(kind, match="it is so") as caught:
        made.run()
    assert type(caught.value) is kind
    assert caught.value.exit_code == (code if code in (1, 2, 8) else 7)
    assert caught.value.hint
    if at == "stream":
        assert made.landed() == WORK[: len(made.landed())] != []
        assert made.confirmed_lsn <= made.landed()[-1].end_lsn
    assert lock_owner(made.staging) is None
    made.run()
    made.check(WORK)


@pytest.mark.parametrize("at", ["prepare", "stream"])
def test_an_error_that_nobody_gets_is_logged(fake: Callable[..., Fake], caplog: pytest.LogCaptureFixture, at: str):
    """`start` raises the first one."""
    turn = {"exit": 8, "stderr": "cdcpipe: error: it is so\n", "bytes": 1500}
    launcher = Launcher(fake(WORK, [turn] if at == "prepare" else [{}, turn]).config())
    with pytest.raises(CdcpipeError, match="it is so") if at == "prepare" else nullcontext():
        launcher.start()
    launcher._thread.join()
    logged = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert isinstance(launcher.error, CdcpipeError)
    assert logged == ([] if at == "prepare" else [f"the launcher has ended: it is so (hint: {launcher.error.hint})"])


def test_a_server_that_cannot_send_what_comes_next(fake: Callable[..., Fake]):
    turn = {"exit": 5, "stderr": "cdcpipe: error: invalid memory alloc request size\n", "bytes": 1500}
    made = fake(WORK, [{}, turn] + [turn | {"bytes": 0}] * 20)
    with pytest.raises(ServerError, match=r"again and again, after 0/.*invalid memory alloc"):
        made.run()
    assert len(made.starts) <= 2 + 5
    assert made.landed() == WORK[: len(made.landed())] != []


def test_a_server_that_has_gone_back_is_not_tried_again(fake: Callable[..., Fake]):
    """Neither after a lost connection nor by a later launcher: soon the server's WAL would be beyond the end of the log."""
    rewound = {"exit": 2, "stderr": f"cdcpipe: error: {RewoundServerError.BEGINNING}its WAL ends at 0/1\n", "bytes": 0}
    made = fake(WORK, [{}, {"exit": 3, "bytes": 1500}, rewound])
    for _ in range(2):
        with pytest.raises(GapError, match="its WAL ends at 0/1") as caught:
            made.run()
        assert len([start for start in made.starts if start[0] != "prepare"]) == 2
        assert "diverged.json" in (caught.value.hint or "")
    landed = made.landed()
    assert landed == WORK[: len(landed)] != []


def test_tables_that_go_on_while_it_runs_are_not_taken_for_older_than_the_log(fake: Callable[..., Fake]):
    """The launcher knows where the tables were at its start. What they have read since is removed."""
    made = fake(WORK[:30])
    made.run()
    made.set_transactions(WORK)
    made.set_turns([{}, {}, {}, {"bytes": 700, "exit": 3}])
    first, *_, last = list_segments(made.staging)
    register_reader(made.staging, "tables", last.end)
    launcher = Launcher(made.config())
    launcher.tables = FedTables("warehouse", "7", "db", made.staging, first.end)
    launcher.start()
    launcher.wait()
    assert not first.path.exists()
    assert (launcher.progress.restarts, launcher.progress.gaps) == (1, 0)


def test_a_log_that_was_begun_without_the_tables_begins_with_a_gap(fake: Callable[..., Fake]):
    made = fake(WORK)
    made.run()
    [epoch], end = list_epochs(made.staging), log_end(made.staging)
    assert end is not None
    tables = FedTables("warehouse", "7", "db", made.staging, Position(7, epoch.start_lsn - 1))
    launcher = Launcher(made.config())
    launcher.tables = tables
    with pytest.raises(GapError, match="their log was lost"):
        launcher.start()
    for gaps in (1, 0):  # one is enough
        launcher = Launcher(made.config(on_gap="resnapshot"))
        launcher.tables = tables
        launcher.start()
        launcher.wait()
        assert launcher.progress.gaps == gaps
    assert [(each.number, each.start_lsn) for each in list_epochs(made.staging) if each.gap is not None] == [(8, end.lsn)]
    assert list_segments(made.staging, tables.position) == []


def run_for_tables(made: Fake, on_gap: str, copied_lsn: int) -> Launcher:
    """Run a launcher for tables that another log has brought to 7:0/300, on timeline 1."""
    launcher = Launcher(made.config(on_gap=on_gap))
    launcher.tables = FedTables("warehouse", "7", "db", made.staging, Position(7, 0x300), timeline=1)
    launcher.read_copied_lsn = lambda: copied_lsn
    launcher.start()
    launcher.wait()
    return launcher


def test_a_log_that_was_lost_with_the_primary_begins_with_a_gap(fake: Callable[..., Fake]):
    """The standby that was promoted lacks the last changes of the tables, although its WAL is beyond them."""
    promoted = {"timeline": 2, "timeline_history": [{"timeline": 1, "end_lsn": "0/280"}]}
    made = fake(WORK, [promoted, promoted, {}, promoted])

    with pytest.raises(GapError, match=r"timeline 2 branched off at 0/280, but the tables in warehouse have changes of timeline 1"):
        run_for_tables(made, "stop", 0x3FF)
    assert not list_epochs(made.staging)
    for gaps in (1, 0):  # one is enough
        assert run_for_tables(made, "resnapshot", 0x3FF).progress.gaps == gaps
    [epoch] = [each for each in list_epochs(made.staging) if each.gap is not None]
    assert (epoch.start, epoch.timeline) == ((8, 0x400), 2)
    assert list_segments(made.staging, Position(7, 0x300))[0].start_lsn == 0x400
    assert made.landed() == [each for each in WORK if each.end_lsn > 0x400]


def test_a_log_that_was_begun_after_a_promotion_without_the_tables_begins_with_a_gap(fake: Callable[..., Fake]):
    """`land` has begun the log of the promoted server before the tables' position, and has gone on beyond it."""
    promoted = {"timeline": 2, "timeline_history": [{"timeline": 1, "end_lsn": "0/280"}]}
    made = fake(WORK, [promoted] * 8)
    made.run()
    [epoch], end = list_epochs(made.staging), log_end(made.staging)
    assert end is not None
    assert epoch.start_lsn < 0x300 < end.lsn

    with pytest.raises(GapError, match=r"timeline 2 branched off at 0/280, but the tables in warehouse have changes of timeline 1"):
        run_for_tables(made, "stop", 0x2FF)
    for gaps in (1, 0):  # one is enough
        assert run_for_tables(made, "resnapshot", 0x2FF).progress.gaps == gaps
    [after] = [each for each in list_epochs(made.staging) if each.gap is not None]
    assert (after.number, after.start_lsn) == (8, end.lsn)
    assert after.gap is not None
    assert (after.gap.after_lsn, after.gap.is_divergence, after.gap.lost) == (0x280, True, None)  # all in the log did happen


def test_an_accepted_server_goes_on_with_tables_whose_log_was_lost(fake: Callable[..., Fake], tmp_path: Path):
    upgraded = {"system_id": "8", "created": True}
    made = fake(WORK, [upgraded, {}, {"system_id": "8"}])
    for gaps in (1, 0):  # one is enough
        launcher = Launcher(made.config(create_slot=True, on_gap="resnapshot", accept_system_id="8"))
        launcher.tables = FedTables("warehouse", "7", "db", made.staging, Position(7, 0x300), timeline=3)
        launcher.start()
        launcher.wait()
        assert launcher.progress.gaps == gaps
    start = made.starts[0]
    assert [start[at + 1] for at, word in enumerate(start) if word == "--expect-system-id"] == ["7", "8"]
    epochs = list_epochs(made.staging)
    assert [(each.number, each.system_id, each.former_system_id) for each in epochs] == [(8, "8", "7"), (9, "8", None)]
    warehouse = Warehouse(tmp_path / "warehouse", "delta")
    warehouse.open(replace(epochs[0], system_id="7"))
    warehouse.record(Position(7, 0x300))
    assert warehouse.open(epochs[-1], former_system_ids(epochs)) == Position(7, 0x300)


def test_bytes_that_are_no_records_are_not_landed(fake: Callable[..., Fake]):
    made = fake(WORK, [{}, {"garbage": "garbage"}, {"garbage": "w 0/0 5\nZzzzz"}])
    launcher = made.run()
    made.check(WORK)
    assert launcher.progress.restarts == 2


def test_unsealed_transactions_before_invalid_bytes_come_again(fake: Callable[..., Fake]):
    size = len(encode_stream(WORK[:30]))
    assert size > 2500  # the garbage is not in the first read, after which the open segment has something
    made = fake(WORK, [{}, {"bytes": size, "garbage": "garbage"}])
    launcher = made.run(seal=SealPolicy(segment_bytes=size - 100, seal_interval_s=1e9))
    made.check(WORK)
    assert launcher.progress.restarts == 1


@pytest.mark.parametrize("cut", [0, 10, 700, 1500])
def test_an_end_in_the_middle_of_something_is_not_the_end(fake: Callable[..., Fake], cut: int):
    made = fake(WORK, [{}, {"bytes": -cut or None}, {"bytes": cut}])
    launcher = made.run()
    made.check(WORK)
    assert launcher.progress.restarts <= 2
    assert (launcher.progress.restarts > 0) == (cut > 0)


def test_a_streamer_that_was_told_to_end_by_another_is_not_at_the_end(fake: Callable[..., Fake]):
    made = fake(WORK, [{}, {"bytes": len(encode_stream(WORK[:20])), "exit": 0}])
    made.run()
    made.check(WORK)
    assert len(made.starts) == 3


def test_whole_transactions_are_sealed_and_confirmed_at_a_stop(fake: Callable[..., Fake]):
    made = fake()
    launcher = Launcher(made.config(available_now=False, seal=SealPolicy(1 << 30, 1e9)))
    with launcher:
        until(lambda: launcher.progress.open_size > 2000)
        assert launcher.progress.segments == 0
    assert launcher.has_ended
    assert launcher.error is None
    made.check(WORK)
    assert made.confirmed_lsn == WORK[-1].end_lsn
    assert made.read("commands") == [f"F 0/{WORK[-1].end_lsn:X}", "q"]


def test_a_segment_is_sealed_by_age_while_nothing_comes(fake: Callable[..., Fake]):
    made = fake()
    with Launcher(made.config(available_now=False, seal=SealPolicy(1 << 30, 0.01, backlog_interval_s=0))) as launcher:
        until(lambda: made.confirmed_lsn == WORK[-1].end_lsn)
        assert launcher.progress.position == (1, WORK[-1].end_lsn)
    made.check(WORK)


def test_a_segment_that_waits_for_the_disk_is_not_sealed_yet(fake: Callable[..., Fake], monkeypatch: pytest.MonkeyPatch):
    """The alert CdcpipeLogBehind leaves out the time in which all that was received is sealed."""
    made, has_begun, may_go_on, passes = fake(), threading.Event(), threading.Event(), []
    seal, check = StagingWriter.seal, sealer.Sealer.check

    def slow(writer: StagingWriter, sealing: Any) -> Any:
        has_begun.set()
        may_go_on.wait()
        return seal(writer, sealing)

    def count(of: sealer.Sealer) -> None:
        passes.append(of)
        check(of)

    monkeypatch.setattr(StagingWriter, "seal", slow)
    monkeypatch.setattr(sealer.Sealer, "check", count)
    with Launcher(made.config(available_now=False, seal=SealPolicy(1 << 30, 0.01, backlog_interval_s=0))) as launcher:
        try:
            until(has_begun.is_set)
            before = len(passes)
            until(lambda: launcher._wakeup.set() or len(passes) >= before + 3)  # it has noted what is open since the cut
            assert launcher.progress.open_size > 0
        finally:
            may_go_on.set()
        until(lambda: made.confirmed_lsn == WORK[-1].end_lsn)
        until(lambda: launcher.progress.open_size == 0)
    made.check(WORK)


def test_feedback_does_not_wait_for_a_streamer_that_does_not_read_it(tmp_path: Path):
    sleeper = (sys.executable, "-c", "import signal; signal.pause()")
    with streamer.Streamer(["-S", "s"], command=sleeper, temporary=tmp_path, tell=print) as child:
        feedback, sent = streamer.Feedback(child, 0, None), 0
        while child.write(b"# full\n", 0):
            sent += 1
        assert sent * 7 > 4000
        for lsn in range(1, 1000):
            feedback.send(lsn)
        assert feedback._sent_lsn == 0


def test_a_streamer_that_does_not_quit_is_killed(fake: Callable[..., Fake], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(streamer, "QUIT_TIMEOUT_S", 0.3)
    made = fake(WORK, [{}, {"ignores_quit": True}])
    launcher = Launcher(made.config(available_now=False))
    launcher.start()
    until(lambda: made.confirmed_lsn == WORK[-1].end_lsn)
    launcher.stop()
    launcher.wait()
    made.check(WORK)


def test_a_stop_while_waiting_to_start_again(fake: Callable[..., Fake], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launcher_module, "RestartPolicy", partial(RestartPolicy, pauses=RetryPolicy(first_pause_s=60)))
    made = fake(WORK, [{}, {"exit": 9}])
    launcher = Launcher(made.config())
    launcher.start()
    until(lambda: launcher.progress.restarts == 1)
    launcher.stop()
    launcher.wait()
    assert made.landed() == WORK


@pytest.mark.parametrize("turn", [{"exit": 143}, {"exit": 130}, {"signal": 15}])
def test_a_streamer_that_a_signal_ends_while_it_prepares_is_started_again(fake: Callable[..., Fake], turn: dict[str, Any]):
    """It reports the signal with an exit code of a shell, or it dies by it if it has only begun."""
    made = fake(WORK, [turn])
    launcher = made.run()
    made.check(WORK)
    assert launcher.progress.restarts == 1


def test_the_end_of_a_streamer_is_no_error_once_the_launcher_was_asked_to_stop(fake: Callable[..., Fake]):
    """systemd signals all processes of a service: how the streamer ends then has no meaning."""
    launcher = Launcher(fake().config())
    launcher.request_stop()
    assert not launcher._wait_before_restart(RestartPolicy(lambda: 1.0), Failure(7, "cannot go on"), 0x100)


def test_a_stop_before_the_slot_is_prepared(fake: Callable[..., Fake], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process, "_END_S", 0.1)
    made = fake(WORK, [{"signal": signal.SIGSTOP}])
    launcher = Launcher(made.config())
    starter = threading.Thread(target=launcher.start)
    starter.start()
    until(lambda: len(made.starts) == 1)
    launcher.stop()
    starter.join()
    assert launcher.has_ended
    assert launcher.error is None
    launcher.request_stop()  # and it may be asked again


def test_an_interrupt_of_a_start_stops_the_launcher(fake: Callable[..., Fake], monkeypatch: pytest.MonkeyPatch):
    """It streamed on in a notebook whose cell was interrupted, and nobody had it."""
    monkeypatch.setattr(process, "_END_S", 0.1)
    made = fake(WORK, [{"signal": signal.SIGSTOP}])
    launcher = Launcher(made.config())

    def interrupt() -> None:
        until(lambda: len(made.starts) == 1)
        raise KeyboardInterrupt

    monkeypatch.setattr(launcher._ready, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt), launcher:
        pass
    assert launcher.has_ended
    assert lock_owner(made.staging) is None


@pytest.mark.parametrize("output", ["", "{}", "cdcpipe 0.1"])
def test_prepare_of_another_version(fake: Callable[..., Fake], output: str):
    with pytest.raises(CdcpipeError, match="cannot read what 'cdcpipe prepare' printed"):
        fake(WORK, [{"output": output}]).run()


def test_another_server_is_refused(fake: Callable[..., Fake]):
    made = fake(WORK, [{}, {}, {"system_id": "8"}])
    made.run()
    with pytest.raises(StagingError, match="this server has system id 8"):
        made.run()
    assert len(made.starts) == 3  # nothing was streamed


def test_nothing_is_made_on_another_server_than_that_of_the_tables(fake: Callable[..., Fake]):
    """The staging directory is not there any more. A slot that nobody reads would keep WAL."""
    other = {"exit": 2, "stderr": f"cdcpipe: error: {OtherServerError.BEGINNING}8\n"}
    made = fake(WORK, [other])
    launcher = Launcher(made.config(create_slot=True, on_gap="resnapshot"))
    launcher.tables = FedTables("warehouse", "7", "db", made.staging, Position(1, 0x200))
    with pytest.raises(StagingError, match="come from database 'db' of the server with system id 7, and this is a database of 8"):
        launcher.start()
    [start] = made.starts
    assert start[start.index("--expect-system-id") + 1] == "7"


@pytest.mark.parametrize(
    ("looks", "confirmed"),
    [
        ([{"exit": 8, "stderr": "cdcpipe: error: there is no slot\n"}, {"created": True}], "0/9000"),
        ([{"exit": 2, "stderr": f"cdcpipe: error: {LostSlotError.BEGINNING}'s'\n"}, {"created": True}], "0/9000"),
        ([{}], "0/2000"),  # between the end of the log and the account
    ],
)
def test_a_slot_that_is_new_on_another_server_is_known_after_a_kill(
    fake: Callable[..., Fake], monkeypatch: pytest.MonkeyPatch, looks: list[dict[str, Any]], confirmed: str
):
    """Otherwise the next start would take it for one that pg_upgrade took along, and skip changes in silence."""
    server = {"system_id": "8", "confirmed": confirmed, "wal_lsn": "0/9001"}
    made = fake(WORK, [{}, {"idle": "0/4000"}, *({**server, **look} for look in looks), server])
    made.run()
    log_end_lsn, before = WORK[-1].end_lsn, len(made.starts)
    assert log_end_lsn < 0x2000 < account.read(made.staging).lsn == 0x4000
    options: dict[str, Any] = {"create_slot": True, "on_gap": "resnapshot", "accept_system_id": "8"}

    def killed(*_: Any, **__: Any) -> Epoch:
        raise OSError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(StagingWriter, "begin_epoch", killed)
        with pytest.raises(OSError, match="killed"):
            made.run(**options)
    assert ["-c" in start for start in made.starts[before:]] == [number == 1 for number in range(len(looks))]
    with pytest.raises(GapError):
        made.run(**{**options, "on_gap": "stop"})
    made.set_turns([*({} for _ in made.starts), server])
    made.run(**options)
    epoch = list_epochs(made.staging)[-1]
    assert (epoch.system_id, epoch.former_system_id, epoch.start_lsn) == ("8", "7", LSN.parse(confirmed))
    assert epoch.gap is not None
    assert not (made.staging / recorded_gap.NAME).exists()


def test_an_idle_position_is_recorded_before_it_is_confirmed(fake: Callable[..., Fake]):
    made = fake(WORK, [{}, {"idle": "0/4000"}])
    with Launcher(made.config(available_now=False)) as launcher:
        until(lambda: made.confirmed_lsn == 0x4000)
        assert launcher.progress.transactions == len(WORK)
    made.check(WORK)
    assert account.read(made.staging).lsn == 0x4000
    made.run()
    assert made.starts[-1][made.starts[-1].index("--expect-lsn") + 1] == "0/4000"


@pytest.mark.parametrize("passed_s", [None, 0.0, 7000.0])
def test_the_accounts_time_is_when_the_server_passed_an_idle_position(fake: Callable[..., Fake], passed_s: float | None):
    """A walsender that works through old WAL tells its own place. None: the server had passed it before the stream began."""
    made = fake(WORK, [{"wal_lsn": "0/4001" if passed_s is None else "0/4000"}, {"idle": "0/4000"}])
    monitor: Any = SimpleNamespace(lag=lambda _lsn, _now: Lag(1, passed_s)) if passed_s else None
    before = time.time()
    with Launcher(made.config(available_now=False), monitor):
        until(lambda: made.confirmed_lsn == 0x4000)
    found = account.read(made.staging)
    if passed_s is None:
        assert found.time == 0.0  # the account keeps the time that it had
    else:
        assert before - 0.001 <= found.time + passed_s <= time.time() + 0.001


def test_an_idle_position_that_cannot_be_recorded_is_not_confirmed(fake: Callable[..., Fake], monkeypatch: pytest.MonkeyPatch):
    tried = []

    def full(path: Path, value: object) -> None:
        tried.append(path)
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(account, "write_json", full)
    made = fake(WORK, [{}, {"idle": "0/4000"}])
    with Launcher(made.config(available_now=False)):
        until(lambda: tried)
        until(lambda: made.confirmed_lsn == WORK[-1].end_lsn)
    made.check(WORK)
    assert made.confirmed_lsn == WORK[-1].end_lsn


def test_an_idle_position_that_the_disk_has_refused_is_recorded_later(fake: Callable[..., Fake], monkeypatch: pytest.MonkeyPatch):
    """The streamer waits for its confirmation, and tells no other one. Without it, the server would keep all WAL."""
    tried = []

    def full_once(path: Path, value: object) -> None:
        tried.append(path)
        if len(tried) == 1:
            raise OSError(errno.ENOSPC, "full")
        write_json(path, value)

    monkeypatch.setattr(account, "write_json", full_once)
    monkeypatch.setattr(landing, "_RECORD_AGAIN_S", 0.05)
    made = fake(WORK, [{}, {"idle": "0/4000"}])
    with Launcher(made.config(available_now=False)):
        until(lambda: made.confirmed_lsn == 0x4000)
    assert account.read(made.staging).lsn == 0x4000
    made.check(WORK)


@pytest.mark.parametrize("idle_lsn", [WORK[-2].end_lsn, WORK[-1].end_lsn])
def test_an_idle_position_in_the_log_is_confirmed_to_the_next_streamer(fake: Callable[..., Fake], idle_lsn: int):
    """A streamer that starts again may first tell one from before the end of the log. It tells no other until it is confirmed."""
    made = fake(WORK, [{}, {"exit": 3}, {"idle": format_lsn(idle_lsn)}])
    with Launcher(made.config(available_now=False)):
        until(lambda: made.confirmed_lsn == WORK[-1].end_lsn)
    assert made.starts[-1][made.starts[-1].index("--startpos") + 1] == format_lsn(WORK[-1].end_lsn)
    made.check(WORK)


def test_the_idle_position_at_the_end_is_confirmed_after_an_open_segment_is_sealed(fake: Callable[..., Fake]):
    """pg_upgrade refuses a slot behind a committed transaction, also if the transaction changed nothing that is published."""
    made = fake(WORK, [{}, {"idle": "0/4000"}])
    launcher = made.run(seal=SealPolicy())
    assert len(list_segments(made.staging)) == 1
    found = account.read(made.staging)
    assert (found.lsn, made.confirmed_lsn) == (0x4000, 0x4000)
    assert found.time == round(launcher._asked_at, 3)  # the log does not have what the server wrote since
    made.check(WORK)


def test_an_idle_position_behind_a_discarded_segment_is_not_confirmed(fake: Callable[..., Fake]):
    made = fake(WORK, [{}, {"idle": "0/4000", "garbage": "no header\n"}, {"exit": 1}])
    with pytest.raises(CdcpipeError):
        made.run(seal=SealPolicy())
    assert account.read(made.staging).lsn < 0x4000
    made.set_turns([])
    made.run()
    made.check(WORK)


def without_newest_segment(fake: Callable[..., Fake]) -> Fake:
    """Land all, with an account at 0/4000, and delete the last segment."""
    made = fake(WORK, [{}, {"idle": "0/4000"}])
    with Launcher(made.config(available_now=False)):
        until(lambda: made.confirmed_lsn == 0x4000)
    last = list_segments(made.staging)[-1]
    for path in last.path.parent.glob(f"*{last.path.stem}*"):
        path.unlink()
    return made


def test_a_directory_without_its_newest_segments_is_a_gap(fake: Callable[..., Fake], caplog: pytest.LogCaptureFixture):
    """Such as a copy that was made while the launcher was writing. The account alone would say that nothing is missing."""
    made = without_newest_segment(fake)
    made.set_turns([*({} for _ in made.starts), {"confirmed": "0/4000"}])
    with pytest.raises(GapError, match="slot 's' is at 0/4000, but the log has everything only up to"):
        made.run()
    assert "lacks its newest segments" in caplog.text


def test_a_server_that_was_restored_with_a_directory_without_its_newest_segments_has_not_gone_back(fake: Callable[..., Fake]):
    """The streamer would take it for that: its WAL ends before the account of the lost segments."""
    made = without_newest_segment(fake)
    end = log_end(made.staging)
    assert end is not None
    (made.directory / "confirmed").unlink()
    made.set_turns([*({} for _ in made.starts), {}, {"idle": "0/3000"}])
    with Launcher(made.config(available_now=False)):
        until(lambda: made.confirmed_lsn == 0x3000)
    start = made.starts[-1]
    assert start[start.index("--expect-lsn") + 1] == format_lsn(end.lsn)
    assert account.read(made.staging).lsn == 0x3000  # what was confirmed was recorded
    made.check(WORK)


def test_a_gap_counts_from_the_moment_at_which_it_is_passed(fake: Callable[..., Fake]):
    """A gap that was found at the start used to count at the next reconnect only, days later."""
    made = fake(WORK)
    made.run()
    config = made.config(available_now=False, on_gap="resnapshot")
    made.set_turns([*({} for _ in made.starts), {"confirmed": "0/9000"}, {"exit": 3}])
    made.set_looks([*({} for _ in made.read("looks")), {"confirmed": "0/A000"}])
    launcher = Launcher(config)
    with launcher:
        assert launcher.progress.gaps == 1
        until(lambda: launcher.progress.gaps == 2)
    assert [epoch.gap is not None for epoch in list_epochs(made.staging)] == [False, True, True]


COPIED = WORK[-1].end_lsn + 0x300


@pytest.mark.parametrize(
    ("server", "start"),
    [
        ({"timeline": 2, "timeline_history": [{"timeline": 1, "end_lsn": format_lsn(COPIED - 0x100)}]}, COPIED + 1),
        # Both have what was copied, so the copy is as good as one that is made now.
        ({"timeline": 2, "timeline_history": [{"timeline": 1, "end_lsn": format_lsn(COPIED)}]}, COPIED - 0x80),
        ({"system_id": "8"}, COPIED + 1),
        ({}, COPIED - 0x80),
    ],
)
def test_the_stream_begins_beyond_a_copy_of_what_a_server_with_a_new_slot_never_had(
    fake: Callable[..., Fake], server: dict[str, Any], start: int
):
    """The new slot is beyond the log, and before the copy. From there on the copy would count as one from after the gap."""
    made = fake(WORK, [{}, {}, {"created": True, "confirmed": format_lsn(COPIED - 0x80), "wal_lsn": "0/9000", **server}])
    made.run()
    copied.record(made.staging, COPIED)
    made.run(create_slot=True, on_gap="resnapshot", accept_system_id=server.get("system_id"))
    epoch = list_epochs(made.staging)[-1]
    assert epoch.start_lsn == start
    assert epoch.gap is not None
    assert epoch.gap.is_divergence == (start > COPIED)


def test_the_copies_of_the_tables_tell_that_server_and_log_were_restored_together(fake: Callable[..., Fake]):
    made = fake(WORK, [{}, {}, {"wal_lsn": "0/8FF"}])
    made.run()
    launcher = Launcher(made.config())
    launcher.read_copied_lsn = lambda: 0x900
    with pytest.raises(GapError, match="the server has gone back: its WAL ends at 0/8FF, before 0/900, where tables were copied"):
        launcher.start()
    assert recorded_gap.read(made.staging) is not None


def test_the_copies_of_tables_that_lost_their_log_tell_that_the_server_was_restored(fake: Callable[..., Fake]):
    """It is recorded: the next start finds a WAL that has passed the copy."""
    made = fake(WORK, [{"wal_lsn": "0/8FF"}, {"wal_lsn": "0/9000"}, {"wal_lsn": "0/9000"}])
    ends_at = "the server has gone back: its WAL ends at 0/8FF, before 0/900, where tables were copied, and their log, "

    def launcher(**options: Any) -> Launcher:
        made_one = Launcher(made.config(**options))
        made_one.tables = FedTables("warehouse", "7", "db", made.staging, Position(7, 0x200), timeline=1)
        made_one.read_copied_lsn = lambda: 0x900
        return made_one

    for _ in range(2):
        with pytest.raises(GapError, match=ends_at) as caught:
            launcher().start()
        assert f"after you have deleted {made.staging / recorded_gap.NAME}" in (caught.value.hint or "")
    with launcher(on_gap="resnapshot") as healing:
        assert healing.progress.gaps == 1
    [epoch] = list_epochs(made.staging)
    assert epoch.gap is not None
    assert (epoch.start_lsn, epoch.gap.is_divergence, recorded_gap.read(made.staging)) == (0x901, True, None)


def test_a_recorded_gap_of_the_log_and_one_of_its_tables_are_one(fake: Callable[..., Fake], monkeypatch: pytest.MonkeyPatch):
    """`land` has found that the server went back. `run` finds in its tables what a new primary never had, too, and before that."""
    history = {"timeline": 2, "timeline_history": [{"timeline": 1, "end_lsn": "0/80"}], "confirmed": "0/100", "wal_lsn": "0/9000"}
    made = fake(WORK, [history] * 2 + [history | {"confirmed": "0/300"}] * 4)
    made.run()
    end = log_end(made.staging)
    assert end is not None
    lost = count_changes(made.staging, 0x200)
    assert 0 < lost.transactions < count_changes(made.staging, 0x90).transactions
    recorded_gap.record(made.staging, Gap(0x200, "the server has gone back", 0.0, 0.0, is_divergence=True))

    def launcher(**options: Any) -> Launcher:
        made_one = Launcher(made.config(**options))
        made_one.tables = FedTables("warehouse", "7", "db", made.staging, Position(7, 0x150), timeline=1)
        return made_one

    with pytest.raises(GapError, match=f"branched off at 0/80, .*; they are {re.escape(str(lost))}") as caught:
        launcher().start()
    assert f"after you have deleted {made.staging / recorded_gap.NAME}" in (caught.value.hint or "")
    with monkeypatch.context() as patch:
        patch.setattr(recorded_gap, "remove", lambda _: None)  # killed before it
        with launcher(on_gap="resnapshot") as healing:
            assert healing.progress.gaps == 1
    epoch = list_epochs(made.staging)[-1]
    assert epoch.gap is not None
    assert (epoch.gap.after_lsn, epoch.gap.lost) == (0x80, lost)
    made.run()
    assert list_epochs(made.staging)[-1].gap is None


def test_the_record_of_a_gap_that_an_epoch_has_is_removed_durably(fake: Callable[..., Fake], monkeypatch: pytest.MonkeyPatch):
    """Otherwise it counts as another gap once the tables have passed the gap, and the epoch is removed."""
    made, synced = fake(WORK[:30]), []
    made.run()
    end = log_end(made.staging)
    assert end is not None
    recorded_gap.record(made.staging, Gap(end.lsn, "the server has gone back", 0.0, 0.0, is_divergence=True))

    def killed(_: Path) -> None:
        raise OSError("killed")

    def note(directory: Path) -> None:
        synced.append((directory, (directory / recorded_gap.NAME).exists()))

    with monkeypatch.context() as patch:
        patch.setattr(recorded_gap, "remove", killed)
        with pytest.raises(OSError, match="killed"):
            made.run(on_gap="resnapshot")
    made.set_transactions(WORK)
    with monkeypatch.context() as patch:
        patch.setattr(recorded_gap, "fsync_directory", note, raising=False)
        made.run()
    assert synced == [(made.staging, False)]
    end = log_end(made.staging)
    assert end is not None
    register_reader(made.staging, "tables", end)
    for _ in range(2):
        assert made.run().progress.gaps == 0
    assert not any(epoch.gap for epoch in list_epochs(made.staging))


def test_a_recorded_gap_is_counted_once(fake: Callable[..., Fake]):
    """The tables had changes that never happened, the log had none. No later start may count what the log has since 0/80."""
    history = {"timeline": 2, "timeline_history": [{"timeline": 1, "end_lsn": "0/80"}], "confirmed": "0/100", "wal_lsn": "0/9000"}
    made = fake(WORK, [history] * 4)
    made.run()
    end = log_end(made.staging)
    assert end is not None
    recorded_gap.record(made.staging, Gap(end.lsn, "the server has gone back", 0.0, 0.0, is_divergence=True))
    for _ in range(2):
        started = Launcher(made.config())
        started.tables = FedTables("warehouse", "7", "db", made.staging, Position(7, 0x150), timeline=1)
        with pytest.raises(GapError) as caught:
            started.start()
        assert "they are" not in caught.value.message
        found = recorded_gap.read(made.staging)
        assert found is not None
        assert (found.after_lsn, found.lost) == (0x80, None)


def test_a_slot_that_was_moved_meanwhile_ends_the_launcher(fake: Callable[..., Fake]):
    made = fake(WORK, [{}, {"exit": 3}])
    made.set_looks([{"confirmed": "0/9000"}])
    with pytest.raises(GapError, match="slot 's' is at 0/9000"):
        made.run()
    made.check(WORK)


def test_another_timeline_begins_another_epoch(fake: Callable[..., Fake]):
    made = fake(WORK, [{}, {"exit": 3}])
    made.set_looks([{"timeline": 2, "timeline_history": [{"timeline": 1, "end_lsn": "0/8000"}]}])
    made.run()
    made.check(WORK)
    assert [epoch.timeline for epoch in list_epochs(made.staging)] == [1, 2]
    assert made.starts[-1][made.starts[-1].index("--expect") + 1] == "7/2"


@pytest.mark.parametrize("accepted", [None, "7"])
def test_an_old_primary_that_comes_back_is_refused(fake: Callable[..., Fake], accepted: str | None):
    """Also after pg_upgrade, if the command line still has the option that accepted the server."""
    made = fake(WORK, [{}, {"exit": 3}, {"exit": 3}])
    promoted = {"timeline": 2, "timeline_history": [{"timeline": 1, "end_lsn": "0/8000"}]}
    made.set_looks([promoted, {"timeline": 1}])
    with pytest.raises(OtherSourceError, match="this server is an old primary"):
        made.run(accept_system_id=accepted)
    assert [epoch.timeline for epoch in list_epochs(made.staging)] == [1, 2]


def test_another_epoch_begins_when_the_sealer_rests(fake: Callable[..., Fake], monkeypatch: pytest.MonkeyPatch):
    """It removes old epochs and temporary files. After a seal, the sealer's thread still works with these."""
    made = fake(WORK, [{}, {"exit": 3}])
    made.set_looks([{"timeline": 2, "timeline_history": [{"timeline": 1, "end_lsn": "0/8000"}]}])
    events, resting = [], threading.Event()
    rest, begin_epoch = sealer.Sealer.rest, StagingWriter.begin_epoch

    def build(*_: Any) -> None:
        events.append("index")
        until(lambda: resting.is_set() or events.count("epoch") > 1)
        events.append("done")

    def rest_noted(self: sealer.Sealer) -> None:
        resting.set()
        rest(self)
        resting.clear()

    def begin_noted(self: StagingWriter, wanted: Epoch) -> Epoch:
        events.append("epoch")
        return begin_epoch(self, wanted)

    monkeypatch.setattr(sealer, "_build_index", build)
    monkeypatch.setattr(sealer.Sealer, "rest", rest_noted)
    monkeypatch.setattr(StagingWriter, "begin_epoch", begin_noted)
    made.run(seal=SealPolicy())
    assert events == ["epoch", "index", "done", "epoch"]
    made.check(WORK)


def test_a_second_launcher_ends_at_once(fake: Callable[..., Fake]):
    made = fake()
    with Launcher(made.config(available_now=False)) as launcher:
        with pytest.raises(StagingError, match="another run or land uses"):
            Launcher(made.config()).start()
        until(lambda: launcher.progress.transactions == len(WORK))
    made.check(WORK)
    assert sum("prepare" in arguments for arguments in made.starts) == 1


def test_its_owner_may_have_taken_the_lock(fake: Callable[..., Fake]):
    """Then the owner also releases it: `run --available-now` copies tables when its launcher has ended."""
    made = fake()
    launcher = Launcher(made.config())
    with closing(StagingLock(made.staging)) as launcher.lock:
        before = lock_owner(made.staging)
        with launcher:
            launcher.wait()
        assert before is not None
        assert lock_owner(made.staging) == before | {"lands": False}
    made.check(WORK)
    assert lock_owner(made.staging) is None


@pytest.mark.parametrize("failpoint", [Failpoint.BEFORE_WRITE, Failpoint.BEFORE_FSYNC, Failpoint.AFTER_RENAME])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_full_or_broken_disk_stops_it(fake: Callable[..., Fake], failpoint: Failpoint, code: int):
    made, passed = fake(), iter([False, True])

    def hook(reached: Failpoint) -> None:
        if reached == failpoint and next(passed, True):
            raise OSError(code, os.strerror(code))

    with pytest.raises(StagingError, match=os.strerror(code)) as caught:
        made.run(hook=hook)
    assert caught.value.exit_code == 7
    ends = [segment.end_lsn for segment in list_segments(made.staging)]
    assert made.confirmed_lsn <= max([0x100, *ends])
    made.run()
    made.check(WORK)


def test_segments_that_all_readers_have_are_removed(fake: Callable[..., Fake], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sealer, "_REMOVE_INTERVAL_S", 0.0)
    made = fake(WORK[:30])
    made.run()
    register_reader(made.staging, "r", Position(1, WORK[29].end_lsn))
    made.set_transactions(WORK)
    made.run()
    landed = made.landed()
    assert landed == WORK[-len(landed) :]
    assert landed[0].end_lsn >= WORK[29].end_lsn


def test_the_start_removes_what_the_readers_have_got_meanwhile(fake: Callable[..., Fake]):
    made = fake()
    made.run()
    segments = list_segments(made.staging)
    assert len(segments) > 2
    register_reader(made.staging, "r", segments[-1].end)
    made.run()  # it brings nothing new, so nothing is sealed
    assert [segment.end_lsn for segment in list_segments(made.staging)] == [segments[-1].end_lsn]


@pytest.mark.parametrize("has_reader", [True, False])
def test_a_full_disk_has_room_again_if_a_reader_has_segments(
    fake: Callable[..., Fake], monkeypatch: pytest.MonkeyPatch, has_reader: bool
):
    """Not even the trial at the start finds room, until a segment is removed."""
    made = fake(WORK[:30])
    made.run()
    first, *_, last = list_segments(made.staging)
    if has_reader:
        register_reader(made.staging, "r", last.end)

    def write(path: Path, value: dict[str, object]) -> None:
        if first.path.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_json(path, value)

    monkeypatch.setattr(lock, "write_json", write)
    made.set_transactions(WORK)
    if has_reader:
        made.run()
        assert log_end(made.staging) == (2, WORK[-1].end_lsn)
    else:
        with pytest.raises(StagingError, match=os.strerror(errno.ENOSPC)):
            made.run()
        assert first.path.exists()


def test_status(fake: Callable[..., Fake]):
    made = fake()
    with Launcher(made.config(available_now=False)) as launcher:
        until(lambda: launcher.progress.position == (1, WORK[-1].end_lsn))
        register_reader(made.staging, "tables", Position(1, WORK[3].end_lsn))
        ended = run_spark_cli("status", "--staging", str(made.staging), "--json")
        assert ended.returncode == 0, ended.stderr
        found = json.loads(ended.stdout)
    segments = list_segments(made.staging)
    assert found["launcher"]["pid"] == os.getpid()
    assert found["end"] == str(log_end(made.staging))
    assert found["segments"] == len(segments)
    assert found["size"] == sum(segment.path.stat().st_size for segment in segments)
    assert found["source"]["slot"] == "s"
    reader = found["readers"]["tables"]
    assert reader["position"] == f"1:0/{WORK[3].end_lsn:X}"
    assert reader["segments_behind"] == len(list_segments(made.staging, Position(1, WORK[3].end_lsn)))
    text = run_spark_cli("status", "--staging", str(made.staging)).stdout
    assert "none is running" in text
    assert "tables: 1:0/" in text


def test_a_promoted_server_streams_once_its_wal_has_passed_the_end_of_the_log(
    fake: Callable[..., Fake], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """It left the old timeline before the log's end, so the log has positions that its WAL has still to reach."""
    monkeypatch.setattr(opening, "_AWAIT_WAL_S", 0.01)
    promoted = {"timeline": 2, "timeline_history": [{"timeline": 1, "end_lsn": "0/480"}], "confirmed": "0/400"}
    made = fake(WORK, [{}, {"exit": 3}])
    made.set_looks([promoted | {"wal_lsn": lsn} for lsn in ("0/500", format_lsn(WORK[-1].end_lsn - 1), "0/900")])
    made.run(on_gap="resnapshot")
    made.check(WORK)
    before, after = list_epochs(made.staging)
    assert (before.gap, after.start_lsn) == (None, WORK[-1].end_lsn)
    assert after.gap is not None
    assert after.gap.is_divergence
    prepared = [arguments for arguments in map(json.loads, made.read("looks")) if "prepare" in arguments]
    assert len(prepared) == 3
    [said] = [record.getMessage() for record in caplog.records if "the stream begins when" in record.getMessage()]
    assert said.startswith("the server's WAL is at 0/500; the stream begins when it has passed 0/860, after 864 B of WAL (hint: ")
    assert "SELECT pg_create_restore_point('cdcpipe'), pg_switch_wal() takes its WAL to the next file at once" in said


def test_the_wait_for_the_wal_outlasts_a_restart_and_another_promotion(fake: Callable[..., Fake], monkeypatch: pytest.MonkeyPatch):
    """It ended with 2 at the first moment without a server, or as the stream expected the timeline from before the wait."""
    monkeypatch.setattr(opening, "_AWAIT_WAL_S", 0.01)
    history = [{"timeline": 1, "end_lsn": "0/480"}, {"timeline": 2, "end_lsn": "0/510"}]
    promoted = {"timeline": 2, "timeline_history": history[:1], "confirmed": "0/400", "wal_lsn": "0/500"}
    switched = promoted | {"timeline": 3, "timeline_history": history, "wal_lsn": "0/900"}
    away = {"exit": 2, "stderr": f"cdcpipe: error: {UnreachableError.BEGINNING}db\n"}
    made = fake()
    made.run()
    streams = sum("--expect" in start for start in made.starts)
    made.set_turns([{}] * len(made.starts) + [promoted, away, promoted, away, promoted, switched, switched])
    assert made.run(on_gap="resnapshot").progress.restarts == 2
    made.check(WORK)
    assert [(epoch.timeline, epoch.gap is not None) for epoch in list_epochs(made.staging)] == [(1, False), (2, True), (3, True)]
    expected = [start[start.index("--expect") + 1] for start in made.starts if "--expect" in start]
    assert expected[streams:] == ["7/3"]


def test_a_launcher_that_is_started_during_the_wait_for_the_wal_waits_too(
    fake: Callable[..., Fake], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """The streamer would refuse the server, because its WAL ends before the position from which the stream goes on."""
    monkeypatch.setattr(opening, "_AWAIT_WAL_S", 0.01)
    promoted = {"timeline": 2, "timeline_history": [{"timeline": 1, "end_lsn": "0/480"}], "confirmed": "0/400"}
    made = fake()
    made.run()
    before = len(made.starts)
    made.set_turns([promoted | {"wal_lsn": "0/500"}] * 1000)
    for on_gap in ("resnapshot", "stop", "stop"):
        caplog.clear()
        with Launcher(made.config(on_gap=on_gap)) as launcher:
            until(lambda: "the stream begins when it has passed" in caplog.text)
            assert launcher.progress.is_ahead
    assert all(start[0] == "prepare" for start in made.starts[before:])
    made.set_turns([promoted | {"wal_lsn": "0/900"}] * 1000)
    progress = made.run().progress
    assert (progress.gaps, progress.is_ahead) == (0, False)
    made.check(WORK)
    assert sum(epoch.gap is not None for epoch in list_epochs(made.staging)) == 1

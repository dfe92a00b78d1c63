"""The launcher: against a fake streamer for faults, against the real command and PostgreSQL for everything together."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import pexpect
import postgres
import psycopg
import pytest

from cdcpipe.errors import (
    CdcpipeError,
    InitError,
    InvalidArgumentsError,
    RewoundServerError,
    ServerError,
    SlotDoesNotExistError,
)
from cdcpipe.lsn import LSN
from cdcpipe.pgoutput.decode import decode
from cdcpipe.pgoutput.messages import Delete, Insert, Truncate, Update
from cdcpipe.pipe.framing import RecordReader
from cdcpipe.retry import RetryPolicy
from spark_sink.client.failure import Failure
from spark_sink.client.prepare import Prepared
from spark_sink.client.slot_monitor import SlotMonitor
from spark_sink.commands.run import _note_known
from spark_sink.launcher import launcher as launcher_module
from spark_sink.launcher import sealer, streamer
from spark_sink.launcher.launcher import Launcher, LauncherConfig
from spark_sink.launcher.restart import RestartPolicy, final_error
from spark_sink.staging import known_position
from spark_sink.staging.filler import SealPolicy
from spark_sink.staging.lock import lock_owner
from spark_sink.staging.log import Position, StagingError, list_epochs, list_segments, log_end
from spark_sink.staging.readers import register_reader
from spark_sink.staging.writer import Failpoint
from support.fake_streamer import WORK, Fake
from support.paths import ROOT
from support.pgoutput_stream import Transaction, encode_stream


def wait_for(condition: Callable[[], Any], what: str = "the condition", timeout_s: float = 60.0) -> None:
    """Wait until it holds; this is no measurement."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.005)


# --- the restart policy ---


def delays(codes: list[tuple[int, int, str]], *, step_s: float = 1.0) -> list[float | None]:
    policy, now, found = RestartPolicy(lambda: 1.0), 0.0, []
    for code, end_lsn, message in codes:
        now += step_s
        found.append(policy.delay(Failure(code, message), end_lsn, now))
    return found


@pytest.mark.parametrize("code", [3, 9, 0, -9, -15])
def test_again_without_limit(code: int):
    assert delays([(code, 0x100, "same")] * 8) == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
    assert delays([(code, 0x100, "same")] * 500)[-1] == 10.0


@pytest.mark.parametrize("code", [1, 2, 4, 6, 7, 8, 120])
def test_not_again(code: int):
    assert delays([(code, 0x100, "")]) == [None]


def test_progress_resets_the_delay():
    assert delays([(3, 1, ""), (3, 1, ""), (3, 2, ""), (3, 2, "")]) == [0.2, 0.4, 0.2, 0.4]


def test_the_same_error_at_the_same_place_is_poison():
    assert delays([(5, 1, "x")] * 5) == [0.2, 0.4, 0.8, 1.6, None]
    assert None not in delays([(5, 1, "x"), (5, 1, "y")] * 10)
    assert None not in delays([(5, n, "x") for n in range(20)])
    assert delays([(5, 1, "x")] * 4 + [(3, 1, ""), (5, 1, "x")])[-1] is None


def test_a_failed_start_is_tried_again_for_a_while_after_a_lost_connection():
    assert delays([(3, 1, ""), (2, 1, "refused"), (2, 1, "refused")])[1:] == [0.4, 0.8]
    found = delays([(3, 1, "")] + [(2, 1, "refused")] * 70)
    assert found.index(None) == 60
    assert delays([(3, 1, ""), (2, 2, "")])[1] is None  # it has been streaming since


def test_the_jitter_is_between_half_and_all_of_the_delay():
    assert RestartPolicy(lambda: 0.0).delay(Failure(3, ""), 0, 0.0) == 0.1


@pytest.mark.parametrize("code", [1, 2, 3, 5, 8, 9])
def test_an_error_has_the_exit_code_of_the_streamer(code: int):
    error = final_error(Failure(code, "what it said", "what to do"), 0x100)
    assert error.exit_code == code
    assert "what it said" in str(error)


@pytest.mark.parametrize("code", [4, 6, 7, -11, 120])
def test_an_unexpected_exit_code_is_a_system_error(code: int):
    error = final_error(Failure(code, ""), 0x100)
    assert error.exit_code == 7
    assert f"ended with {code}" in str(error)


def test_what_prepare_prints():
    text = json.dumps(
        {
            "server_version": 180004,
            "system_id": "7",
            "timeline": 1,
            "database": "db",
            "wal_lsn": "0/200",
            "slot": {"confirmed_flush_lsn": "0/100"},
            "tables": [{"schema": "public", "name": "t", "primary_key": ["id"]}],
        }
    )
    prepared = Prepared.parse(text.encode())
    assert (prepared.wal_lsn, prepared.confirmed_flush_lsn, prepared.tables[0]["name"]) == (0x200, 0x100, "t")
    for broken in ("", "[]", "{}", text.replace("0/200", "x"), text.replace("confirmed", "c")):
        with pytest.raises(CdcpipeError, match="prepare"):
            Prepared.parse(broken.encode())


# --- against the fake ---


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Fake]:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{ROOT / 'tests'}")
    monkeypatch.setattr(
        launcher_module, "RestartPolicy", partial(RestartPolicy, pauses=RetryPolicy(first_pause_s=0.01, longest_pause_s=10))
    )

    def make(transactions: list[Transaction] = WORK, turns: list[dict[str, Any]] | None = None) -> Fake:
        made = Fake(tmp_path)
        made.set_transactions(transactions)
        made.set_turns(turns or [])
        return made

    return make


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
        ["prepare", "-d", "db", "-S", "s", "--publication", "p"],
        (
            "-d db -S s --publication p -H --whole-transactions -o streaming=parallel -o messages=true"
            f" --startpos 0/100 --expect 7/1 --endpos 0/{WORK[-1].end_lsn + 1:X} --endpos-wait"
        ).split(),
    ]
    assert all(segment.index_path.exists() for segment in list_segments(made.staging))


def test_the_options_of_the_slot_are_for_prepare(fake: Callable[..., Fake]):
    made = fake([])
    made.run(create_slot=True, tables=("a.b", "c.d"), verbose=True)
    assert made.starts[0][-5:] == ["-c", "--table", "a.b", "--table", "c.d"]
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


def test_a_server_that_cannot_send_what_comes_next(fake: Callable[..., Fake]):
    turn = {"exit": 5, "stderr": "cdcpipe: error: invalid memory alloc request size\n", "bytes": 1500}
    made = fake(WORK, [{}, turn] + [turn | {"bytes": 0}] * 20)
    with pytest.raises(ServerError, match=r"again and again, after 0/.*invalid memory alloc"):
        made.run()
    assert len(made.starts) <= 2 + 5
    assert made.landed() == WORK[: len(made.landed())] != []


def test_a_server_that_has_gone_back_is_not_tried_again(fake: Callable[..., Fake]):
    """Not after a lost connection either, nor by a later launcher: soon its WAL is past the end of the log."""
    rewound = {"exit": 2, "stderr": f"cdcpipe: error: {RewoundServerError.BEGINNING}its WAL ends at 0/1\n", "bytes": 0}
    made = fake(WORK, [{}, {"exit": 3, "bytes": 1500}, rewound])
    with pytest.raises(RewoundServerError, match="its WAL ends at 0/1"):
        made.run()
    assert len(made.starts) == 3
    landed = made.landed()
    assert landed == WORK[: len(landed)] != []
    with pytest.raises(StagingError, match=r"has ended for good .* its WAL ends at 0/1"):
        made.run()
    assert (len(made.starts), made.landed()) == (3, landed)


def test_bytes_that_are_no_records_are_not_landed(fake: Callable[..., Fake]):
    made = fake(WORK, [{}, {"garbage": "garbage"}, {"garbage": "w 0/0 5\nZzzzz"}])
    launcher = made.run()
    made.check(WORK)
    assert launcher.progress.restarts == 2


def test_what_came_before_such_bytes_and_is_not_sealed_comes_again(fake: Callable[..., Fake]):
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


def test_what_is_whole_is_sealed_and_confirmed_at_a_stop(fake: Callable[..., Fake]):
    made = fake()
    launcher = Launcher(made.config(available_now=False, seal=SealPolicy(1 << 30, 1e9)))
    with launcher:
        wait_for(lambda: launcher.progress.open_size > 2000)
        assert launcher.progress.segments == 0
    assert launcher.has_ended
    assert launcher.error is None
    made.check(WORK)
    assert made.confirmed_lsn == WORK[-1].end_lsn
    assert made.read("commands") == [f"F 0/{WORK[-1].end_lsn:X}", "q"]


def test_a_segment_is_sealed_by_age_while_nothing_comes(fake: Callable[..., Fake]):
    made = fake()
    with Launcher(made.config(available_now=False, seal=SealPolicy(1 << 30, 0.01))) as launcher:
        wait_for(lambda: made.confirmed_lsn == WORK[-1].end_lsn)
        assert launcher.progress.position == (1, WORK[-1].end_lsn)
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
    wait_for(lambda: made.confirmed_lsn == WORK[-1].end_lsn)
    launcher.stop()
    launcher.wait()
    made.check(WORK)


def test_a_stop_while_waiting_to_start_again(fake: Callable[..., Fake], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launcher_module, "RestartPolicy", partial(RestartPolicy, pauses=RetryPolicy(first_pause_s=60)))
    made = fake(WORK, [{}, {"exit": 9}])
    launcher = Launcher(made.config())
    launcher.start()
    wait_for(lambda: launcher.progress.restarts == 1)
    launcher.stop()
    launcher.wait()
    assert made.landed() == WORK


def test_a_stop_before_the_slot_is_prepared(fake: Callable[..., Fake]):
    made = fake(WORK, [{"signal": signal.SIGSTOP}])
    launcher = Launcher(made.config())
    starter = threading.Thread(target=launcher.start)
    starter.start()
    wait_for(lambda: len(made.starts) == 1)
    launcher.stop()
    starter.join()
    assert launcher.has_ended
    assert launcher.error is None
    launcher.request_stop()  # and it may be asked again


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


def test_a_second_launcher_ends_at_once(fake: Callable[..., Fake]):
    made = fake()
    with Launcher(made.config(available_now=False)) as launcher:
        with pytest.raises(StagingError, match="another launcher uses"):
            Launcher(made.config()).start()
        wait_for(lambda: launcher.progress.transactions == len(WORK))
    made.check(WORK)
    assert sum("prepare" in arguments for arguments in made.starts) == 1


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


def test_what_all_readers_have_is_removed(fake: Callable[..., Fake], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sealer, "_REMOVE_INTERVAL_S", 0.0)
    made = fake(WORK[:30])
    made.run()
    register_reader(made.staging, "r", Position(1, WORK[29].end_lsn))
    made.set_transactions(WORK)
    made.run()
    landed = made.landed()
    assert landed == WORK[-len(landed) :]
    assert landed[0].end_lsn >= WORK[29].end_lsn


RUN_AND_DIE = """
    import os, signal, sys
    from functools import partial
    sys.path[:0] = sys.argv[4:]
    from pathlib import Path
    from support.fake_streamer import Fake
    from cdcpipe.retry import RetryPolicy
    from spark_sink.launcher import launcher as module
    from spark_sink.launcher.launcher import Launcher
    from spark_sink.launcher.restart import RestartPolicy

    module.RestartPolicy = partial(RestartPolicy, pauses=RetryPolicy(first_pause_s=0.01, longest_pause_s=10))
    fake = Fake(Path(sys.argv[1]))
    left = int(sys.argv[3])

    def hook(failpoint):
        global left
        if failpoint.name == sys.argv[2]:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    launcher = Launcher(fake.config(hook=hook))
    launcher.start()
    launcher.wait()
"""


@pytest.mark.parametrize("failpoint", Failpoint)
def test_a_launcher_killed_at_any_point_goes_on(fake: Callable[..., Fake], failpoint: Failpoint):
    made = fake()
    program = textwrap.dedent(RUN_AND_DIE)
    for turn in (1, 2, 2):
        argv = [sys.executable, "-c", program, str(made.directory), failpoint.name, str(turn)]
        argv += [str(ROOT), str(ROOT / "tests")]
        ended = subprocess.run(argv, capture_output=True, timeout=60)
        assert ended.returncode in (-signal.SIGKILL, 0), ended.stderr.decode()
        if turn == 1:
            assert ended.returncode == -signal.SIGKILL
        landed = made.landed()
        assert landed == WORK[: len(landed)]
        assert made.confirmed_lsn <= max([0x100, *(t.end_lsn for t in landed)])
    made.run()
    made.check(WORK)
    assert not list(made.staging.glob("*/*.open"))


# --- the command line ---


def cdcpipe_spark(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "spark_sink", *arguments], capture_output=True, text=True, timeout=120, cwd=ROOT, **options
    )


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["land"],
        ["land", "-S", "s", "--publication", "p"],
        ["land", "-S", "s", "--staging", "/nowhere/x"],
        ["land", "-S", "s", "--publication", "p", "--staging", "/nowhere/x", "--segment-size", "0"],
        ["land", "-S", "s", "--publication", "p", "--staging", "/nowhere/x", "--segment-size", "64 potatoes"],
        ["land", "-S", "s", "--publication", "p", "--staging", "/nowhere/x", "--seal-interval", "-1"],
        ["land", "-S", "s", "--publication", "p", "--staging", "/nowhere/x", "--seal-interval", "nan"],
        ["land", "-S", "s", "--publication", "p", "--staging", "/nowhere/x", "--keep-segments", "100"],
        ["land", "-S", "s", "--publication", "p", "--staging", "/nowhere/x", "--keep-segments", "3 fortnights"],
        ["status"],
        ["status", "--staging", "pyproject.toml"],
    ],
)
def test_usage_errors_exit_with_1(arguments: list[str]):
    ended = cdcpipe_spark(*arguments)
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["-?"], ["land", "--help"], ["land", "-?"], ["status", "-?"], ["--version"]])
def test_help(arguments: list[str]):
    ended = cdcpipe_spark(*arguments)
    assert ended.returncode == 0
    assert ended.stderr == ""
    assert arguments == ["--version"] or "Example:" in ended.stdout


def test_status_of_nothing(tmp_path: Path):
    ended = cdcpipe_spark("status", "--staging", str(tmp_path / "nowhere"))
    assert ended.returncode == 7
    assert ended.stderr.startswith("cdcpipe-spark: error: ")
    assert cdcpipe_spark("status", "--staging", str(tmp_path)).stdout.endswith("not begun\n")


def test_status(fake: Callable[..., Fake]):
    made = fake()
    with Launcher(made.config(available_now=False)) as launcher:
        wait_for(lambda: launcher.progress.position == (1, WORK[-1].end_lsn))
        register_reader(made.staging, "tables", Position(1, WORK[3].end_lsn))
        ended = cdcpipe_spark("status", "--staging", str(made.staging), "--json")
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
    text = cdcpipe_spark("status", "--staging", str(made.staging)).stdout
    assert "none is running" in text
    assert "tables: 1:0/" in text


# --- the whole, against PostgreSQL ---


def config_for(database: postgres.Database, staging: Path, **changes: Any) -> LauncherConfig:
    config = LauncherConfig(
        slot=f"slot_{database.name}"[:63],
        staging=staging,
        publications=("pub",),
        connection=("-d", database.dsn),
        create_slot=True,
        seal=SealPolicy(segment_bytes=200_000, seal_interval_s=0.1, held_bytes=100_000),
    )
    return replace(config, **changes)


def replay(staging: Path) -> tuple[dict[str, dict[bytes, tuple[Any, ...]]], int]:
    """Apply what is in the log to empty tables; every transaction must be there once, in order."""
    tables: dict[str, dict[bytes, tuple[Any, ...]]] = {}
    names: dict[int, str] = {}
    transactions, last_end_lsn = 0, 0
    for segment in list_segments(staging):
        reader = RecordReader()
        reader.feed(segment.path.read_bytes())
        names.clear()  # each segment can be read alone
        for _, body in reader:
            message = decode(body)
            match message:
                case Insert():
                    table = tables.setdefault(names[message.relation_id], {})
                    assert message.new[0] not in table
                    table[message.new[0]] = message.new
                case Update():
                    table = tables[names[message.relation_id]]
                    del table[(message.key or message.new)[0]]
                    table[message.new[0]] = message.new
                case Delete():
                    del tables[names[message.relation_id]][message.key[0]]
                case Truncate():
                    for relation_id in message.relation_ids:
                        tables[names[relation_id]] = {}
                case _ if type(message).__name__ == "Relation":
                    names[message.relation_id] = message.name
                case _ if type(message).__name__ == "Commit":
                    transactions += 1
                    assert message.end_lsn > last_end_lsn
                    last_end_lsn = message.end_lsn
                case _:
                    pass
    return tables, transactions


def check_tables(database: postgres.Database, staging: Path, *names: str) -> None:
    tables, _ = replay(staging)
    with database.connect() as connection:
        for name in names:
            rows = connection.execute(f"select t.* from {name} t").fetchall()
            expected = {
                str(row[0]).encode(): tuple(None if value is None else str(value).encode() for value in row) for row in rows
            }
            assert tables.get(name, {}) == expected


def confirmed_lsn(database: postgres.Database) -> int:
    with database.connect() as connection:
        [(text,)] = connection.execute(
            "select confirmed_flush_lsn::text from pg_replication_slots where slot_name = %s", (f"slot_{database.name}"[:63],)
        ).fetchall()
    return LSN.parse(text)


def test_postgres_until_it_is_stopped_and_then_what_is_available(database: postgres.Database, tmp_path: Path):
    with database.connect() as connection:
        connection.execute("create table t (id int primary key, v text)")
        with Launcher(config_for(database, tmp_path)) as launcher:
            assert [table["name"] for table in launcher.prepared.tables] == ["t"]
            for n in range(50):
                connection.execute("insert into t values (%s, repeat('x', 100))", (n,))
            wait_for(lambda: launcher.progress.transactions == 50)
            connection.execute("update t set id = id + 1000 where id % 2 = 0")
            connection.execute("delete from t where id % 3 = 0")
        check_tables_and_position = partial(check_tables, database, tmp_path, "t")
        connection.execute("insert into t select n, repeat('y', 1000) from generate_series(10000, 12000) n")
        connection.execute("create table u (id int primary key)")
        connection.execute("insert into u values (1), (2)")
        connection.execute("truncate u")
        connection.execute("insert into u values (2)")
        run = Launcher(config_for(database, tmp_path, available_now=True))
        run.start()
        run.wait()
        check_tables_and_position("u")
        end = log_end(tmp_path)
        assert end is not None
        assert confirmed_lsn(database) >= end.lsn
        assert {epoch.number for epoch in list_epochs(tmp_path)} == {1, 2}
        assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.rglob("*.cdc"))


def test_postgres_idle_runs_move_the_slot_on(database: postgres.Database, tmp_path: Path):
    with database.connect() as connection:
        connection.execute("create table t (id int primary key)")
        connection.execute("create publication pub for table t")
        connection.execute("create unlogged table other (id int)")
        Launcher(config_for(database, tmp_path, available_now=True)).start().wait()
        before = confirmed_lsn(database)
        connection.execute("create table unpublished as select generate_series(1, 20000)")
        with Launcher(config_for(database, tmp_path)):
            wait_for(lambda: confirmed_lsn(database) > before + 100_000)
        connection.execute("insert into t values (1)")
        Launcher(config_for(database, tmp_path, available_now=True)).start().wait()
    check_tables(database, tmp_path, "t")


def test_postgres_what_is_known_of_the_log_follows_other_traffic(database: postgres.Database, tmp_path: Path):
    config = config_for(database, tmp_path)

    def wal_lsn(connection: psycopg.Connection[Any]) -> int:
        return LSN.parse(connection.execute("select pg_current_wal_lsn()::text").fetchall()[0][0])

    with database.connect() as connection:
        connection.execute("create table t (id int primary key)")
        connection.execute("create publication pub for table t")
        with (
            Launcher(config) as launcher,
            SlotMonitor(config.connection, config.slot, 0.2, on_report=lambda report: _note_known(launcher, report)),
        ):
            connection.execute("insert into t values (1)")
            connection.execute("create table unpublished ()")
            after = wal_lsn(connection)
            wait_for(lambda: known_position.read(tmp_path) >= after)
            assert launcher.progress.transactions == 1
        connection.execute("create table another ()")
        after = wal_lsn(connection)
        Launcher(replace(config, available_now=True)).start().wait()
        assert known_position.read(tmp_path) >= after
    (tmp_path / "known.json").write_text("{")
    assert known_position.read(tmp_path) == 0


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"create_slot": False}, 8, "does not exist"),
        ({"publications": ("nonesuch",), "slot": "other"}, 2, "nonesuch"),
        ({"connection": ("-d", "dbname=nonesuch", "-h", "/nonesuch")}, 2, "connect"),
        ({"connection": ("-d", "x", "-m", "password=SECRET")}, 1, "password"),
    ],
    ids=["slot", "publication", "server", "password"],
)
def test_postgres_bad_input(database: postgres.Database, tmp_path: Path, changes: dict[str, Any], code: int, words: str):
    if "publications" in changes:
        with database.connect() as connection:
            connection.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", (changes["slot"],))
    with pytest.raises(CdcpipeError, match=words) as caught:
        Launcher(config_for(database, tmp_path, **changes)).start()
    assert caught.value.exit_code == code
    assert "SECRET" not in str(caught.value)
    assert list_segments(tmp_path) == []


@pytest.mark.parametrize("uri", ["postgresql://r:CANARY%zz@h/db", "postgresql://r:p/CANARY@h/db", "postgres:/r:CANARY@h/db"])
def test_a_mistake_in_a_uri_shows_no_password(tmp_path: Path, uri: str) -> None:
    where = ["-d", uri, "-S", "s", "--publication", "p", "--staging", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "spark_sink", "land", *where], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert "can't be read (it is not shown)" in done.stderr
    written = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert "CANARY" not in done.stderr + done.stdout + "".join(written)


def test_a_table_without_identity_is_told_of_once(database: postgres.Database, tmp_path: Path) -> None:
    with database.connect() as connection:
        connection.execute("create table keyless (v int)")
        connection.execute("create publication told for table keyless")
    where = ["-d", database.dsn, "-S", f"told_{database.name}"[:63], "--publication", "told", "--staging", str(tmp_path)]
    done = cdcpipe_spark("land", *where, "-c", "--available-now")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("public.keyless has no usable replica identity") == 1, done.stderr


class Workload:
    """Changes two tables from a thread of its own until it is stopped."""

    def __init__(self, database: postgres.Database, seed: int) -> None:
        self.database, self.random = database, random.Random(seed)
        self.error: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        assert self.error is None

    def _run(self) -> None:
        try:
            with self.database.connect() as connection:
                count = 0
                while not self._stop.is_set():
                    kind = self.random.random()
                    with connection.transaction():
                        for _ in range(self.random.choice([1, 1, 1, 5, 200])):
                            count += 1
                            connection.execute("insert into t values (%s, %s)", (count, "v" * self.random.randrange(300)))
                        if kind < 0.3:
                            connection.execute("update t set id = -id where id = %s", (self.random.randrange(1, count + 1),))
                        elif kind < 0.4:
                            connection.execute("delete from t where id %% 17 = %s", (self.random.randrange(17),))
                        elif kind < 0.42:
                            connection.execute("truncate u")
                            connection.execute("insert into u select -n, n::text from generate_series(1, 2000) n")
                            connection.execute("insert into u values (%s, 'x')", (count,))
        except psycopg.Error as ex:
            self.error = ex


@pytest.mark.slow
def test_postgres_kill_loops(database: postgres.Database, tmp_path: Path):
    """Launcher and streamer are killed at random moments, again and again; what is in the log is what is in the tables."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    chance = random.Random(seed)
    with database.connect() as connection:
        connection.execute("create table t (id int primary key, v text)")
        connection.execute("create table u (id int primary key, v text)")
        connection.execute("create publication pub for all tables")
    argv = [sys.executable, "-m", "spark_sink", "land", "-d", database.dsn, "-S", f"slot_{database.name}"[:63]]
    argv += ["--publication", "pub", "-c", "--staging", str(tmp_path), "--segment-size", "20000", "--seal-interval", "0.05"]
    Launcher(config_for(database, tmp_path, available_now=True)).start().wait()
    with Workload(database, seed):
        for turn in range(6):
            with open(tmp_path.parent / "stderr", "ab") as errors, subprocess.Popen(argv, cwd=ROOT, stderr=errors) as process:
                try:
                    before = len(list_segments(tmp_path))
                    wait_for(lambda before=before: len(list_segments(tmp_path)) > before, "a segment")
                    time.sleep(chance.random() * 0.3)
                    if turn % 2:
                        end = log_end(tmp_path)
                        # Its children are those of its main thread or of others; all have it as their parent.
                        for pid in children(process.pid):
                            os.kill(pid, signal.SIGKILL)
                        wait_for(lambda end=end: log_end(tmp_path) > end, "a segment after the streamer was killed")
                finally:
                    process.send_signal(signal.SIGKILL)
    final = cdcpipe_spark(*argv[3:], "--available-now")
    assert final.returncode == 0, final.stderr
    check_tables(database, tmp_path, "t", "u")
    end = log_end(tmp_path)
    assert end is not None
    assert confirmed_lsn(database) >= end.lsn


def is_child(stat: Path, pid: int) -> bool:
    try:
        return int(stat.read_text().rpartition(")")[2].split()[1]) == pid
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_postgres_signals_end_land_cleanly(database: postgres.Database, tmp_path: Path, number: signal.Signals):
    with database.connect() as connection:
        connection.execute("create table t (id int primary key)")
        argv = [sys.executable, "-m", "spark_sink", "land", "-d", database.dsn, "-S", f"slot_{database.name}"[:63]]
        argv += ["--publication", "pub", "-c", "--staging", str(tmp_path), "--seal-interval", "3600"]
        with subprocess.Popen(argv, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
            wait_for(lambda: log_end(tmp_path) is not None)
            connection.execute("insert into t values (1)")
            # The server has sent it; how far it came by then is chance.
            sent = "select count(*) from pg_stat_replication where sent_lsn = pg_current_wal_lsn()"
            wait_for(lambda: connection.execute(sent).fetchone() == (1,))
            process.send_signal(number)
            _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        assert "Traceback" not in errors
        end = log_end(tmp_path)
        assert end is not None
        assert confirmed_lsn(database) >= end.lsn
        assert not list(tmp_path.glob("*/*.open"))
        subprocess.run([*argv, "--available-now"], cwd=ROOT, check=True, timeout=60)
        check_tables(database, tmp_path, "t")


def test_postgres_progress_on_a_terminal_and_control_c(database: postgres.Database, tmp_path: Path):
    argv = ["-m", "spark_sink", "land", "-d", database.dsn, "-S", f"slot_{database.name}"[:63], "--publication", "pub", "-c"]
    argv += ["--staging", str(tmp_path), "--seal-interval", "0.05"]
    with database.connect() as connection:
        connection.execute("create table t (id int primary key)")
        terminal = pexpect.spawn(sys.executable, argv, cwd=str(ROOT), timeout=60, dimensions=(24, 200), encoding="utf-8")
        terminal.expect(r"position 1:0/")
        connection.execute("insert into t values (1)")
        terminal.expect(r"\r\x1b\[Kposition 1:0/[0-9A-F]+, 1 transactions, [0-9]+ records")
        terminal.sendintr()  # to the whole foreground process group; the streamer is not in it
        terminal.expect(pexpect.EOF)
        terminal.close()
    assert terminal.exitstatus == 0
    assert "Traceback" not in terminal.before
    check_tables(database, tmp_path, "t")


def test_postgres_a_signal_before_everything_is_landed(database: postgres.Database, tmp_path: Path):
    waiting = "select count(*) from pg_stat_activity where query like '%pg_create_logical%' and wait_event_type = 'Lock'"
    argv = [sys.executable, "-m", "spark_sink", "land", "-d", database.dsn, "-S", f"slot_{database.name}"[:63], "-c"]
    argv += ["--publication", "pub", "--staging", str(tmp_path), "--available-now"]
    with database.connect() as writer, database.connect() as connection:
        writer.execute("create table t (id int primary key)")
        writer.execute("begin")
        writer.execute("insert into t values (1)")  # the server makes no slot before this has ended
        with subprocess.Popen(argv, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
            wait_for(lambda: connection.execute(waiting).fetchone() == (1,), "the slot's creation")
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 128 + signal.SIGTERM
        writer.execute("rollback")
    assert cdcpipe_spark(*argv[3:]).returncode == 0


def test_postgres_a_killed_launcher_frees_the_slot(database: postgres.Database, tmp_path: Path):
    argv = [sys.executable, "-m", "spark_sink", "land", "-d", database.dsn, "-S", f"slot_{database.name}"[:63], "-c"]
    argv += ["--publication", "pub", "--staging", str(tmp_path)]
    active = "select count(*) from pg_replication_slots where active and database = current_database()"
    with database.connect() as connection, subprocess.Popen(argv, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        wait_for(lambda: connection.execute(active).fetchone() == (1,))
        process.send_signal(signal.SIGKILL)
        process.wait()
        wait_for(lambda: connection.execute(active).fetchone() == (0,), "the end of the streamer")


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_postgres_a_server_that_restarts(pg18: postgres.Cluster, tmp_path: Path, mode: str):
    del pg18  # it skips the test where there is no 18
    with postgres.Cluster("18") as cluster, cluster.database() as database:
        with database.connect() as connection:
            connection.execute("create table t (id int primary key)")
            with Launcher(config_for(database, tmp_path)) as launcher:
                connection.execute("insert into t select generate_series(1, 1000)")
                wait_for(lambda: launcher.progress.transactions == 1)
                cluster.restart(mode)
                with database.connect() as again:
                    again.execute("insert into t select generate_series(1001, 2000)")
                wait_for(lambda: launcher.progress.transactions == 2, "the transaction after the restart")
                assert launcher.progress.restarts >= 1
        check_tables(database, tmp_path, "t")


def test_postgres_an_administrator_who_ends_the_stream_again_and_again(
    database: postgres.Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        launcher_module, "RestartPolicy", partial(RestartPolicy, pauses=RetryPolicy(first_pause_s=0.01), poison_limit=2)
    )
    active = "select active_pid from pg_replication_slots where active and database = current_database()"
    with database.connect() as connection:
        connection.execute("create table t (id int primary key)")
        with Launcher(config_for(database, tmp_path)) as launcher:
            for count in range(3):
                wait_for(lambda: launcher.has_ended or connection.execute(active).fetchone(), "the stream")
                connection.execute(f"select pg_terminate_backend(active_pid) from ({active}) s")
                wait_for(lambda count=count: launcher.has_ended or launcher.progress.restarts > count, "the restart")
            connection.execute("insert into t values (1)")
            wait_for(lambda: launcher.has_ended or launcher.progress.transactions == 1)
    check_tables(database, tmp_path, "t")


def test_postgres_nothing_behind_a_publications_absence_is_landed(
    database: postgres.Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        launcher_module, "RestartPolicy", partial(RestartPolicy, pauses=RetryPolicy(first_pause_s=0.01), poison_limit=2)
    )
    config = config_for(database, tmp_path, available_now=True)
    with database.connect() as connection:
        connection.execute("create table t (id int primary key)")
        land(config)
        connection.execute("insert into t values (1)")
        connection.execute("alter publication pub rename to away")
        connection.execute("insert into t values (2)")
        connection.execute("alter publication away rename to pub")
        connection.execute("insert into t values (3)")
        for _ in range(2):
            with pytest.raises(ServerError, match="no publication had this name") as caught:
                land(config)
            assert "--publication THAT_NAME" in str(caught.value.hint)
            assert replay(tmp_path) == ({"t": {b"1": (b"1",)}}, 1)
        connection.execute("create publication away")
        with pytest.raises(ServerError, match="no publication had this name"):
            land(replace(config, publications=("away",)))
        land(config)
        check_tables(database, tmp_path, "t")


def test_postgres_a_server_restored_from_an_older_copy(pg18: postgres.Cluster, tmp_path: Path):
    """It has the same system identifier and timeline, and writes the same positions with other changes."""
    del pg18  # it skips the test where there is no 18
    with tempfile.TemporaryDirectory(prefix="cdcpipe-copy-", dir="/tmp") as directory:
        os.chmod(directory, 0o755)
        with postgres.Cluster("18", Path(directory) / "server") as cluster:
            copy = Path(directory) / "copy"
            database = postgres.Database(cluster, "postgres")
            config = config_for(database, tmp_path, available_now=True)
            with database.connect() as connection:
                connection.execute("create table t (id int primary key)")
            land(config)
            cluster.stop()
            subprocess.run(["cp", "-a", cluster.data, copy], check=True)
            cluster.start()
            with database.connect() as connection:
                connection.execute("insert into t select generate_series(1, 5000)")
            land(config)
            check_tables(database, tmp_path, "t")
            cluster.stop("immediate")
            shutil.rmtree(cluster.data)
            subprocess.run(["cp", "-a", copy, cluster.data], check=True)
            cluster.start()
            with database.connect() as connection:
                connection.execute("insert into t values (5001)")
                with pytest.raises(RewoundServerError, match=r"its WAL ends at .* before"):
                    land(config)
                connection.execute("insert into t select generate_series(6001, 14000)")
            with pytest.raises(StagingError, match="has ended for good"):
                land(config)
            end = log_end(tmp_path)
            assert end is not None
            assert confirmed_lsn(database) < end.lsn


def land(config: LauncherConfig) -> None:
    with Launcher(config) as launcher:
        launcher.wait()


# --- streamed transactions and messages, against PostgreSQL ---

STREAMED = ("-m", "options=-c logical_decoding_work_mem=64kB")
SPILLING = (
    sys.executable,
    "-P",
    "-c",
    """if True:
        import runpy, sys
        if "prepare" not in sys.argv:
            sys.argv += ["--spill-threshold", "100kB"]
        runpy.run_module("cli", run_name="__main__")
    """,
)
"""The streamer with less memory than the launcher gives it."""


class Interleaved:
    """Large transactions of three sessions, in turn, with savepoints and small ones in between; every step is of the seed."""

    def __init__(self, database: postgres.Database, seed: int) -> None:
        self.random = random.Random(seed)
        self.connections = [database.connect() for _ in range(4)]
        self.depth = [0, 0, 0]
        self.count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for session in range(3):
            self.end(session)
        for connection in self.connections:
            connection.close()

    def end(self, session: int) -> None:
        if self.depth[session]:
            self.connections[session].execute(self.random.choice(["commit", "commit", "rollback"]))
            self.depth[session] = 0

    def step(self) -> None:
        session = self.random.randrange(4)
        connection = self.connections[session]
        self.count += 1
        first = self.count * 1000
        if session == 3:
            connection.execute("insert into t values (%s, 'small')", (first,))
            connection.execute("select pg_logical_emit_message(false, 'p', %s)", (str(first),))
            return
        if self.depth[session] == 0:
            connection.execute("begin")
            connection.execute("select pg_logical_emit_message(true, 'p', 'in')")
            self.depth[session] = 1
        kind = self.random.random()
        rows = "insert into t select %s + n, repeat('x', 200) from generate_series(1, %s) n"
        if kind < 0.6:
            connection.execute(rows, (first, self.random.choice([1, 300, 900])))
        elif kind < 0.75:
            connection.execute(f"savepoint s{self.depth[session]}")
            self.depth[session] += 1
            connection.execute(rows, (first, self.random.choice([1, 600])))
        elif kind < 0.9 and self.depth[session] > 1:
            self.depth[session] -= 1
            how = self.random.choice(["release", "rollback to"])
            connection.execute(f"{how} s{self.depth[session]}")
        else:
            self.end(session)


def version_1(database: postgres.Database, slot: str) -> list[tuple[LSN, bytes]]:
    """Return what the server sends on this slot when it is asked for nothing but messages."""
    with database.connect() as connection:
        [(end,)] = connection.execute("select pg_current_wal_insert_lsn()::text").fetchall()
    argv = ["-m", "cli", "-d", database.dsn, "-S", slot, "--publication", "pub", "-H", "--messages", "--endpos", end]
    with subprocess.Popen([sys.executable, *argv], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        reader = RecordReader()
        reader.feed(process.stdout.read())
        assert process.wait() == 0
    return without_descriptions(reader)


def without_descriptions(records: Iterable[tuple[LSN, bytes]]) -> list[tuple[LSN, bytes]]:
    """Leave out what each segment has of its own, and where a Begin was sent."""
    return [(LSN(0) if data[:1] == b"B" else lsn, data) for lsn, data in records if data[:1] not in (b"R", b"Y")]


def landed_records(staging: Path) -> list[tuple[LSN, bytes]]:
    found = []
    for segment in list_segments(staging):
        reader = RecordReader()
        reader.feed(segment.path.read_bytes())
        found += without_descriptions(reader)
    return found


def begin_streamed(database: postgres.Database, staging: Path) -> str:
    """Make a table, and two slots from here on: the launcher's, and one to compare with."""
    with database.connect() as connection:
        connection.execute("create table t (id int primary key, v text)")
        connection.execute("create publication pub for table t")
        Launcher(config_for(database, staging, available_now=True)).start().wait()
        slot = f"plain_{database.name}"[:63]
        connection.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", (slot,))
    return slot


@pytest.fixture(params=["15", "16", "18"])
def any_database(request: pytest.FixtureRequest) -> Iterator[postgres.Database]:
    cluster: postgres.Cluster = request.getfixturevalue(f"pg{request.param}")
    with cluster.database() as database:
        yield database


def test_postgres_streamed_transactions_are_landed_as_version_1_sends_them(any_database: postgres.Database, tmp_path: Path):
    seed = random.randrange(1 << 30)
    print("seed", seed)
    slot = begin_streamed(any_database, tmp_path)
    config = config_for(any_database, tmp_path, command=SPILLING)
    with Launcher(replace(config, connection=(*config.connection, *STREAMED))) as launcher:
        with Interleaved(any_database, seed) as work:
            for _ in range(80):
                work.step()
        with any_database.connect() as connection:  # large whatever the seed
            connection.execute("insert into t select g, repeat('v', 200) from generate_series(-1000, -1) g")
        expected = version_1(any_database, slot)
        assert len(expected) > 1000
        wait_for(lambda: launcher.progress.position is not None and launcher.progress.position.lsn >= expected[-1][0])
    assert landed_records(tmp_path) == expected
    assert not list(tmp_path.glob(".tmp-*"))


LAND = """
    import json, signal, sys
    from pathlib import Path
    sys.path.insert(0, sys.argv[1])
    from spark_sink.launcher.launcher import Launcher, LauncherConfig
    from spark_sink.staging.filler import SealPolicy

    staging, slot, connection, command = sys.argv[2:]
    launcher = Launcher(
        LauncherConfig(
            slot=slot,
            staging=Path(staging),
            publications=("pub",),
            connection=json.loads(connection),
            seal=SealPolicy(segment_bytes=100_000, seal_interval_s=0.05, held_bytes=50_000),
            command=json.loads(command),
        )
    )
    signal.signal(signal.SIGTERM, lambda *_: launcher.request_stop())
    launcher.start()
    while not launcher.wait(0.1):
        pass
"""


def children(pid: int) -> list[int]:
    return [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/stat") if is_child(path, pid)]


def holds_a_file(pid: int) -> bool:
    """Whether a process has a nameless file open."""
    try:
        return any("(deleted)" in os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir())
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_postgres_kills_in_the_middle_of_streamed_transactions(database: postgres.Database, tmp_path: Path):
    """Streamer or launcher is killed, or the launcher told to end, mostly while large transactions are held; all is there once."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    chance = random.Random(seed)
    staging = tmp_path / "staging"
    slot = begin_streamed(database, staging)
    argv = [sys.executable, "-c", textwrap.dedent(LAND), str(ROOT), str(staging), f"slot_{database.name}"[:63]]
    argv += [json.dumps(["-d", database.dsn, *STREAMED]), json.dumps(SPILLING)]
    with Interleaved(database, seed) as work:
        for turn in range(6):
            with open(tmp_path / "stderr", "ab") as errors, subprocess.Popen(argv, cwd=ROOT, stderr=errors) as process:
                try:
                    for _ in range(chance.randrange(1, 4)):
                        wait_for(lambda pid=process.pid: work.step() or any(map(holds_a_file, children(pid))), "a held transaction")
                        for _ in range(chance.randrange(8)):
                            work.step()
                        for pid in children(process.pid):
                            os.kill(pid, signal.SIGKILL)
                        assert process.poll() is None
                finally:
                    process.send_signal(chance.choice([signal.SIGKILL, signal.SIGTERM]))
            assert process.returncode in (0, -signal.SIGKILL), (turn, (tmp_path / "stderr").read_text())
    expected = version_1(database, slot)
    config = config_for(database, staging, available_now=True)
    Launcher(replace(config, connection=(*config.connection, *STREAMED))).start().wait()
    assert landed_records(staging) == expected
    assert not list(staging.glob(".tmp-*"))


def test_postgres_messages_alone_are_landed_and_confirmed(any_database: postgres.Database, tmp_path: Path):
    """Nothing commits: they hold neither WAL nor memory. The next run begins right after the last one."""
    slot = begin_streamed(any_database, tmp_path)
    emit = "select pg_logical_emit_message(false, 'p', repeat('x', %s))"
    with any_database.connect() as connection:
        with Launcher(config_for(any_database, tmp_path)) as launcher:
            for n in (10, 3_000_000, 30):
                connection.execute(emit, (n,))
            wait_for(lambda: len(landed_records(tmp_path)) == 3)
            end = log_end(tmp_path)
            assert end is not None
            wait_for(lambda: confirmed_lsn(any_database) >= end.lsn, "the confirmation")
            assert launcher.progress.restarts == 0
        connection.execute(emit, (40,))
        Launcher(config_for(any_database, tmp_path, available_now=True)).start().wait()
        connection.execute("insert into t values (1)")
        connection.execute(emit, (50,))
        Launcher(config_for(any_database, tmp_path, available_now=True)).start().wait()
    assert landed_records(tmp_path) == version_1(any_database, slot)
    assert [len(data) for _, data in landed_records(tmp_path) if data[:1] == b"M"] == [16 + n for n in (10, 3_000_000, 30, 40, 50)]

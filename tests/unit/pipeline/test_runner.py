"""`RunConfig` and `Runner` without Spark and without a server: refusals, and the configuration from the command line's options."""

import errno
import fcntl
import inspect
import math
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing, nullcontext
from dataclasses import MISSING, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import click
import pytest

from cdcpipe.background import Background
from cdcpipe.errors import CdcpipeError, ExcludedColumnError, InitError, InvalidArgumentsError
from cdcpipe.masks import parse_masks
from spark_sink.commands import land
from spark_sink.commands import run as run_command
from spark_sink.launcher.config import LauncherConfig
from spark_sink.launcher.launcher import Launcher, Progress
from spark_sink.pipeline import runner
from spark_sink.pipeline.config import RunConfig
from spark_sink.pipeline.failures import PipelineError
from spark_sink.pipeline.pipeline import Pipeline, PipelineProgress
from spark_sink.pipeline.runner import Runner
from spark_sink.schema.table import Table
from spark_sink.snapshot.copy import Snapshot, SnapshotProgress
from spark_sink.snapshot.gap import GapSnapshot
from spark_sink.snapshot.initial import InitialSnapshot
from spark_sink.snapshot.schedule import Hours
from spark_sink.spark import given, java_home, jvm, session
from spark_sink.spark.home import GATEWAY, HOME_HINT, check_named
from spark_sink.staging import last_error
from spark_sink.staging.filler import SealPolicy
from spark_sink.staging.lock import StagingLock, lock_owner
from spark_sink.staging.log import Position, StagingError, list_epochs
from spark_sink.warehouse import gaps
from support.fake_streamer import make_fake
from support.given_sessions import given_session
from support.staged import make_epoch
from support.waiting import until

OPTIONS = """--format parquet --types native --mask a.b.c=null --catalog-database lake --json variant --max-bytes-per-trigger 1MiB
    --trigger-interval 2 --replica-interval 3 --dropped-columns drop --renamed apart --snapshot never --snapshot-chunk-size 1MiB
    --snapshot-hold off --heal 22:00-06:00 --heal-tables 5 --readers any --widen apart --history-interval 5 --keep-history 365d
    --deletes soft --column-names sanitize --optimize-interval off --cluster-replicas --vacuum-retention off --log-retention off
    --master local[1] --conf a=b --jars . --ui --staging-shared no --checkpoint checkpoint"""
"""Every option that `land` has not, with another value than its default; but --keep-changelog and --history, which are Delta's."""


class ReachedError(Exception):
    """The command has made its configuration."""


def config_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *arguments: str) -> RunConfig:
    """Return the configuration that ``cdcpipe-spark run`` makes from these options."""
    made: list[RunConfig] = []

    def take(config: RunConfig) -> Any:
        made.append(config)
        raise ReachedError

    monkeypatch.setattr(runner, "Runner", take)
    needed = ["-S", "s", "--publication", "p", "--staging", str(tmp_path / "staging"), "--warehouse", str(tmp_path / "warehouse")]
    with pytest.raises(ReachedError):
        run_command.command.main([*needed, *arguments], standalone_mode=False)
    return made[0]


def launcher(tmp_path: Path, **options: Any) -> LauncherConfig:
    return LauncherConfig("s", tmp_path / "staging", ("p",), **options)


def test_the_command_has_the_defaults_of_the_api(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert config_of(monkeypatch, tmp_path) == RunConfig(launcher(tmp_path), tmp_path / "warehouse")


def test_the_api_has_what_the_command_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain, full = config_of(monkeypatch, tmp_path), config_of(monkeypatch, tmp_path, *OPTIONS.split())
    same = {field.name for field in fields(RunConfig) if getattr(plain, field.name) == getattr(full, field.name)}
    assert same == {"launcher", "warehouse", "keep_changelog_s", "history", "keys"}
    assert config_of(monkeypatch, tmp_path, "--keep-changelog", "30d").keep_changelog_s == 30 * 86400
    assert config_of(monkeypatch, tmp_path, "--history", "table").history == "table"
    of_land, of_run = (
        {name for option in command.params for name in option.opts if name.startswith("--")}
        for command in (land.command, run_command.command)
    )
    assert of_run - of_land == {*re.findall(r"--[a-z-]+", OPTIONS), "--keep-changelog", "--history", "--warehouse"}


def test_no_field_is_called_like_an_option_of_the_launcher() -> None:
    """The command gives an option that is called like a field to RunConfig, and the others to the launcher."""
    assert not {field.name for field in fields(RunConfig)} & {option.name for option in land.command.params}


def test_snapshot_never_turns_healing_off(tmp_path: Path) -> None:
    def hours(**options: Any) -> Hours | None:
        return RunConfig(launcher(tmp_path), tmp_path / "warehouse", **options).heal_hours

    assert hours() == hours(snapshot="initial") == hours(snapshot="never", heal="now") == Hours()
    assert hours(snapshot="never") is hours(heal="off") is None
    assert hours(snapshot="never", heal="22:00-06:00") == Hours(22 * 60, 6 * 60)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "iceberg"}, "unknown table format 'iceberg'"),
        ({"types": "spark"}, "types is 'spark'"),
        ({"masks": {"a.b": "null"}}, "--mask takes SCHEMA.TABLE.COLUMN, not 'a.b'"),
        ({"snapshot": "always"}, "snapshot is 'always'"),
        ({"heal": "tonight"}, "neither now nor off"),
        ({"dropped_columns": "hide"}, "dropped_columns is 'hide'"),
        ({"heal_tables": 0}, "heal_tables is 0; it is at least 1"),
        ({"catalog_database": "a.b.c"}, "not 'a.b.c'"),
        ({"json_variants": True}, "views in the catalog"),
        ({"format": "parquet", "keep_changelog_s": 86400.0}, "is for Delta tables"),
        ({"readers": "any", "dropped_columns": "drop"}, "column mapping, which not every reader knows"),
        ({"history": "always"}, "history is 'always'"),
        ({"history": "view"}, "--history view makes views in the catalog"),
        ({"format": "parquet", "history": "table"}, "no history table in this format"),
        ({"format": "parquet", "warehouse": "s3a://bucket/lake"}, "can't be in an object store"),
    ],
)
def test_options_that_exclude_each_other_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentsError, match=message):
        RunConfig(**{"launcher": launcher(tmp_path), "warehouse": tmp_path / "warehouse"} | options)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, []),
        ({"widen": "yes", "cluster_replicas": True, "history": "table", "keep_history_s": 86400, "history_interval_s": 5}, []),
        ({"format": "parquet", "widen": "yes"}, ["--widen"]),
        ({"format": "parquet", "cluster_replicas": True, "keep_history_s": 86400}, ["--cluster-replicas", "--keep-history"]),
        ({"cluster_replicas": True, "optimize_interval_s": None}, ["--cluster-replicas"]),
        ({"snapshot": "never", "heal_tables": 4}, ["--heal-tables"]),
        ({"history_interval_s": 5}, ["--history-interval"]),
        ({"history": "table", "history_interval_s": 0, "keep_changelog_s": 86400}, ["--keep-changelog"]),
        ({"history": "table", "history_interval_s": 0}, []),
    ],
)
def test_options_without_effect_are_named(tmp_path: Path, options: dict[str, Any], names: list[str]) -> None:
    found = RunConfig(launcher(tmp_path), tmp_path / "warehouse", **options).without_effect()
    assert [text.partition(" ")[0] for text in found] == names


def test_a_pipeline_of_its_own_has_the_defaults_of_run() -> None:
    """It had no limit for a micro-batch: a long backlog became one."""
    run = {each.name: each.default for each in fields(RunConfig) if each.default is not MISSING}
    own = {name: each.default for name, each in inspect.signature(Pipeline).parameters.items() if name in run}
    assert "max_bytes_per_trigger" in own
    assert own == {name: run[name] for name in own}


@pytest.mark.parametrize(
    ("field", "option", "value", "text"),
    [
        ("keep_changelog_s", "--keep-changelog", 30, "30s"),
        ("keep_history_s", "--keep-history", 0, "0s"),
        ("vacuum_retention_s", "--vacuum-retention", 3599, "3599s"),
        ("log_retention_s", "--log-retention", 0, "0s"),
        ("optimize_interval_s", "--optimize-interval", 59, "59s"),
        ("snapshot_hold_s", "--snapshot-hold", 59, "59s"),
        ("snapshot_chunk_bytes", "--snapshot-chunk-size", 0, "0"),
        ("heal_tables", "--heal-tables", 0, "0"),
        ("replica_interval_s", "--replica-interval", -1, "-1"),
        ("replica_interval_s", "--replica-interval", math.nan, "nan"),
    ],
)
def test_the_api_refuses_the_numbers_that_the_command_refuses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, field: str, option: str, value: float, text: str
) -> None:
    """An age of 0 would purge all changes."""
    with pytest.raises(InvalidArgumentsError, match=f"{field} is {value}; it is at least"):
        RunConfig(launcher(tmp_path), tmp_path / "warehouse", **{field: value})
    with pytest.raises(click.UsageError):
        config_of(monkeypatch, tmp_path, option, text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_gap": "Stop"}, "on_gap is 'Stop'"),
        ({"on_gap": None}, "on_gap is None"),
        ({"failover": "no"}, "failover is 'no'"),
        ({"publications": "shop"}, "publications is a text"),
        ({"connection": "-d shop"}, "connection is a text"),
        ({"reconnect_s": -1}, "reconnect_s is -1"),
        ({"seal": SealPolicy(segment_bytes=0)}, "are not all more than 0"),
    ],
)
def test_what_a_launcher_can_not_mean_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentsError, match=message):
        LauncherConfig(**{"slot": "s", "staging": tmp_path / "staging", "publications": ("p",)} | options)


def test_directories_can_be_texts(tmp_path: Path) -> None:
    """A text as the staging directory was taken, and ended the start of a run with an AttributeError."""
    directories: Any = {"staging": str(tmp_path / "staging"), "spill": str(tmp_path)}
    assert LauncherConfig("s", publications=("p",), **directories) == launcher(tmp_path, spill=tmp_path)
    with pytest.raises(InvalidArgumentsError, match="the spill directory is empty"):
        LauncherConfig("s", tmp_path / "staging", spill=cast("Any", ""))


@pytest.mark.parametrize("method", ["wait", "stop"])
def test_an_interrupt_while_the_end_of_a_run_is_waited_for_cancels_no_job(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, method: str
) -> None:
    """A second ^C in a script came in `stop`, and its run ended with an error of the jobs that pyspark's handler had cancelled."""
    cancelled: list[int] = []

    def cancel(number: int, _frame: Any) -> None:
        cancelled.append(number)

    cancel.__module__ = "pyspark.core.context"
    monkeypatch.setattr(Background, method, lambda *_: signal.raise_signal(signal.SIGINT))
    made = Runner(RunConfig(launcher(tmp_path), tmp_path / "warehouse"))
    before = signal.signal(signal.SIGINT, cancel)
    try:
        with pytest.raises(KeyboardInterrupt):
            getattr(made, method)()
    finally:
        signal.signal(signal.SIGINT, before)
    assert not cancelled


def test_a_stop_before_there_is_anything_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(java_home, "find_java", lambda: None)
    made = Runner(RunConfig(launcher(tmp_path, available_now=True), tmp_path / "warehouse"))
    made.request_stop()
    with made:
        assert made.wait()
    assert not made.is_complete
    assert made.progress.tables is None
    assert not (tmp_path / "staging").exists()


def test_certain_failures_show_at_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    made = Runner(RunConfig(launcher(tmp_path), tmp_path / "file/warehouse"))
    with pytest.raises(InvalidArgumentsError, match="the warehouse can't be there"):
        made.start()
    made.stop()


def test_a_file_system_without_locks_is_refused_before_there_is_a_slot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(java_home, "find_java", lambda: None)
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    made = Runner(RunConfig(launcher(tmp_path, command=("/nonesuch/cdcpipe",)), tmp_path / "warehouse"))
    with pytest.raises(InitError, match=r"flock does not work in .*: two processes could write at one time"):
        made.start()
    made.stop()
    assert list(tmp_path.iterdir()) == []


def test_another_spark_is_refused_before_there_is_a_slot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(java_home, "find_java", lambda: None)
    monkeypatch.delenv(GATEWAY, raising=False)
    monkeypatch.setenv("SPARK_HOME", str(tmp_path / "spark"))
    monkeypatch.setattr("spark_sink.spark.given.existing", lambda: None)  # other tests of this process may have one
    made = Runner(RunConfig(launcher(tmp_path, command=("/nonesuch/cdcpipe",)), tmp_path / "warehouse"))
    with pytest.raises(InitError, match=r"SPARK_HOME is .*spark, which has no Spark") as caught:
        made.start()
    assert caught.value.hint == HOME_HINT
    (tmp_path / "spark/bin").mkdir(parents=True)
    (tmp_path / "spark/bin/spark-submit").touch()
    check_named()  # without jars: somebody has built it, and the jars are elsewhere
    (tmp_path / "spark/jars").mkdir()
    core = tmp_path / "spark/jars/spark-core_2.12-3.5.1.jar"
    core.touch()
    with pytest.raises(InitError, match=r"which has another Spark \(spark-core_2.12-3.5.1.jar\)"):
        made.start()
    core.rename(core.with_name("spark-core_2.13-4.2.0.jar"))
    check_named()
    made.stop()
    assert not (tmp_path / "staging").exists()


def test_an_error_is_raised_where_one_waits_and_is_noted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(java_home, "find_java", lambda: None)
    config = launcher(tmp_path, command=("/nonesuch/cdcpipe",))
    (tmp_path / "staging").mkdir(mode=0o700)
    with pytest.raises(FileNotFoundError), Runner(RunConfig(config, tmp_path / "warehouse")) as made:
        made.wait()
    noted = last_error.read(tmp_path / "staging")
    assert noted is not None
    assert (noted["command"], noted["message"]) == ("run", "unexpected FileNotFoundError")


def test_an_error_of_the_start_is_noted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`status` knew nothing of a service whose every start failed."""
    monkeypatch.delenv("CDCPIPE_MASK_KEY", raising=False)
    (tmp_path / "staging").mkdir(mode=0o700)
    config = RunConfig(launcher(tmp_path), tmp_path / "warehouse", masks=parse_masks(("a.b.c=hash",)))
    with pytest.raises(CdcpipeError, match="CDCPIPE_MASK_KEY") as raised:
        Runner(config).start()
    noted = last_error.read(tmp_path / "staging")
    assert noted is not None
    assert (noted["command"], noted["message"], noted["exit_code"]) == ("run", raised.value.message, int(raised.value.exit_code))


def test_a_start_that_another_launcher_refuses_writes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its note of an initial snapshot kept the run that worked there from copying any table, until a restart."""
    monkeypatch.setattr(java_home, "find_java", lambda: None)
    config = launcher(tmp_path, command=("/nonesuch/cdcpipe",), create_slot=True)
    with closing(StagingLock(tmp_path / "staging")):
        with (
            pytest.raises(StagingError, match="another run or land uses"),
            Runner(RunConfig(config, tmp_path / "warehouse", snapshot="initial")) as made,
        ):
            made.wait()
        assert list((tmp_path / "staging").rglob("snapshot_export")) == []
    assert last_error.read(tmp_path / "staging") is None  # it would look like one of the run that works there, here in this process
    assert not (tmp_path / "warehouse").exists()


def test_a_run_holds_the_lock_while_the_server_exports_the_snapshot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The server may wait for running transactions. A second start recorded its refusal as the last error of this run."""
    owners = []

    def fail(*_: object) -> None:
        owners.append(lock_owner(tmp_path / "staging"))
        raise InitError("no snapshot")

    monkeypatch.setattr(java_home, "find_java", lambda: None)
    monkeypatch.setattr(InitialSnapshot, "prepare", fail)
    with pytest.raises(InitError, match="no snapshot"), Runner(RunConfig(launcher(tmp_path), tmp_path / "warehouse")) as made:
        made.wait()
    assert [owner is not None and owner["pid"] for owner in owners] == [os.getpid()]
    assert lock_owner(tmp_path / "staging") is None


def test_a_run_works_in_a_session_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """While a table was healed, Delta took the program's own writes in its session for ours, and skipped the second one."""
    monkeypatch.setattr(session, "own", lambda spark: ("a copy of", spark))
    programs: Any = given_session()  # without stop()
    with Runner(RunConfig(launcher(tmp_path), tmp_path / "warehouse"), programs)._session() as spark:
        assert spark == ("a copy of", programs)


@pytest.mark.parametrize("is_made_here", [True, False])
def test_a_run_stops_the_session_that_it_has_made_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, is_made_here: bool
) -> None:
    stopped: list[str] = []
    found = given_session()
    found.stop = lambda: stopped.append("stopped")

    def build(*, on_made: Any, **_: object) -> Any:
        if is_made_here:
            on_made(found)
        return found

    monkeypatch.setattr(session, "own", lambda spark: spark)
    monkeypatch.setattr(session, "build", build)
    with Runner(RunConfig(launcher(tmp_path), tmp_path / "warehouse"))._session() as spark:
        assert spark is found
        assert not stopped
    assert len(stopped) == is_made_here


def test_the_last_run_that_leaves_a_session_stops_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The run that had made it stopped it at its end, and the other one died."""
    stopped: list[str] = []
    made = given_session()
    made.stop = lambda: stopped.append("stopped")
    there: list[Any] = []

    def build(*, on_made: Any, **_: object) -> Any:
        if not there:
            there.append(made)
            on_made(made)
        return made

    monkeypatch.setattr(session, "own", lambda spark: spark)
    monkeypatch.setattr(session, "build", build)
    monkeypatch.setattr("spark_sink.spark.given.existing", lambda: made)
    monkeypatch.setattr(java_home, "find_java", lambda: None)
    config = RunConfig(launcher(tmp_path), tmp_path / "warehouse")
    first, second, third = Runner(config)._session(), Runner(config)._session(), Runner(config, cast("Any", made))._session()
    with ExitStack() as later:
        with first:
            later.enter_context(second)
            later.enter_context(third)  # a cell has got it by build_session()
            assert given.take(None, "parquet", {}) is None  # it may be gone when the run comes to it
            assert given.take(cast("Any", made), "parquet", {}) is None
        assert not stopped
    assert stopped == ["stopped"]


def test_a_session_that_was_stopped_since_the_start_of_the_run_is_refused(tmp_path: Path) -> None:
    """Spark said "Cannot call methods on a stopped SparkContext"."""
    programs: Any = given_session()
    made = Runner(RunConfig(launcher(tmp_path), tmp_path / "warehouse"), programs)
    programs.sparkContext._jsc = None
    with pytest.raises(InitError, match="this Spark session was stopped"), made._session():
        pass


def test_a_run_that_is_to_stop_does_not_start_spark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each run of a process that could not reach Maven Central tried it in turn, after the signal that ended them all."""
    monkeypatch.setattr(session, "build", pytest.fail)
    made = Runner(RunConfig(launcher(tmp_path), tmp_path / "warehouse"))
    made.request_stop()
    with pytest.raises(runner._StoppedError), made._session():
        pass


def noted(tmp_path: Path) -> Runner:
    """Return a runner after a run that has left its error."""
    (tmp_path / "staging").mkdir(mode=0o700)
    last_error.note(tmp_path / "staging", "run", StagingError("the disk was full"))
    return Runner(RunConfig(launcher(tmp_path), tmp_path / "warehouse"))


def test_a_run_that_is_stopped_before_spark_has_started_removes_the_last_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each end with exit code 0 does. `status --check` was CRITICAL for an error of long ago after a planned stop."""
    monkeypatch.setattr(java_home, "find_java", lambda: None)
    made = noted(tmp_path)
    made.request_stop()
    with made:
        assert made.wait()
    assert last_error.read(tmp_path / "staging") is None


@pytest.mark.parametrize("is_killed", [True, False])
@pytest.mark.parametrize("is_stopping", [True, False])
def test_a_stop_that_ends_spark_while_it_starts_is_no_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, is_stopping: bool, is_killed: bool
) -> None:
    """systemd sends SIGTERM to all processes. The run said that Spark did not start, perhaps for lack of memory."""
    made = Runner(RunConfig(launcher(tmp_path), tmp_path / "warehouse"))

    def build(**_: object) -> Any:
        if is_stopping:
            made.request_stop()
        raise InitError("Spark did not start: its JVM has ended, and gave no reason")

    monkeypatch.setattr(session, "build", build)
    monkeypatch.setattr(jvm, "may_have_been_asked", lambda: not is_killed)
    with pytest.raises(runner._StoppedError if is_stopping and not is_killed else InitError), made._session():
        pass


@pytest.mark.parametrize("ended", ["the server's answer", "Spark"])
def test_a_stop_that_ends_spark_or_a_question_removes_the_last_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ended: str
) -> None:
    made = noted(tmp_path)
    made._stopping.set()
    monkeypatch.setattr(made, "_spark", object())
    monkeypatch.setattr(jvm, "has_ended", lambda _: ended == "Spark")
    monkeypatch.setattr(made._published, "is_interrupted", ended != "Spark")
    made._take_error(RuntimeError("a result of the stop"))
    assert last_error.read(tmp_path / "staging") is None
    assert made.error is None


def test_an_error_that_nobody_waits_for_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A run in the background of a notebook ended without a word."""
    made = Runner(RunConfig(launcher(tmp_path), tmp_path / "warehouse"))
    made._take_error(StagingError("the disk is full", hint="make room"))
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == [
        "the run has ended: the disk is full (hint: make room)"
    ]
    assert not made.launcher.logs_error  # its error is the run's


@pytest.mark.parametrize("by_command", [True, False])
def test_who_raises_the_error_of_a_run_does_not_log_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: Any, *, by_command: bool
) -> None:
    def fail(*_: object) -> None:
        raise StagingError("the disk is full")

    monkeypatch.setattr(Runner, "_bring", fail)
    monkeypatch.setattr(Runner, "start", Background.start)

    def run() -> None:
        if by_command:
            places = [text for name in ("staging", "warehouse") for text in (f"--{name}", str(tmp_path / name))]
            run_command.command.main(["-S", "s", "--publication", "p", *places], standalone_mode=False)
        else:
            runner.run(RunConfig(launcher(tmp_path), tmp_path / "warehouse"))

    with pytest.raises(StagingError, match="the disk is full"):
        run()
    assert "the disk is full" not in caplog.text + capsys.readouterr().err


def test_land_does_not_log_the_error_that_it_ends_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: Any
) -> None:
    is_waited_for = threading.Event()

    def fail(launcher: Launcher) -> None:
        launcher._ready.set()
        is_waited_for.wait()
        raise StagingError("the disk is full")

    def wait(launcher: Launcher, timeout_s: float | None = None) -> bool:
        is_waited_for.set()
        return Background.wait(launcher, timeout_s)

    monkeypatch.setattr(Launcher, "_land", fail)
    monkeypatch.setattr(Launcher, "wait", wait)
    with pytest.raises(StagingError, match="the disk is full"):
        land.command.main(["-S", "s", "--publication", "p", "--staging", str(tmp_path / "staging")], standalone_mode=False)
    assert "the disk is full" not in caplog.text + capsys.readouterr().err


def test_a_stop_while_another_process_has_the_tables_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = noted(tmp_path)
    made._take_error(InterruptedError())
    assert isinstance(made.error, InterruptedError)  # nobody has asked for a stop
    made = Runner(made.config)
    made.request_stop()
    made._spark = cast("Any", object())
    monkeypatch.setattr(jvm, "has_ended", pytest.fail)  # it would wait ten seconds for that
    made._take_error(InterruptedError())
    assert (made.error, last_error.read(tmp_path / "staging")) == (None, None)


def test_a_lack_of_memory_during_a_stop_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """systemd stops a service when the kernel kills one of its processes. It looked like a stop in order, each time."""
    made = noted(tmp_path)
    made._stopping.set()
    monkeypatch.setattr(made, "_spark", object())
    with subprocess.Popen(["sleep", "600"]) as process:
        monkeypatch.setattr("pyspark.SparkContext._gateway", SimpleNamespace(proc=process))
        process.kill()
        made._take_error(RuntimeError("a result of the kill"))
    found = last_error.read(tmp_path / "staging")
    assert found is not None
    assert found["message"] == "Spark's JVM has ended while it was needed"


class Ended:
    """A launcher that has ended with an error."""

    def __init__(self, error: Exception) -> None:
        self.error, self.has_ended, self.progress = error, True, Progress()

    def wait(self) -> bool:
        raise self.error


HEALER: Any = SimpleNamespace(check=lambda: None, count_tables=lambda _: None)


class Slow:
    """A pipeline that gets one segment further each time that somebody waits for it."""

    def __init__(self, ends: list[Position]) -> None:
        self._ends, self.waits = ends, 0

    @property
    def progress(self) -> PipelineProgress:
        return PipelineProgress(self._ends[min(self.waits, len(self._ends) - 1)])

    def wait(self, _timeout_s: float) -> bool:
        self.waits += 1
        return False


@pytest.mark.parametrize(
    ("error", "is_waiting"),
    [
        (StagingError(f"cannot write x: {os.strerror(errno.ENOSPC)}"), True),
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), True),
        (StagingError("x is damaged"), False),
        (InitError("the server refuses"), False),
    ],
)
def test_a_full_disk_lets_the_tables_take_the_log_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, error: Exception, is_waiting: bool
) -> None:
    make_epoch(tmp_path / "staging", 1, 0x100, (0x100, 0x200), (0x200, 0x300), (0x300, 0x400))
    made = Runner(RunConfig(launcher(tmp_path), tmp_path / "warehouse"))
    pipeline = Slow([Position(1, lsn) for lsn in (0x100, 0x200, 0x300, 0x400)])
    monkeypatch.setattr(made, "launcher", Ended(error))
    with pytest.raises(type(error), match=re.escape(str(error))):
        made._follow(None, pipeline, HEALER)
    assert pipeline.waits == (3 if is_waiting else 1)
    assert len(caplog.records) == is_waiting


def test_a_pipeline_that_something_else_has_stopped_ends_the_run_with_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The run ended as if the tables had everything."""
    made = Runner(RunConfig(launcher(tmp_path, available_now=True), tmp_path / "warehouse"))
    monkeypatch.setattr(made, "launcher", SimpleNamespace(has_ended=False, progress=Progress()))
    pipeline: Any = SimpleNamespace(progress=PipelineProgress(), wait=lambda _: True)
    with pytest.raises(PipelineError, match="the pipeline was stopped, but not by its Runner"):
        made._follow(None, pipeline, HEALER)


def test_a_column_that_is_to_stay_on_the_server_ends_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = Runner(RunConfig(launcher(tmp_path), tmp_path / "warehouse"))
    monkeypatch.setattr(made, "launcher", SimpleNamespace(has_ended=False, progress=Progress()))
    pipeline: Any = SimpleNamespace(progress=PipelineProgress(), wait=lambda _: False)

    def refuse() -> None:
        raise ExcludedColumnError("--exclude-column does not hold")

    with pytest.raises(ExcludedColumnError):
        made._follow(None, pipeline, SimpleNamespace(check=refuse))


def test_the_progress_says_how_far_the_copies_after_a_gap_are(tmp_path: Path) -> None:
    class Copy:
        progress = SnapshotProgress(tables=2, chunks=12, chunks_done=3)

    runner_ = Runner(RunConfig(launcher(tmp_path), str(tmp_path / "warehouse")))
    runner_._gap_copy = cast("Snapshot", Copy())
    assert runner_.progress.step == "copying the tables after a gap: 3 of 12 chunks"
    Copy.progress = SnapshotProgress()  # the server still exports the snapshot
    assert runner_.progress.step == "copying the tables after a gap"


def test_the_pipeline_learns_of_the_copies_after_a_gap_which_wait_with_the_launcher(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A copied replica needs its comments and its name in the catalog, also if no change comes for it."""
    table, told = Table("public", "t"), []
    copy = SimpleNamespace(copied={table: (4, Position(1, 0x100))}, wait=lambda _: True)
    for name in ("prepare", "start", "stop"):
        setattr(copy, name, lambda *_: None)
    copy.record_if_healed = lambda _: False
    waits: list[bool] = []

    def make(*_: Any, is_ahead: Callable[[], bool]) -> SimpleNamespace:
        waits.append(is_ahead())
        return copy

    monkeypatch.setattr(runner, "GapSnapshot", make)
    made = Runner(RunConfig(launcher(tmp_path), tmp_path / "warehouse"))
    log = SimpleNamespace(progress=Progress(is_ahead=True), prepared=SimpleNamespace(tables=()))
    monkeypatch.setattr(made, "launcher", log)
    pipeline: Any = SimpleNamespace(pass_gap=lambda: None, take_copied=told.extend)
    made._pass_gap(pipeline, pipeline, cast("Any", SimpleNamespace(paused=nullcontext)))
    assert (told, waits) == ([table], [True])


@pytest.mark.parametrize(
    ("ending", "is_open"), [("copied", False), ("stopped", True), ("interrupted", True), ("was healed", False)]
)
def test_a_gap_is_open_until_all_tables_are_copied(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ending: str, *, is_open: bool
) -> None:
    """`cdcpipe_gap_open` keeps the alert until then."""
    made = Runner(RunConfig(launcher(tmp_path), tmp_path / "warehouse"))
    seen: list[bool | None] = [made.has_open_gap]

    def prepare(_: Any) -> None:
        seen.append(made.has_open_gap)
        if ending == "interrupted":
            raise InterruptedError

    def wait(_: float) -> bool:
        if ending == "stopped":
            made._stopping.set()
        return ending == "copied"

    copy = SimpleNamespace(prepare=prepare, start=lambda *_: None, wait=wait, stop=lambda: None, copied={})
    copy.record_if_healed = lambda _: ending == "was healed"
    monkeypatch.setattr(runner, "GapSnapshot", lambda *_, **__: copy)
    log = SimpleNamespace(progress=Progress(), prepared=SimpleNamespace(tables=()), has_ended=False)
    monkeypatch.setattr(made, "launcher", log)
    pipeline: Any = SimpleNamespace(pass_gap=lambda: None, take_copied=lambda _: None)
    made._pass_gap(pipeline, pipeline, cast("Any", SimpleNamespace(paused=nullcontext)))
    assert seen == ([None] if ending == "was healed" else [None, True])
    assert made.has_open_gap == is_open


def test_the_snapshot_of_a_copy_that_cannot_be_started_is_released(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The process that holds it at the server stayed as long as this one, a notebook for instance."""
    stopped: list[str] = []

    def start(*_: Any) -> None:
        raise InterruptedError

    snapshot: Any = SimpleNamespace(start=start, stop=lambda: stopped.append("snapshot"))
    with pytest.raises(InterruptedError):
        Runner(RunConfig(launcher(tmp_path), tmp_path / "warehouse"))._copy(snapshot, snapshot)
    assert stopped == ["snapshot"]


def test_tables_that_begin_once_the_launcher_has_found_the_slot_are_registered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """While they were copied, another reader of the log could have segments removed that they needed."""
    events: list[str] = []
    made = Runner(RunConfig(launcher(tmp_path), tmp_path / "warehouse"))
    snapshot = SimpleNamespace(is_left=True, prepare=lambda _: events.append("prepare"), stop=lambda: None)

    class Started(SimpleNamespace):
        def __enter__(self) -> None:
            events.append("start")
            self.register()

        def __exit__(self, *_: object) -> None:
            pass

    def end(_: object) -> None:
        raise ReachedError

    monkeypatch.setattr(runner, "register_tables", lambda *_: events.append("register"))
    monkeypatch.setattr(made, "launcher", Started(progress=Progress(), prepared=object()))
    monkeypatch.setattr(made, "monitor", nullcontext())
    monkeypatch.setattr(made, "_snapshot", snapshot)
    monkeypatch.setattr(made, "_name_keyless", end)
    with ExitStack() as stack, pytest.raises(ReachedError):
        made._bring(stack)
    assert events == ["prepare", "start", "register", "prepare", "register"]


def test_a_gap_is_judged_by_the_tables_that_are_published_behind_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The run had begun before the schema was made. Without a table to look at, the gap counted as healed, and none was copied."""
    fake = make_fake(tmp_path, monkeypatch, turns=[{}, {"exit": 3}])
    published = {"relation_id": 16384, "schema": "public", "name": "t", "columns": [{"name": "id"}]}
    fake.set_looks([{"confirmed": "0/9000", "wal_lsn": "0/9000", "tables": [published]}])
    made = Runner(RunConfig(fake.config(available_now=False, on_gap="resnapshot"), tmp_path / "warehouse"))

    def stop(*_: Any) -> None:
        raise InterruptedError

    monkeypatch.setattr(GapSnapshot, "prepare", stop)
    house = made._warehouse
    pipeline: Any = SimpleNamespace(pass_gap=lambda: gaps.record(house, list_epochs(fake.staging)))
    with made.launcher as launcher:
        house.open(list_epochs(fake.staging)[0])
        until(lambda: launcher.progress.gaps == 1)
        made._pass_gap(pipeline, pipeline, cast("Any", SimpleNamespace(paused=nullcontext)))
    assert made.has_open_gap
    assert gaps.open_gap(house) is not None


@pytest.mark.parametrize("moment", ["the server's WAL is waited for", "tables are copied"])
@pytest.mark.parametrize("ended", ["the pipeline", "the launcher"])
def test_the_run_looks_at_all_it_has_started_while_a_gap_is_healed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, moment: str, ended: str
) -> None:
    """A query that had failed stayed dead, without a word, until all tables were copied."""
    looks, stopped = [], []

    def fails(_: float | None = None) -> bool:
        looks.append(ended)
        if len(looks) < 3:  # the pipeline has started its query again
            return False
        raise CdcpipeError(f"{ended} has failed")

    def prepare(is_stopping: Callable[[], bool]) -> None:
        if moment != "tables are copied":
            assert not any(is_stopping() for _ in range(10))

    waits = iter([False] * 10 + [True])
    copy: Any = SimpleNamespace(prepare=prepare, start=lambda *_: None, wait=lambda _: next(waits), copied={})
    copy.stop, copy.record_if_healed = lambda: stopped.append(True), lambda _: False
    monkeypatch.setattr(runner, "GapSnapshot", lambda *_, **__: copy)
    made = Runner(RunConfig(launcher(tmp_path), tmp_path / "warehouse"))
    log: Any = SimpleNamespace(
        progress=Progress(), prepared=SimpleNamespace(tables=()), has_ended=ended == "the launcher", wait=fails
    )
    monkeypatch.setattr(made, "launcher", log)
    pipeline: Any = SimpleNamespace(pass_gap=lambda: None, take_copied=lambda _: None)
    pipeline.wait = (lambda _: False) if log.has_ended else fails
    made.pipeline = pipeline
    with pytest.raises(CdcpipeError, match=f"{ended} has failed"):
        made._pass_gap(pipeline, pipeline, cast("Any", SimpleNamespace(paused=nullcontext)))
    assert bool(stopped) == (moment == "tables are copied")
    assert made.has_open_gap

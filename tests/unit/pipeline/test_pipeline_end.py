"""How a pipeline ends, without Spark: a fake stands for its query, and ends as the test says."""

import errno
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cdcpipe.errors import CdcpipeError
from cdcpipe.threads import Worker
from spark_sink.files.lock import try_lock
from spark_sink.pipeline import fit, query_end
from spark_sink.pipeline.beginning import finish_left
from spark_sink.pipeline.failures import PipelineError, StoppedError
from spark_sink.pipeline.pipeline import Pipeline
from spark_sink.pipeline.rounds import Rounds
from spark_sink.pipeline.source_ends import SourceEnds
from spark_sink.replica import merge
from spark_sink.schema.table import Table
from spark_sink.source import datasource
from spark_sink.spark import session
from spark_sink.staging.gap import Gap
from spark_sink.staging.lock import make_root
from spark_sink.staging.log import Position, list_epochs
from spark_sink.warehouse import gaps, landed_snapshots
from spark_sink.warehouse.errors import WarehouseError
from spark_sink.warehouse.lock import TableLock, lock_file
from support.delta_log import commit
from support.descriptions import ID, version
from support.given_sessions import given_session
from support.locks import held_elsewhere
from support.spark_errors import Py4JError
from support.staged import make_epoch
from support.waiting import DEADLINE_S

LATE = "… terminated with exception: Python worker failed to connect back. …"


class SparkError(Py4JError):
    """An error of Spark, with Java's stack trace, which is not in its text."""

    __module__ = "pyspark.errors.exceptions.captured"

    def __init__(self, cause: str) -> None:
        super().__init__("[STREAM_FAILED] Query [id = 1] terminated with exception:  SQLSTATE: XXKST")
        self._stackTrace = f"org.apache.spark.sql.streaming.StreamingQueryException: …\n\tat X.run(X.scala:236)\n{cause}"


RUNNER = "\tat org.apache.spark.sql.execution.python.streaming.PythonStreamingSourceRunner.latestOffset(P.scala:206)\n"
KILLED = "Caused by: java.io.EOFException\n\tat java.base/java.io.DataInputStream.readInt(D.java:386)\n" + RUNNER
CUT_OFF = "Caused by: java.net.SocketException: Broken pipe\n\tat java.base/sun.nio.ch.Net.write(N.java:1)\n" + RUNNER
RAISED = (
    "Caused by: org.apache.spark.SparkException: [PYTHON_STREAMING_DATA_SOURCE_RUNTIME_ERROR] …\n\tat X.of(X.scala:1)\n" + RUNNER
)
ELSEWHERE = "Caused by: java.io.EOFException\n\tat org.apache.parquet.Reader.read(R.java:1)\n"


class Clock:
    """The pipeline's clock."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


LONG_S = 100.0
"""For how long a query is waited for at a time, if there is no deadline."""


class Query:
    """A query, and the stream that starts it. It ends with each of ``ends`` in turn, each time after 10 s."""

    def __init__(self, clock: Clock, *ends: BaseException | None) -> None:
        self._clock = clock
        self._ends = list(ends)
        self.timeouts: list[float | None] = []
        self.starts = 0
        self.isActive = False

    def trigger(self, **_: Any) -> "Query":
        return self

    def start(self) -> "Query":
        self.starts += 1
        return self

    def awaitTermination(self, timeout: float | None = None) -> bool:  # noqa: N802 - Spark's name
        self.timeouts.append(timeout)
        if not self._ends:
            return timeout == LONG_S  # who waits without a deadline has stopped it
        self._clock.now += 10
        end = self._ends.pop(0)
        if end is not None:
            raise end
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "monotonic", made.monotonic)
    return made


def pipeline(query: Query, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pipeline:
    for module, name in ((session, "check"), (session, "check_reach"), (datasource, "register"), (fit, "check_log")):
        monkeypatch.setattr(module, name, lambda *_: None)
    monkeypatch.setattr(session, "own", lambda spark: spark)
    monkeypatch.setattr(session, "is_stopped", lambda _: False)
    monkeypatch.setattr(query_end, "_LOOK_S", LONG_S)
    monkeypatch.setattr(Pipeline, "_stream", lambda _self: query)
    conf, streams = SimpleNamespace(get=lambda _: "10ms", set=lambda *_: None), SimpleNamespace(active=[])
    spark: Any = SimpleNamespace(conf=conf, streams=streams)
    return Pipeline(spark, tmp_path / "staging", tmp_path / "warehouse")


def pipeline_at(lsn: int, clock: Clock, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Pipeline:
    """Return a pipeline whose tables are at ``lsn``. Its log has one epoch with a segment, from 0x100 to 0x200."""
    make_epoch(directory / "staging", 1, 0x100, (0x100, 0x200))
    made = pipeline(Query(clock), directory, monkeypatch)
    made.warehouse.open(list_epochs(directory / "staging")[0])
    made._progress = replace(made._progress, position=Position(1, lsn))
    return made


def test_a_forked_child_that_ends_does_not_stop_its_parents_pipeline(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would stop the query, by the connection of its parent to the JVM."""
    query = Query(clock)
    made = pipeline(query, tmp_path, monkeypatch)
    parent = os.getpid()
    with monkeypatch.context() as patch, made:
        patch.setattr(os, "getpid", lambda: parent + 1)
    assert (query.starts, query.timeouts, made._stopping.is_set()) == (1, [], False)
    made.stop()
    assert made._stopping.is_set()


def test_what_an_epoch_says_is_recorded_before_the_log_may_remove_it(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server was upgraded, and then lost changes, while a run streamed from it."""
    made = pipeline_at(0x200, clock, tmp_path, monkeypatch)
    made.warehouse.record(Position(1, 0x200))
    gap = Gap(0x300, "somebody moved the slot", since=1.0, found=2.0)
    make_epoch(tmp_path / "staging", 2, 0x200, (0x200, 0x300), system_id="8", former_system_id="7")
    make_epoch(tmp_path / "staging", 3, 0x400, (0x400, 0x500), system_id="8", gap=gap.to_json())
    batch = SimpleNamespace(append=lambda: None, contents={}, renamed=())
    monkeypatch.setattr("spark_sink.pipeline.pipeline.MicroBatch", lambda *_, **__: batch)
    made._process(Position(1, 0x200), Position(3, 0x500))
    assert made.warehouse.source().system_id == "8"
    assert [(each.gap, each.start) for each in gaps.read(made.warehouse)] == [(gap, (3, 0x400))]


def test_a_gap_is_passed_with_what_its_epochs_say(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server was upgraded, and the slot was lost, before it sent a change."""
    staging, gap = tmp_path / "staging", Gap(0x300, "the slot was gone", since=1.0, found=2.0)
    made = pipeline_at(0x200, clock, tmp_path, monkeypatch)
    make_epoch(staging, 2, 0x200, system_id="8", former_system_id="7")
    make_epoch(staging, 3, 0x400, system_id="8", gap=gap.to_json())
    made.pass_gap()
    assert (made.progress.position, made.warehouse.source().system_id) == (Position(3, 0x400), "8")
    assert [each.gap for each in gaps.read(made.warehouse)] == [gap]


def test_oids_end_at_a_gap_before_the_tables_come_to_it(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gap's copies may be there before the changes from before it, which the log still has."""
    staging, gap = tmp_path / "staging", Gap(0x300, "the slot was gone", since=1.0, found=2.0)
    made = pipeline_at(0x100, clock, tmp_path, monkeypatch)
    made._tables.begin()
    make_epoch(staging, 2, 0x400, system_id="8", former_system_id="7", gap=gap.to_json())
    made.pass_gap()
    assert (made.progress.position, made.warehouse.source().system_id) == (Position(1, 0x100), "8")
    assert made._tables.names.servers.number((0x500, 0)) == 1
    assert made._tables.answers.at(0x400) is not made._tables.answers.at(0x401) is made._tables.answers


def test_a_source_that_starts_late_is_started_again(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine Spark gives up after ten seconds, before the query has done anything."""
    query = Query(clock, Exception(LATE), None, Exception("… terminated with exception: anything else"))
    made = pipeline(query, tmp_path, monkeypatch)
    made.process_available()
    assert query.timeouts == [LONG_S, LONG_S]
    with pytest.raises(CdcpipeError, match="anything else"):
        made.process_available()


def test_a_start_anew_does_not_put_off_the_end_of_a_wait(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    query = Query(clock, Exception(LATE), Exception(LATE))
    made = pipeline(query, tmp_path, monkeypatch).start()
    assert not made.wait(25)
    assert query.timeouts == [25, 15, 5]
    assert not made.wait(0)
    assert query.timeouts[-1] == pytest.approx(0.001)  # Spark takes no 0


def test_a_source_is_not_started_again_for_ever(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    query = Query(clock, *[Exception(LATE)] * 11)
    with pytest.raises(CdcpipeError, match="failed to connect back"):
        pipeline(query, tmp_path, monkeypatch).process_available()
    assert len(query.timeouts) == 11


def test_a_source_that_starts_late_is_not_started_again_after_a_stop(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would end that query: `wait` would wait for ever."""
    query = Query(clock, Exception(LATE))
    with pipeline(query, tmp_path, monkeypatch):
        pass
    assert query.starts == 1
    query = Query(clock, Exception(LATE), None)
    made = pipeline(query, tmp_path, monkeypatch).start()
    made.stop()
    assert made.wait()
    made.process_available()  # a stopped pipeline can be started again
    assert query.starts == 2


def test_a_stop_of_another_thread_is_not_forgotten_when_a_source_is_started_again(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pipeline went on to write the tables, which `stop` had given free."""
    query, stops = Query(clock, Exception(LATE), None), []
    made = pipeline(query, tmp_path, monkeypatch).start()

    def stop_meanwhile(**_: Any) -> None:
        if not stops:
            stops.append(threading.Thread(target=made.stop))
            stops[0].start()
            stops[0].join()

    monkeypatch.setattr(made, "_stop_following", stop_meanwhile)
    assert made.wait()
    assert (query.starts, len(stops)) == (1, 1)


def test_a_stop_of_another_thread_waits_for_what_is_being_started(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = Query(clock, Exception(LATE), None)
    made, events = pipeline(query, tmp_path, monkeypatch).start(), list[str]()
    stopping = threading.Thread(target=made.stop)

    def stream(_: Pipeline) -> Query:
        stopping.start()
        stopping.join(0.1)  # it has not to end here
        return query

    monkeypatch.setattr(Pipeline, "_stream", stream)
    monkeypatch.setattr(made._pace, "start", lambda *_: events.append("started") or query)
    monkeypatch.setattr(made, "_stop_query", lambda: events.append("stopped"))
    assert made.wait()
    stopping.join()
    assert events == ["started", "stopped"]


def batch_of(made: Pipeline) -> tuple[threading.Thread, list[StoppedError]]:
    """Return a thread that runs a micro-batch, and the list that gets the error if a stop ends it."""
    ends: list[StoppedError] = []

    def run() -> None:
        try:
            made._batch(cast("Any", None), 0)
        except StoppedError as ex:
            ends.append(ex)

    return threading.Thread(target=run, daemon=True), ends


@pytest.mark.parametrize("asked", ["the pipeline", "the run"])
def test_a_stop_ends_a_micro_batch_that_waits_for_another_process(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    """A purge may have the tables alone for long: systemd killed a run that waited for it."""
    made, looks = pipeline(Query(clock), tmp_path, monkeypatch).start(), threading.Semaphore(0)
    is_stopping = threading.Event()
    made.lock = TableLock(tmp_path / "warehouse", lambda: looks.release() or made._stopping.is_set() or is_stopping.is_set())
    monkeypatch.setattr("spark_sink.pipeline.pipeline.micro_batch", lambda *_: (None, Position(1, 0x200)))
    batch, ends = batch_of(made)
    with held_elsewhere(lock_file(tmp_path / "warehouse")):
        batch.start()
        looks.acquire()
        if asked == "the run":  # some time before it stops the pipeline
            is_stopping.set()
            assert made._batch_running.acquire(timeout=60)
            made._batch_running.release()
            assert not ends
        made.stop()
        batch.join(60)
        assert [str(each) for each in ends] == [str(StoppedError())]
    assert made.wait()


def test_an_error_ends_a_micro_batch_that_waits_for_a_copy_of_this_process(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody asks the copy to stop before the query has ended. So the error of a merge was shown minutes later."""
    made, looks = pipeline(Query(clock), tmp_path, monkeypatch).start(), threading.Semaphore(0)
    monkeypatch.setattr("spark_sink.pipeline.pipeline.micro_batch", lambda *_: (None, Position(1, 0x200)))

    def tried(fd: int, *, is_shared: bool = False) -> bool:
        return try_lock(fd, is_shared=is_shared) or looks.release() is not None

    monkeypatch.setattr("spark_sink.files.lock.try_lock", tried)
    batch, ends = batch_of(made)
    with TableLock(tmp_path / "warehouse").alone():
        batch.start()
        assert looks.acquire(timeout=60)
        failing = threading.Thread(target=made._take_error, args=[OSError(errno.EIO, "no")], daemon=True)
        failing.start()
        failing.join(60)
        batch.join(60)
        assert [str(each) for each in ends] == [str(StoppedError())]
    with pytest.raises(CdcpipeError, match="no"):
        made.wait()


def test_a_stop_ends_a_start_that_waits_for_another_process(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = pipeline(Query(clock), tmp_path, monkeypatch)
    made.lock = Pipeline(made.spark, tmp_path / "staging", tmp_path / "warehouse", is_stopping=lambda: True).lock

    def stream(_: Pipeline) -> Query:
        finish_left(made.spark, made.warehouse, made.lock, made._tables, Position(1, 0))
        pytest.fail("it has not waited")

    monkeypatch.setattr(Pipeline, "_stream", stream)
    with held_elsewhere(lock_file(tmp_path / "warehouse")), pytest.raises(InterruptedError):
        made.start()
    made.stop()
    with TableLock(tmp_path / "warehouse").own("warehouse", tmp_path / "staging"):
        pass


def test_a_stop_ends_a_start_that_makes_the_replica_of_a_killed_copy(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, table = pipeline(Query(clock), tmp_path, monkeypatch), Table("public", "t")
    commit(made.warehouse.changelog(table) / "_delta_log", 0, {"txn": {"appId": "cdcpipe", "version": 50}})
    landed_snapshots.record_start(made.warehouse, table, Position(1, 50))
    begun, cancelled = threading.Event(), threading.Event()

    def remake(*_: Any) -> None:
        begun.set()
        assert cancelled.wait(DEADLINE_S)
        raise RuntimeError("[SPARK_JOB_CANCELLED]")

    monkeypatch.setattr(merge, "check_unchanged", lambda _: None)
    monkeypatch.setattr(merge, "_has_rows_of", lambda *_: True)
    monkeypatch.setattr(merge, "remake", remake)
    lock = TableLock(tmp_path / "warehouse", begun.is_set)
    spark: Any = given_session(addJobTag=lambda _: None, cancelJobsWithTag=lambda _: cancelled.set())
    with pytest.raises(InterruptedError):
        finish_left(spark, made.warehouse, lock, made._tables, Position(1, 100))
    assert landed_snapshots.unfinished(made.warehouse) == [(table, Position(1, 50))]


def test_a_table_that_never_came_because_the_log_was_lost_has_not_gone(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A micro-batch was killed after it had recorded the table. Each start ended with "the changelog has gone"."""
    gap = Gap(0x200, "their log was lost", since=1.0, found=2.0)
    make_epoch(tmp_path / "staging", 2, 0x300, gap=gap.to_json())
    check_log = fit.check_log
    made = pipeline(Query(clock), tmp_path, monkeypatch)
    monkeypatch.setattr(fit, "check_log", check_log)
    house = made.warehouse
    house.open(list_epochs(tmp_path / "staging")[0])
    house.record(Position(1, 0x200))
    house.write_versions(Table("public", "t"), [version(0x280, 0, ID)])
    assert [made._open() for _ in range(2)] == [Position(2, 0x300)] * 2
    assert (house.source().position, house.tables()) == (Position(2, 0x300), [])


def test_an_error_of_the_last_round_is_kept_when_a_source_starts_late(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = Query(clock, Exception(LATE), None)
    made = pipeline(query, tmp_path, monkeypatch).start()
    monkeypatch.setattr(made, "_stop_following", lambda **_: made._take_error(CdcpipeError("the last merge failed")))
    with pytest.raises(CdcpipeError, match="the last merge failed"):
        made.wait()
    assert query.starts == 1


@pytest.mark.parametrize("is_raised", [True, False])
def test_an_error_of_a_merge_that_nobody_gets_is_logged(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, is_raised: bool
) -> None:
    """The query was stopped without a word, as if on purpose. `process_available` raises the error."""
    made = pipeline(Query(clock, Exception(LATE)), tmp_path, monkeypatch)
    problem = CdcpipeError("the merge failed", hint="make room")
    if is_raised:
        monkeypatch.setattr(made, "_stop_following", lambda **_: made._take_error(problem))
        with pytest.raises(CdcpipeError, match="the merge failed"):
            made.process_available()
    else:
        made.start()._take_error(problem)
    logged = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert logged == ([] if is_raised else ["the pipeline has ended: the merge failed (hint: make room)"])
    assert made.logs_error


@pytest.mark.parametrize("cause", [KILLED, CUT_OFF])
def test_a_source_that_was_killed_is_started_again(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, cause: str
) -> None:
    query = Query(clock, SparkError(cause), None)
    pipeline(query, tmp_path, monkeypatch).process_available()
    assert query.starts == 2
    assert "the Python process that finds new segments for Spark has ended" in caplog.text


@pytest.mark.parametrize("cause", [RAISED, ELSEWHERE])
def test_another_error_of_the_stream_ends_it(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: str) -> None:
    query = Query(clock, SparkError(cause))
    with pytest.raises(CdcpipeError, match="STREAM_FAILED"):
        pipeline(query, tmp_path, monkeypatch).process_available()
    assert query.starts == 1


def test_an_error_of_a_micro_batch_keeps_its_cause(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark's error of the query took its place: a program could not tell a full disk from other causes."""
    full = OSError(errno.ENOSPC, "No space left on device")

    def process(*_: object) -> None:
        raise CdcpipeError("the changelog can't be written") from full

    made = pipeline(Query(clock, SparkError(RAISED)), tmp_path, monkeypatch).start()
    monkeypatch.setattr("spark_sink.pipeline.pipeline.micro_batch", process)
    with pytest.raises(CdcpipeError):
        made._batch(cast("Any", None), 0)
    with pytest.raises(CdcpipeError, match="the changelog can't be written") as caught:
        made.wait()
    assert caught.value.__cause__ is full
    made.stop()


def test_a_source_that_is_killed_again_and_again_is_named(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    query = Query(clock, *[SparkError(KILLED)] * 11)
    with pytest.raises(CdcpipeError, match="further: the Python process that finds new segments for Spark has ended"):
        pipeline(query, tmp_path, monkeypatch).process_available()
    assert query.starts == 11


def test_a_source_that_ends_now_and_then_is_always_started_again() -> None:
    ends = SourceEnds()
    assert all(ends.warning(SparkError(KILLED), batches) for batches in range(30))
    assert [ends.warning(SparkError(KILLED), 29) is None for _ in range(10)] == [False] * 9 + [True]


def test_a_session_that_was_stopped_ends_the_wait(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The query itself waits for data for ever."""
    made = pipeline(Query(clock), tmp_path, monkeypatch).start()
    monkeypatch.setattr(session, "is_stopped", lambda _: True)
    with pytest.raises(CdcpipeError, match="the Spark session was stopped, but not by its Pipeline") as caught:
        made.wait(50)
    assert caught.value.__cause__ is None  # it was itself: who followed the causes never came to an end
    made.stop()


def test_one_pipeline_at_a_time_writes_the_tables(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that took up the same micro-batch had its changes in the tables twice."""
    made = [pipeline(Query(clock), tmp_path, monkeypatch) for _ in range(2)]
    with made[0] as running:
        for refused in (made[1].start, made[1].process_available, running.start):
            with pytest.raises(WarehouseError, match=r"another pipeline writes .*/warehouse: this process") as raised:
                refused()
            assert "call its stop()" in str(raised.value.hint)
        made[1].stop()  # it has nothing to give free
        with pytest.raises(WarehouseError, match="another pipeline"):
            made[1].start()
    made[1].start().stop()


def test_one_pipeline_at_a_time_reads_a_log(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log keeps segments for one warehouse. A second one let those be removed that the first one still needed."""
    made = pipeline(Query(clock), tmp_path, monkeypatch)
    other = Pipeline(made.spark, tmp_path / "staging", tmp_path / "other")
    elsewhere = Pipeline(made.spark, tmp_path / "log", tmp_path / "third")
    with made, elsewhere, pytest.raises(WarehouseError, match=r"another pipeline reads the log in .*/staging: this process"):
        other.start()
    with other:
        pass


def test_a_pipeline_of_another_process_is_named(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys; from spark_sink.warehouse.lock import TableLock\n"
        "root = pathlib.Path(sys.argv[1])\n"
        "with TableLock(root).own('shop', root / 'staging'): print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        named = f"writes the tables in shop: process {other.pid} on .* since 2"
        with pytest.raises(WarehouseError, match=named) as raised, TableLock(tmp_path).own("shop", tmp_path):
            pass
        assert "wait until that has ended, or stop it" in str(raised.value.hint)
        assert other.stdin is not None
        other.stdin.close()
    with TableLock(tmp_path).own("shop", tmp_path):
        pass


def test_a_pipeline_makes_the_directories_of_its_locks_as_others_do(tmp_path: Path) -> None:
    """Other users who may read the tables could not read their choices, as `as-of` does, if a pipeline was the first."""
    for name, kind in (("expected", Path.mkdir), ("staging", make_root)):
        kind(tmp_path / name)
    with TableLock(tmp_path / "shop").own("shop", tmp_path / "staging"):
        pass
    modes = [(tmp_path / name).stat().st_mode & 0o777 for name in ("shop/_cdcpipe", "expected", "staging/readers")]
    assert (modes[0], modes[2]) == (modes[1], 0o700)


def test_a_forked_child_does_not_keep_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook may have a pool of processes, and each Popen forks for a moment."""
    of_child: list[int] = []
    monkeypatch.setattr("spark_sink.warehouse.lock.try_lock", lambda fd: of_child.append(os.dup(fd)) or try_lock(fd))
    for _ in range(2):
        with TableLock(tmp_path).own("shop", tmp_path):
            pass
    assert len(of_child) == 4
    for fd in of_child:
        os.close(fd)


@pytest.mark.parametrize(("available_now", "lsn", "is_refused"), [(False, 0x200, True), (True, 0x100, True), (True, 0x200, False)])
def test_a_query_that_something_else_has_stopped(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, available_now: bool, lsn: int, is_refused: bool
) -> None:
    """It ended without an error. That the tables had everything was said although they lacked the rest of the log."""
    make_epoch(tmp_path / "staging", 1, 0x100, (0x100, 0x200))
    made = pipeline(Query(clock, None), tmp_path, monkeypatch).start(available_now=available_now)
    made._progress = replace(made._progress, position=Position(1, lsn))
    if is_refused:
        with pytest.raises(PipelineError, match="Spark's query was stopped, but not by its Pipeline or Runner, before"):
            made.wait()
    else:
        assert made.wait()
    made.stop()


@pytest.mark.parametrize("end", ["an end", "an error", "a stop", "a failed start", "an error of a stop", "an interrupt"])
def test_the_tables_are_free_when_a_pipeline_has_ended(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    ends = {"an error": Exception("anything"), "an interrupt": KeyboardInterrupt()}
    made = pipeline(Query(clock, ends.get(end)), tmp_path, monkeypatch)

    def is_free() -> bool:
        try:
            with TableLock(tmp_path / "warehouse").own("warehouse", tmp_path / "staging"):
                return True
        except WarehouseError:
            return False

    if end == "a failed start":
        monkeypatch.setattr(made, "_stream", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            made.start()
    elif end == "an interrupt":
        with pytest.raises(KeyboardInterrupt):
            made.process_available()
    else:
        made.start(available_now=end == "an end")
        assert not is_free()
        if end == "an end":
            assert made.wait()
        elif end == "an error":
            with pytest.raises(CdcpipeError, match="anything"):
                made.wait()
        elif end == "a stop":
            made.stop()
        else:
            monkeypatch.setattr(made, "_stop_query", lambda: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                made.stop()
    assert is_free()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("can't start new thread")])
def test_a_start_that_fails_leaves_nothing_running(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """The query went on without the lock of the tables, beside the next pipeline. After ^C, Spark starts it without an answer."""
    query = Query(clock)
    calls: list[str] = []
    running: list[Worker] = []
    made = pipeline(query, tmp_path, monkeypatch)
    made.spark.streams.active = [query]
    monkeypatch.setattr(query, "stop", lambda: setattr(query, "isActive", False), raising=False)
    monkeypatch.setattr("spark_sink.spark.jvm.has_ended", lambda _: False)
    made._serving.callback(calls.append, "the server of segments has stopped")

    def start(_self: Query) -> Query:
        query.isActive = True
        if isinstance(error, KeyboardInterrupt):
            raise error
        return query

    def start_thread(worker: Worker) -> None:
        if worker.name == "histories":
            raise error
        running.append(worker)
        Worker.start(worker)

    monkeypatch.setattr(Query, "start", start)
    monkeypatch.setattr("spark_sink.pipeline.rounds.Worker", type("W", (Worker,), {"start": start_thread}))
    made._rounds = [Rounds(name, lambda: None, 60.0, lambda _: None) for name in ("replicas", "histories")]
    for name, rounds in zip(("_follower", "_histories"), made._rounds, strict=True):
        monkeypatch.setattr(made, name, SimpleNamespace(rounds=rounds))
    with pytest.raises(type(error)):
        made.start()
    assert not query.isActive
    assert calls == ["the server of segments has stopped"]
    assert not any(worker.is_alive() for worker in running)
    with pytest.raises(PipelineError, match="the tables could not be brought further"):
        made.wait()


def test_the_tables_are_not_free_while_a_merge_runs(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream has failed, and a round of merges takes longer."""
    monkeypatch.setattr("spark_sink.pipeline.pipeline._MERGES_S", 0.01)
    made, merged = pipeline(Query(clock, Exception("anything")), tmp_path, monkeypatch), threading.Event()
    made._rounds = [Rounds("replicas", lambda: print(merged.wait(60)), 0.0, lambda _: None)]
    made.start()
    with pytest.raises(CdcpipeError, match="anything"):
        made.wait()
    with pytest.raises(WarehouseError, match="another pipeline"):
        pipeline(Query(clock), tmp_path, monkeypatch).start()
    merged.set()
    made.stop()
    pipeline(Query(clock), tmp_path, monkeypatch).start().stop()


def test_the_tables_are_not_free_while_a_merge_runs_after_an_error_of_a_stop(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark's stop() may time out. Merges go on meanwhile, and another pipeline must not write these tables before their end."""
    made = pipeline(Query(clock), tmp_path, monkeypatch)
    merged: list[bool] = []
    begins, goes_on = threading.Event(), threading.Event()

    def merge() -> None:
        begins.set()
        goes_on.wait(60)
        with pytest.raises(WarehouseError, match="another pipeline"):
            pipeline(Query(clock), tmp_path, monkeypatch).start()
        merged.append(True)

    rounds = Rounds("replicas", merge, 0.0, lambda _: None)
    made._rounds = [rounds]
    monkeypatch.setattr(made, "_follower", SimpleNamespace(rounds=rounds))
    made.start()
    assert begins.wait(60)

    def fail() -> None:
        threading.Timer(0.2, goes_on.set).start()
        raise CdcpipeError("stop() has timed out")

    monkeypatch.setattr(made, "_stop_query", fail)
    with pytest.raises(CdcpipeError, match="timed out"):
        made.stop()
    assert merged
    pipeline(Query(clock), tmp_path, monkeypatch).start().stop()


def test_the_tables_stay_owned_while_a_source_is_started_again(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = pipeline(Query(clock, Exception(LATE)), tmp_path, monkeypatch).start()
    assert not made.wait(25)
    with pytest.raises(WarehouseError, match="another pipeline"):
        pipeline(Query(clock), tmp_path, monkeypatch).start()
    made.stop()

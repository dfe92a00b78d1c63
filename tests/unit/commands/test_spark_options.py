"""The session of the commands that need Spark, if Spark's JVM ends."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from cdcpipe.errors import CdcpipeError
from spark_sink.commands.spark_options import warehouse_session
from spark_sink.spark import jvm, session
from spark_sink.warehouse.warehouse import Warehouse
from support.given_sessions import given_session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], SimpleNamespace]]:
    """Let a session have this command in the place of its JVM. The session counts its stops."""
    processes: list[subprocess.Popen[bytes]] = []

    def session_of(command: str) -> SimpleNamespace:
        process = subprocess.Popen(["sh", "-c", command], stdin=subprocess.PIPE)
        processes.append(process)
        monkeypatch.setattr("pyspark.SparkContext._gateway", SimpleNamespace(proc=process))
        made = given_session()
        made.stops = 0

        def stop() -> None:
            made.stops += 1

        made.stop = stop
        monkeypatch.setattr(session, "build", lambda **_: made)
        return made

    yield session_of
    for process in processes:
        process.communicate()


def use(tmp_path: Path, error: Exception) -> None:
    with warehouse_session(Warehouse(tmp_path, "delta"), "test", jars=None, master=None, confs=()):
        raise error


@pytest.mark.parametrize("error", [ConnectionRefusedError(111, "Connection refused"), CdcpipeError("cannot copy table public.a")])
def test_the_end_of_the_jvm_is_the_error(start: Callable[[str], SimpleNamespace], tmp_path: Path, error: Exception) -> None:
    spark = start("kill -9 $$")
    with pytest.raises(CdcpipeError, match="Spark's JVM has ended") as caught:
        use(tmp_path, error)
    assert caught.value.__cause__ is error
    assert "start again; nothing is lost" in str(caught.value.hint)
    assert spark.stops == 0  # a call to a JVM that is not there would hide the error


def test_another_error_stays_as_it_is(
    start: Callable[[str], SimpleNamespace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spark_sink.spark.jvm.END_S", 0.0)
    spark = start("read line")
    error = CdcpipeError("cannot copy table public.a")
    with pytest.raises(CdcpipeError) as caught:
        use(tmp_path, error)
    assert caught.value is error
    assert spark.stops == 1


def test_the_end_of_the_jvm_at_the_start_of_the_session_is_the_error(start: Callable[[str], SimpleNamespace]) -> None:
    start("kill -9 $$")
    error = session._start_error(ConnectionRefusedError(111, "Connection refused"), {"spark.master": "local[2]"}, {})
    assert error.message == "Spark did not start: its JVM has ended, and gave no reason"
    assert "lack of memory" in str(error.hint)


def test_a_lock_that_cannot_be_opened_is_no_error_of_spark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one in a warehouse that is mounted read-only."""
    monkeypatch.setattr("pyspark.SparkContext._gateway", None)
    monkeypatch.setattr(jvm, "_output", None)
    (tmp_path / "file").touch()
    lock = tmp_path / "file/tables.lock"
    with pytest.raises(CdcpipeError) as caught:
        jvm.start({"spark.master": "local"}, None, [lock])
    assert caught.value.message.endswith("/file for Spark: File exists")

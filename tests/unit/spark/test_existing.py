"""A session that another thread has made is found: Spark tells of the active one only, and that is a thread's."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from threading import Event, RLock, get_ident
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from cdcpipe.errors import InitError
from spark_sink.spark import connect, given, java_home, jvm, secret_settings, session, shared
from spark_sink.spark.existing import existing
from support.given_sessions import given_session
from support.waiting import DEADLINE_S

MADE = given_session()
"""A session of the notebook."""


def test_a_session_of_another_thread_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyspark.SparkContext._active_spark_context", MADE.sparkContext)
    monkeypatch.setattr("pyspark.sql.SparkSession.getActiveSession", lambda: None)
    monkeypatch.setattr("pyspark.sql.SparkSession._instantiatedSession", MADE)
    monkeypatch.setattr("pyspark.sql.SparkSession.builder", None)  # it would give the session our settings
    assert existing() is MADE
    assert session.build(format="parquet") is MADE
    assert given.take(None, "parquet", {}) is MADE


def test_a_session_of_spark_connect_is_refused() -> None:
    """It has no SparkContext: pyspark's own error came, and a run with one was no error of cdcpipe."""
    connected = type("SparkSession", (), {"__module__": "pyspark.sql.connect.session"})()
    for take in (lambda: given.take(connected, "parquet", {}), lambda: session.check(connected, "parquet")):
        with pytest.raises(InitError, match="this is a session of Spark Connect"):
            take()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SPARK_REMOTE", "sc://example.org:443/;token=S3CRET"),
        ("SPARK_CONNECT_MODE_ENABLED", "1"),
        ("SPARK_API_MODE", "Connect"),
        ("SPARK_CONNECT_MODE", "1"),
    ],
)
def test_an_environment_that_chooses_spark_connect_is_refused_before_spark_starts(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    """The error had the token, and its hint blamed --master. A run had made its slot by then."""
    monkeypatch.setattr("spark_sink.spark.given.existing", lambda: None)
    monkeypatch.setenv(name, value)
    with pytest.raises(InitError, match=f"{name} is set") as raised:
        given.take(None, "parquet", {})
    assert raised.value.hint == f"unset {name}, and start the program again"


def test_the_classic_mode_wins_over_the_default_of_pyspark_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_CONNECT_MODE", "1")
    monkeypatch.setenv("SPARK_API_MODE", "classic")
    connect.refuse_chosen()


def test_a_session_that_was_stopped_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyspark.SparkContext._active_spark_context", None)
    monkeypatch.setattr("pyspark.sql.SparkSession._instantiatedSession", MADE)
    assert existing() is None


def test_a_session_that_another_thread_is_making_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """pyspark shows a context for seconds before it has `_jsc`. A run ended with an AttributeError then."""

    @contextmanager
    def lock() -> Iterator[None]:
        """Stand for the builder's lock: the other thread gives it free when the session is made."""
        monkeypatch.setattr("pyspark.SparkContext._active_spark_context", MADE.sparkContext)
        monkeypatch.setattr("pyspark.sql.SparkSession._instantiatedSession", MADE)
        yield

    monkeypatch.setattr("pyspark.sql.SparkSession.getActiveSession", lambda: None)
    monkeypatch.setattr("pyspark.SparkContext._active_spark_context", SimpleNamespace())
    monkeypatch.setattr("pyspark.sql.SparkSession._instantiatedSession", None)
    monkeypatch.setattr("pyspark.sql.SparkSession.Builder._lock", lock())
    assert existing() is MADE


class Builder:
    """Makes the session of the process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        monkeypatch.setattr("pyspark.sql.SparkSession.builder", self)
        monkeypatch.setattr("pyspark.sql.SparkSession.getActiveSession", lambda: None)
        monkeypatch.setattr("pyspark.SparkContext._active_spark_context", None)
        monkeypatch.setattr(session, "_settings_to_start", lambda *_, **__: ({}, {}))
        monkeypatch.setattr(session, "prepare_workers", lambda _: None)
        monkeypatch.setattr(jvm, "log_lost_connections", lambda _: None)
        monkeypatch.setattr(jvm, "start", lambda *_: None)

    def config(self, _key: str, _value: str) -> "Builder":
        return self

    def getOrCreate(self) -> Any:  # noqa: N802 - Spark's name
        self._monkeypatch.setattr("pyspark.SparkContext._active_spark_context", MADE.sparkContext)
        self._monkeypatch.setattr("pyspark.sql.SparkSession._instantiatedSession", MADE)
        return MADE


class TellingLock:
    """A lock that tells that a thread waits for it."""

    def __init__(self) -> None:
        self._lock = RLock()
        self.has_waiter = Event()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self.has_waiter.set()
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_one_of_two_runs_has_made_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one took it for its own, and stopped it at its end: the first one died."""
    Builder(monkeypatch)
    building, starts = TellingLock(), list[Any]()

    def start(*args: Any) -> None:
        starts.append(args)
        assert building.has_waiter.wait(DEADLINE_S)

    monkeypatch.setattr(session, "_building", building)
    monkeypatch.setattr(jvm, "start", start)
    made: list[Any] = []
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda _: session.build(format="parquet", on_made=made.append), range(2)))
    assert found == [MADE, MADE]
    assert made == [MADE]
    assert len(starts) == 1


def test_a_run_does_not_take_the_session_that_another_run_is_making_for_the_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """It took the session before the other run had noted it, and used it after the other run had stopped it."""
    Builder(monkeypatch)
    making = TellingLock()
    monkeypatch.setattr("pyspark.sql.SparkSession.Builder._lock", making)
    monkeypatch.setattr(java_home, "find_java", lambda: None)
    monkeypatch.setattr(given, "check_named", lambda: None)
    monkeypatch.setattr(session, "stop", lambda _: None)
    taken, runs = list[Future[Any]](), get_ident()

    def check(*_: object) -> None:
        if get_ident() == runs:
            taken.append(threads.submit(given.take, None, "parquet", {}))
            taken[0].add_done_callback(lambda _: making.has_waiter.set())
            assert making.has_waiter.wait(DEADLINE_S)

    monkeypatch.setattr(session, "check", check)
    with ThreadPoolExecutor(1) as threads, shared.entered(None, partial(session.build, format="parquet")) as spark:
        assert spark is cast("Any", MADE)
        assert taken[0].result() is None


def test_a_run_does_not_take_the_session_that_the_last_run_is_stopping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its start ended with "this Spark session was stopped", though it could make one of its own."""
    made, taken = given_session(), list[Any]()
    java_context = SimpleNamespace(isStopped=lambda: True)

    def stop() -> None:
        made.sparkContext._jsc = SimpleNamespace(sc=lambda: java_context)
        taken.append(given.take(None, "parquet", {}))

    def build(*, on_made: Any) -> Any:
        on_made(made)
        return made

    made.stop = stop
    monkeypatch.setattr(given, "existing", lambda: made)  # pyspark forgets it after the stop
    monkeypatch.setattr(java_home, "find_java", lambda: None)
    monkeypatch.setattr(given, "check_named", lambda: None)
    with shared.entered(None, build):
        pass
    assert taken == [None]


def test_a_session_that_the_last_run_is_stopping_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this second, `build_session` said that the session was stopped, and Spark's builder failed with an AttributeError."""
    Builder(monkeypatch).getOrCreate()
    stopping, made, found = TellingLock(), given_session(), list[Future[Any]]()
    monkeypatch.setattr("pyspark.sql.SparkSession.Builder._lock", stopping)

    def stop() -> None:
        found.append(threads.submit(existing))
        found[0].add_done_callback(lambda _: stopping.has_waiter.set())
        assert stopping.has_waiter.wait(DEADLINE_S)
        monkeypatch.setattr("pyspark.SparkContext._active_spark_context", None)  # at its end, as pyspark

    made.stop = stop
    with ThreadPoolExecutor(1) as threads:
        session.stop(cast("Any", made))
        assert found[0].result() is None


def test_a_session_that_a_program_makes_while_the_jvm_starts_stays_the_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run stopped it at its end."""
    builder = Builder(monkeypatch)
    monkeypatch.setattr(jvm, "start", lambda *_: builder.getOrCreate())
    monkeypatch.setattr("pyspark.sql.SparkSession.builder", SimpleNamespace(getOrCreate=pytest.fail))
    assert session.build(format="parquet", on_made=pytest.fail) is MADE


def test_a_session_that_was_stopped_is_refused_if_it_is_given() -> None:
    """Its version and its settings can be asked all the same. A run would make its slot, and end when it uses the session."""
    with pytest.raises(InitError, match="this Spark session was stopped"):
        given.take(given_session(is_stopped=True), "parquet", {})


def test_a_session_that_was_stopped_is_not_stopped_again() -> None:
    """pyspark would forget the session that a cell has made since: `F.col` failed, and no other session could be made."""
    made = given_session(is_stopped=True)  # without stop()
    session.stop(made)
    with pytest.raises(InitError) as raised:
        session.check(made, "parquet")
    assert raised.value.hint == "make another one"


def test_a_session_that_its_jvm_has_stopped_is_stopped_in_pyspark_too() -> None:
    made, calls = given_session(), list[str]()
    made.sparkContext._jsc = SimpleNamespace(sc=lambda: SimpleNamespace(isStopped=lambda: True))
    made.stop = lambda: calls.append("stop")
    with pytest.raises(InitError) as raised:
        session.check(made, "parquet")
    assert raised.value.hint == "call its stop(), and make another one"
    session.stop(made)
    assert calls == ["stop"]


def test_delta_lake_can_not_be_added_to_a_jvm(monkeypatch: pytest.MonkeyPatch) -> None:
    """pyspark keeps the JVM of a session that was stopped."""
    java = MagicMock()
    java.org.apache.spark.util.Utils.classIsLoadable.return_value = False
    for name, value in (("_active_spark_context", None), ("_gateway", SimpleNamespace(proc=None)), ("_jvm", java)):
        monkeypatch.setattr(f"pyspark.SparkContext.{name}", value)
    for make in (session.build, lambda: given.take(None, "delta", {})):
        with pytest.raises(InitError, match="the first Spark session of this process had no Delta Lake") as raised:
            make()
        assert "restart the program" in str(raised.value.hint)
    session.check_jvm("parquet")


def test_a_new_session_that_does_not_fit_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the settings of spark-defaults.conf. The next attempt would find it, and fail for the same reason."""
    made, builder = given_session({"spark.sql.files.ignoreCorruptFiles": "true"}.get), MagicMock()
    monkeypatch.setattr("pyspark.SparkContext._active_spark_context", None)
    monkeypatch.setattr("pyspark.sql.SparkSession.builder", builder)
    for name in ("start", "log_lost_connections"):
        monkeypatch.setattr(jvm, name, lambda *_: None)
    builder.config.return_value = builder
    builder.getOrCreate.return_value = made
    made.stop = MagicMock()
    with pytest.raises(InitError, match="ignoreCorruptFiles"):
        session.build(format="parquet")
    made.stop.assert_called_once_with()


@pytest.mark.parametrize("of_file", [{}, {"spark.redaction.regex": "license"}], ids=["Spark's default", "spark-defaults.conf"])
@pytest.mark.parametrize("given", [{}, {"spark.redaction.regex": "pin"}], ids=["no option", "--conf"])
def test_what_spark_hides(monkeypatch: pytest.MonkeyPatch, of_file: dict[str, str], given: dict[str, str]) -> None:
    """A pattern of the administrator counts before ours: it may hide what ours shows."""
    builder, of_jvm = MagicMock(), dict[str, str]()
    monkeypatch.setattr("pyspark.SparkContext._active_spark_context", None)
    monkeypatch.setattr("pyspark.SparkConf", lambda: SimpleNamespace(contains=(of_file | of_jvm).__contains__))
    monkeypatch.setattr("pyspark.sql.SparkSession.builder", builder)
    monkeypatch.setattr(jvm, "log_lost_connections", lambda *_: None)
    monkeypatch.setattr(jvm, "start", lambda settings, *_: of_jvm.update(settings))
    builder.config.return_value = builder
    builder.getOrCreate.return_value = given_session()
    session.build(format="parquet", conf=given)
    effective = of_file | of_jvm | dict(call.args for call in builder.config.call_args_list)
    ours = {"spark.redaction.regex": secret_settings.HIDDEN_BY_SPARK}
    assert effective["spark.redaction.regex"] == (ours | of_file | given)["spark.redaction.regex"]

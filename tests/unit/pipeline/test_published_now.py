"""Whose answer about the published tables counts."""

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cdcpipe.errors import CdcpipeError
from cdcpipe.pipe.exitcode import ExitCode
from cdcpipe.retry import RetryPolicy
from spark_sink.client.failure import Failure
from spark_sink.client.process import Answer
from spark_sink.launcher.config import LauncherConfig
from spark_sink.pipeline import published_now
from spark_sink.pipeline.published_now import PublishedNow
from support.staged import make_epoch

OLD_PRIMARY = {"timeline": 1}
PROMOTED = {"timeline": 3, "timeline_history": [{"timeline": 1, "end_lsn": "0/200"}, {"timeline": 2, "end_lsn": "0/300"}]}
LOST_TAIL = {"timeline": 3, "timeline_history": [{"timeline": 1, "end_lsn": "0/200"}, {"timeline": 2, "end_lsn": "0/2FF"}]}
LAGGING = {"wal_lsn": "0/2FF", "is_standby": True}


def answer(**changes: Any) -> Answer:
    """Return what ``cdcpipe prepare`` prints at the server of the log, which is on timeline 2 and ends at 0/300."""
    facts = {
        "server_version": 180004,
        "system_id": "7",
        "timeline": 2,
        "database": "db",
        "wal_lsn": "0/300",
        "slot": {"confirmed_flush_lsn": "0/100", "created": False},
        "tables": [{"name": "t"}],
        "connection": {"host": "db2", "port": "5432"},
    }
    return Answer(json.dumps(facts | changes).encode(), Failure(0, ""))


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PublishedNow:
    monkeypatch.setattr(published_now, "_RECONNECT", RetryPolicy(attempts=3))
    make_epoch(tmp_path, 1, 0x100, (0x100, 0x200))
    make_epoch(tmp_path, 2, 0x200, (0x200, 0x300), timeline=2)
    return PublishedNow(LauncherConfig("s", tmp_path), threading.Event())


def answering(monkeypatch: pytest.MonkeyPatch, *answers: Answer) -> list[Answer]:
    left = list(answers)
    monkeypatch.setattr(published_now, "ask_published", lambda *_, **__: left.pop(0))
    return left


@pytest.mark.parametrize("other", [OLD_PRIMARY, LAGGING, {"system_id": "8"}])
def test_another_servers_answer_does_not_count(
    published: PublishedNow, other: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had no parents of a partition that it did not have yet, and so its masked column was written in clear."""
    left = answering(monkeypatch, answer(**other, tables=[]), answer())
    assert [each["name"] for each in published.describe()] == ["t"]
    assert left == []


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (OLD_PRIMARY, "port 5432, is on timeline 1 of system 7; the log is of timeline 2 of system 7"),
        (LAGGING, "port 5432, is a standby at 0/2FF, behind the log, which ends at 0/300"),
    ],
)
def test_the_error_names_the_server_that_answers(
    published: PublishedNow, other: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(monkeypatch, *[answer(**other)] * 3)
    with pytest.raises(CdcpipeError) as caught:
        published.describe()
    assert caught.value.message == f"tables that are new or have changed could not be looked up: the server at db2, {reason}"


@pytest.mark.parametrize(("on_gap", "available_now"), [("resnapshot", False), ("resnapshot", True), ("stop", False)])
def test_a_server_that_was_promoted_without_the_end_of_the_log_is_waited_for_while_the_launcher_runs(
    published: PublishedNow, monkeypatch: pytest.MonkeyPatch, on_gap: Any, *, available_now: bool
) -> None:
    """The launcher may take minutes to notice that the old primary is dead. The error told to wait for that server."""
    monkeypatch.setattr(published_now, "_NEEDED", RetryPolicy(attempts=5))
    published._config = replace(published._config, on_gap=on_gap, available_now=available_now)
    left = answering(monkeypatch, *[answer(**LOST_TAIL)] * 4, answer())
    if on_gap == "resnapshot" and not available_now:
        assert [each["name"] for each in published.describe()] == ["t"]
        return
    with pytest.raises(CdcpipeError, match="and has changes that this server never had") as caught:
        published.describe()
    assert caught.value.hint == "start again: run then begins to read from the server that was promoted; nothing is lost"
    assert len(left) == 2


@pytest.mark.parametrize("here", [{"is_standby": True}, {"wal_lsn": "0/2FF"}, PROMOTED])
def test_a_standby_that_has_the_log_counts_and_so_does_a_primary_that_lost_its_end(
    published: PublishedNow, here: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that was promoted with the whole log was waited for in vain once the launcher of --available-now had ended."""
    answering(monkeypatch, answer(**here))
    assert [each["name"] for each in published.describe()] == ["t"]


def test_a_server_that_is_away_is_asked_again_and_a_missing_slot_ends_the_request(
    published: PublishedNow, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = answering(monkeypatch, Answer(b"", Failure(3, "closed")), Answer(b"", Failure(8, "no slot")), answer())
    with pytest.raises(CdcpipeError, match="could not be looked up: no slot"):
        published.describe()
    assert len(left) == 1


def test_a_stop_ends_a_request_that_waits(published: PublishedNow, monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, answer(**OLD_PRIMARY))
    published._stopping.set()
    with pytest.raises(InterruptedError):
        published.describe()
    assert published.is_interrupted


@pytest.mark.parametrize(
    ("failure", "hint"),
    [
        (Failure(ExitCode.PG_CLOSED, "the connection was lost"), "start again once the server of the log can be reached"),
        (Failure(ExitCode.PG_ERROR, "could not compute MD5 hash"), "start again once this is mended"),
        (Failure(ExitCode.PG_ERROR, "no memory", "raise it"), "raise it"),
    ],
)
def test_what_to_do_if_the_tables_cannot_be_looked_up(
    published: PublishedNow, monkeypatch: pytest.MonkeyPatch, failure: Failure, hint: str
) -> None:
    answering(monkeypatch, *[Answer(b"", failure)] * 3)
    with pytest.raises(CdcpipeError, match=f"could not be looked up: {failure.message}") as caught:
        published.describe()
    assert caught.value.hint == f"{hint}; nothing is lost"

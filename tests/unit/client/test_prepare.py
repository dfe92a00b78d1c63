"""How the client reads the output of `cdcpipe prepare`."""

import json
import threading
from typing import Any, cast

import pytest

from cdcpipe.errors import (
    CdcpipeError,
)
from cdcpipe.pipe.exitcode import ExitCode
from cdcpipe.retry import RetryPolicy
from spark_sink.client import prepare
from spark_sink.client.failure import Failure
from spark_sink.client.prepare import Prepared, PublishedNow
from spark_sink.client.process import Answer


def test_what_prepare_prints():
    text = json.dumps(
        {
            "server_version": 180004,
            "system_id": "7",
            "timeline": 1,
            "database": "db",
            "wal_lsn": "0/200",
            "slot": {"confirmed_flush_lsn": "0/100", "created": False},
            "timeline_history": [{"timeline": 1, "end_lsn": "0/80"}],
            "tables": [{"schema": "public", "name": "t", "primary_key": ["id"]}],
        }
    )
    prepared = Prepared.parse(text.encode())
    assert (prepared.slot_created, prepared.timeline_history) == (False, ((1, 0x80),))
    assert (prepared.wal_lsn, prepared.confirmed_flush_lsn, prepared.tables[0]["name"]) == (0x200, 0x100, "t")
    for broken in ("", "[]", "{}", text.replace("0/200", "x"), text.replace("confirmed", "c")):
        with pytest.raises(CdcpipeError, match="prepare"):
            Prepared.parse(broken.encode())


@pytest.mark.parametrize(
    ("failure", "hint"),
    [
        (Failure(ExitCode.PG_CLOSED, "the connection was lost"), "start again once the server can be reached; nothing is lost"),
        (Failure(ExitCode.PG_ERROR, "could not compute MD5 hash"), "start again once this is mended; nothing is lost"),
        (Failure(ExitCode.PG_ERROR, "no memory", "raise it"), "raise it; nothing is lost"),
    ],
)
def test_what_to_do_if_the_tables_cannot_be_looked_up(monkeypatch: pytest.MonkeyPatch, failure: Failure, hint: str) -> None:
    monkeypatch.setattr(prepare, "ask_published", lambda *_, **__: Answer(b"", failure))
    monkeypatch.setattr(prepare, "_RECONNECT", RetryPolicy(within_s=0.0, first_pause_s=0.0))
    with pytest.raises(CdcpipeError, match=f"could not be looked up: {failure.message}") as caught:
        PublishedNow(cast("Any", None), threading.Event()).describe()
    assert caught.value.hint == hint

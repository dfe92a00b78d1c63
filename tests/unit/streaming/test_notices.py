"""Which of the server's notices end a stream."""

from types import SimpleNamespace
from typing import Any

import pytest

from cdcpipe.errors import ServerError
from cdcpipe.libpq.connection import Notice
from cdcpipe.sqlstate import NOT_IN_PREREQUISITE_STATE
from cdcpipe.streaming.notices import check_notices, raise_end

AWAY = 'replication slot "standby" specified in parameter "synchronized_standby_slots" does not have active_pid'


def walsender(*notices: Notice, error: Exception | None = None) -> Any:
    def copy_result(_: float) -> None:
        if error is not None:
            raise error

    return SimpleNamespace(notices=list(notices), told_notices=set(), copy_result=copy_result)


def test_a_publication_that_was_missing_ends_it() -> None:
    with pytest.raises(ServerError, match=r"the server skips changes: skipped loading publication \"p\""):
        check_notices(walsender(Notice("WARNING", NOT_IN_PREREQUISITE_STATE, 'skipped loading publication "p"')))


def test_a_standby_that_is_away_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """The server repeats this warning while changes wait for the standby."""
    away = Notice("WARNING", NOT_IN_PREREQUISITE_STATE, AWAY)
    stream = walsender(away, away)
    check_notices(stream)
    stream.notices.append(away)
    check_notices(stream)
    assert caplog.messages == [f"changes wait for a standby: {AWAY}"]
    assert stream.notices == []


@pytest.mark.parametrize(
    ("state", "said", "cause", "hint"),
    [
        ("22021", "invalid byte sequence", "a text in it cannot be converted to UTF-8", "nothing is lost meanwhile"),
        ("22P05", "has no equivalent", "a text in it cannot be converted to UTF-8", "nothing is lost meanwhile"),
        ("XX000", "invalid memory alloc request size 1200000003", "a row in it is longer than the 1 GB", "try --binary"),
        ("22008", "datetime_field_overflow", "the server can do nothing with a value in it", "nothing is lost meanwhile"),
        ("54000", "out of memory", "a row in it is longer than the 1 GB", "try --binary"),
    ],
)
def test_a_value_that_the_server_cannot_send(state: str, said: str, cause: str, hint: str) -> None:
    with pytest.raises(ServerError) as caught:
        raise_end(walsender(error=ServerError(said, sqlstate=state)), 0xFF)
    assert caught.value.message.startswith(f"{said}: {ServerError.UNSENDABLE}, which commits at 0/FF, because {cause}")
    assert str(caught.value.hint).startswith(hint)
    assert "--startpos 0/100," in str(caught.value.hint)
    with pytest.raises(ServerError) as caught:
        raise_end(walsender(error=ServerError(said, sqlstate=state)), 0)
    assert "--startpos behind its commit" in str(caught.value.hint)


def test_another_error_of_the_server_is_passed_on() -> None:
    error = ServerError("could not read the WAL", sqlstate="XX000")
    with pytest.raises(ServerError) as caught:
        raise_end(walsender(error=error), 0xFF)
    assert caught.value is error

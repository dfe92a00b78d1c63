"""Which of the server's notices end a stream."""

from types import SimpleNamespace
from typing import Any

import pytest

from cdcpipe.errors import ServerError
from cdcpipe.libpq.connection import Notice
from cdcpipe.sqlstate import NOT_IN_PREREQUISITE_STATE
from cdcpipe.streaming.notices import check_notices

AWAY = 'replication slot "standby" specified in parameter "synchronized_standby_slots" does not have active_pid'


def walsender(*notices: Notice) -> Any:
    return SimpleNamespace(notices=list(notices), told_notices=set())


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

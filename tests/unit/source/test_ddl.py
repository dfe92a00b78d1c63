"""Finds the messages of captured DDL among other logical messages."""

import pytest

from cdcpipe.pgoutput.messages import LogicalMessage
from spark_sink.source.ddl import read_ddl
from spark_sink.staging.log import list_segments
from support.ddl_messages import content, described
from support.segments import Log, into, say
from support.source_rows import A

TEXT = content(described("id=1 a=2"))


def said(prefix: str, text: bytes) -> LogicalMessage:
    return say(5, text, prefix=prefix)


def test_their_places(log: Log) -> None:
    """A message stands before the change with the same place."""
    first = log.segment([A, said("other", TEXT), into(A, b"1", b"x"), said("cdcpipe.ddl", TEXT), into(A, b"2", b"y")])
    log.segment([A, into(A, b"3", b"z")], before=[say(first.end_lsn + 0x10, TEXT, prefix="cdcpipe.ddl", is_transactional=False)])
    last = log.segment(
        [said("cdcpipe.ddl", TEXT), said("cdcpipe.ddl.x", TEXT)], [said("cdcpipe.dd", b"")], [said("", b"cdcpipe.ddl")]
    )
    found = read_ddl(list_segments(log.root))
    assert [each.place for each in found] == [(first.end_lsn, 1), (last.start_lsn + 0x100, 0)]
    assert {each.content for each in found} == {TEXT.decode()}
    assert [(each.epoch, each.xid, each.commit_time_us) for each in found] == [(1, 700, 1_735_689_600_000_000)] * 2


def test_a_message_that_somebody_else_wrote_is_named(log: Log, caplog: pytest.LogCaptureFixture) -> None:
    log.segment([said("cdcpipe.ddl", b'{"secret": 1}'), said("cdcpipe.ddl", TEXT)])
    assert len(read_ddl(list_segments(log.root))) == 1
    (warning,) = caplog.messages
    assert "at 0/5, is not used" in warning
    assert "secret" not in warning

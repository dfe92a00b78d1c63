"""The commit times of transactions, from their segments."""

from pathlib import Path

from cdcpipe.pgoutput.messages import Insert
from spark_sink.staging.commit_times import CommitTimes
from spark_sink.staging.log import list_segments
from support.pgoutput_build import build
from support.segments import COMMIT_TIME_US, START_LSN, Log, relation

COMMIT_TIME_S = COMMIT_TIME_US / 1e6 + 946_684_800


def test_commit_times_come_from_the_segments(tmp_path: Path) -> None:
    log = Log(tmp_path)
    fruit = relation(1, "fruit", ("id", 23))
    log.segment([build(Insert(None, 1, (b"1",)))], before=[fruit])
    log.segment([build(Insert(None, 1, (b"2",)))], before=[fruit])
    times = CommitTimes(list_segments(tmp_path))
    assert times.newest(START_LSN) is None
    assert times.newest(START_LSN + 0x100) == times.oldest_after(START_LSN + 0x100) == COMMIT_TIME_S
    assert times.oldest_after(log.end_lsn) is None

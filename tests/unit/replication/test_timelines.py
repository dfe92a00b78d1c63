"""The history file of a timeline, as TIMELINE_HISTORY sends it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdcpipe.errors import ProtocolError
from cdcpipe.lsn import LSN
from cdcpipe.replication.timelines import TimelineEnd, parse_timeline_history

SECOND = "1\t0/3000060\tno recovery target specified\n"


@pytest.mark.parametrize(
    ("text", "timeline", "expected"),
    [
        ("", 2, []),
        (SECOND, 2, [(1, "0/3000060")]),
        (SECOND + '\n2\t1A/FF\tat restore point "2\t3"\n', 3, [(1, "0/3000060"), (2, "1A/FF")]),
        ("# a comment\n  1 0/1 \n5\t0/2", 7, [(1, "0/1"), (5, "0/2")]),
    ],
)
def test_history(text: str, timeline: int, expected: list[tuple[int, str]]) -> None:
    assert parse_timeline_history(text, timeline) == [TimelineEnd(number, LSN.parse(lsn)) for number, lsn in expected]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("1\n", 1),
        ("1\t0\treason\n", 1),
        ("1\t0/3000060reason\n", 1),
        ("one\t0/1\treason\n", 1),
        ("-1\t0/1\treason\n", 1),
        ("0\t0/1\treason\n", 1),
        (SECOND + SECOND, 2),
        (SECOND + "3\t0/1\treason\n", 2),
        (SECOND + "\0", 2),
    ],
)
def test_malformed_history(text: str, line: int) -> None:
    with pytest.raises(ProtocolError, match=f"line {line} of the history of timeline 3 "):
        parse_timeline_history(text, 3)


@given(st.text() | st.text(alphabet="0123456789AF/\t\n #"), st.integers(2, 9))
def test_any_text_is_a_history_or_a_protocol_error(text: str, timeline: int) -> None:
    try:
        ends = parse_timeline_history(text, timeline)
    except ProtocolError:
        return
    assert [end.timeline for end in ends] == sorted({end.timeline for end in ends})

"""The history file of a timeline, as TIMELINE_HISTORY sends it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdcpipe.errors import ProtocolError, ServerError
from cdcpipe.lsn import LSN
from cdcpipe.replication.timelines import TimelineEnd, parse_timeline_history, timeline_history

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


class Answering:
    """A walsender whose answer to each command is ``answer``, or that error."""

    def __init__(self, answer: list[list[str | None]] | ServerError) -> None:
        self.answer = answer
        self.asked: list[str] = []

    def execute(self, command: str) -> list[list[str | None]]:
        self.asked.append(command)
        if isinstance(self.answer, ServerError):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("answer", "timeline", "expected", "asked"),
    [
        ([], 1, [], []),  # the first timeline has no history
        ([["00000002.history", SECOND]], 2, [TimelineEnd(1, LSN.parse("0/3000060"))], ["TIMELINE_HISTORY 2"]),
        ([["00000002.history", None]], 2, [], ["TIMELINE_HISTORY 2"]),
        (ServerError("could not open file", sqlstate="58P01"), 2, [], ["TIMELINE_HISTORY 2"]),  # as after pg_resetwal
    ],
)
def test_the_history_that_a_server_sends(answer: object, timeline: int, expected: list[TimelineEnd], asked: list[str]) -> None:
    server = Answering(answer)
    assert timeline_history(server, timeline) == expected
    assert server.asked == asked


@pytest.mark.parametrize("answer", [[], [["name"]], [["name", SECOND], ["name", SECOND]]])
def test_an_answer_of_another_shape_is_refused(answer: list[list[str]]) -> None:
    with pytest.raises(ProtocolError, match="TIMELINE_HISTORY 2 is not one row with two columns"):
        timeline_history(Answering(answer), 2)


def test_another_error_of_the_server_is_an_error() -> None:
    with pytest.raises(ServerError, match="permission denied"):
        timeline_history(Answering(ServerError("permission denied", sqlstate="42501")), 2)

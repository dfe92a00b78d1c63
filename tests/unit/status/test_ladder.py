"""The lag of each stage, in bytes and in seconds."""

import pytest

from spark_sink.client.slot_monitor import SlotReport
from spark_sink.staging.account import Account
from spark_sink.staging.commit_times import CommitTimes
from spark_sink.staging.log import Position
from spark_sink.status import ladder


class Times(CommitTimes):
    """Transactions made by hand: end LSN → commit time."""

    def __init__(self, **transactions: float) -> None:
        super().__init__([])
        self._transactions = {int(end[1:]): at for end, at in transactions.items()}

    def newest(self, lsn: int) -> float | None:
        return max((at for end, at in self._transactions.items() if end <= lsn), default=None)

    def oldest_after(self, lsn: int) -> float | None:
        return min((at for end, at in self._transactions.items() if end > lsn), default=None)


def report(wal: int, sent: int | None = None, confirmed: int | None = None) -> SlotReport:
    return SlotReport({}, wal, sent, confirmed)


TIMES = Times(_100=10.0, _200=20.0, _300=30.0)
NOW = 50.0


@pytest.mark.parametrize(
    ("server", "known", "tables", "expected"),
    [
        pytest.param(report(300, 300, 300), 0, (300, 300), (0, 0, 0, 0, 0, 0), id="all are where the server is"),
        pytest.param(report(900, 900, 900), 900, (300, 300), (0, 0, 0, 0, 0, 0), id="idle: only the server goes on"),
        pytest.param(report(900, 900, 900), 900, (200, 100), (0, 0, 0, 0, 700, 800), id="tables lack what the log has"),
        pytest.param(report(900, 900, 300), 0, (200, 200), (0, 0, 600, 600, 700, 700), id="replica as far as changelog"),
        pytest.param(report(400, None, 300), 0, (300, 300), (0, None, 100, 100, 100, 100), id="nobody streams"),
        pytest.param(report(900, None, 900), 600, (300, 300), (0, None, 0, 300, 300, 300), id="another program moved the slot"),
        pytest.param(report(900, None, 900), 0, (300, 300), (0, None, 0, 600, 600, 600), id="the same, and nothing is recorded"),
        pytest.param(None, 0, (300, 200), (0, 0, 100), id="nobody was asked"),
        pytest.param(None, 0, (None, None), (0, None, None), id="no tables yet"),
    ],
)
def test_ladder_in_bytes(
    server: SlotReport | None, known: int, tables: tuple[int | None, ...], expected: tuple[int | None, ...]
) -> None:
    positions = [None if lsn is None else Position(1, lsn) for lsn in tables]
    lowest = zip(("changelog", "replica"), positions, strict=True)
    rungs = ladder.build(server, Position(1, 300), lowest, TIMES, NOW, Account(known, NOW))
    assert tuple(rung.behind_bytes for rung in rungs) == expected
    assert [rung.name for rung in rungs] == ["server", "sent", "confirmed", "sealed", "changelog", "replica"][-len(expected) :]


def test_a_slot_that_was_moved_does_not_tell_what_the_log_has() -> None:
    rung = ladder.build(report(900, None, 900), Position(1, 300), [], TIMES, NOW, Account())[-1]
    assert (rung.name, rung.behind_bytes) == ("sealed", 600)


def test_ladder_in_seconds() -> None:
    def seconds(server: SlotReport | None, changelog: int) -> dict[str, tuple[float | None, bool]]:
        rungs = ladder.build(server, Position(1, 300), [("changelog", Position(1, changelog))], TIMES, NOW, Account())
        return {rung.name: (rung.behind_seconds, rung.at_most) for rung in rungs}

    # The oldest transaction that it lacks committed at 20, however long before that the one before it was.
    assert seconds(None, 100) == {"sealed": (0.0, False), "changelog": (30.0, False)}
    # What the log lacks is not known, but the newest that it has committed at 30.
    assert seconds(report(900, 900, 300), 300)["sealed"] == (20.0, True)
    # It has everything up to where the server was at 45, whenever the newest commit was.
    rung = ladder.build(report(900, 900, 300), Position(1, 300), [], TIMES, NOW, Account(600, 45.0))[-1]
    assert (rung.behind_bytes, rung.behind_seconds, rung.at_most) == (300, 5.0, True)
    # Likewise while the walsender works through a lot of unpublished WAL: the newest commit may be of yesterday.
    rung = ladder.build(report(900 + (20 << 20), 900, 300), Position(1, 300), [], TIMES, NOW, Account(600, 45.0))[-1]
    assert (rung.behind_seconds, rung.at_most) == (5.0, True)
    assert ladder.build(report(9), None, [], TIMES, NOW, Account())[0].behind_bytes == 0

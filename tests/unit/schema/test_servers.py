from __future__ import annotations

import pytest

from spark_sink.schema.servers import NOTHING, Servers
from spark_sink.schema.table import AFTER_ALL, Place


@pytest.mark.parametrize(
    ("place", "number", "last"),
    [
        ((0, 0), 0, (20, AFTER_ALL[0])),
        ((20, 7), 0, (20, AFTER_ALL[0])),  # the transaction that ends at a server's end is still this server's
        ((21, -1), 1, (40, AFTER_ALL[0])),
        ((40, 0), 1, (40, AFTER_ALL[0])),
        ((41, 0), 2, AFTER_ALL),
        (AFTER_ALL, 2, AFTER_ALL),
    ],
)
def test_the_server_at_a_place(place: Place, number: int, last: Place) -> None:
    servers = Servers([20, 40])
    assert servers.number(place) == number
    assert servers.last_place(place) == last
    assert servers.is_one(place, servers.last_place(place))
    assert servers.is_last(place[0]) == (number == 2)


def test_a_server_that_lost_changes_has_those_before_them() -> None:
    servers = Servers([20, 40, 60], [NOTHING, 30, 55])
    for lsn, of_each in {
        20: [True, False, False, False],
        30: [False, True, True, True],
        31: [False, True, False, False],
        41: [False, False, True, True],
        56: [False, False, True, False],
        61: [False, False, True, True],  # the third server has what is up to 55: not the changes at 56, but those at 41
    }.items():
        assert [servers.is_one((lsn, 7), (other, 0)) for other in (1, 40, 41, 61)] == of_each, lsn
    assert [servers.lost((lsn, 0)) for lsn in (40, 41, 61)] == [[], [(30, 40)], [(30, 40), (55, 60)]]
    assert [servers.is_last(lsn) for lsn in (20, 30, 31, 55, 56, 61)] == [False, True, False, True, False, True]
    # The second one goes on from among the changes that the first one had lost already.
    assert Servers([40, 60, 80], [20, 30, 35]).lost((81, 0)) == [(20, 40), (20, 60), (20, 80)]


def test_a_log_of_one_server() -> None:
    servers = Servers()
    assert servers.is_one((0, 0), AFTER_ALL)
    assert servers.is_last(0)
    assert servers.last_place((5, 3)) == AFTER_ALL

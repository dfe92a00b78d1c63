from __future__ import annotations

import pytest

from spark_sink.schema.servers import Servers
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


def test_a_log_of_one_server() -> None:
    servers = Servers()
    assert servers.is_one((0, 0), AFTER_ALL)
    assert servers.is_last(0)
    assert servers.last_place((5, 3)) == AFTER_ALL

"""The pieces in which a replica is merged when its table's key changes."""

from dataclasses import replace

import pytest

from spark_sink.replica.pieces import cut_pieces
from spark_sink.schema.table import Fill, Version
from support.descriptions import CODE, ID, NONE, version


@pytest.mark.parametrize(
    ("versions", "after_lsn", "expected"),
    [
        # One key: one piece, from wherever the replica is.
        ([version(10, 0, ID)], 0, [(ID, 0, 99, 0, None, False)]),
        ([version(10, 0, ID)], 50, [(ID, 50, 99, 0, None, False)]),
        # Between two transactions.
        ([version(10, 0, ID), version(20, 0, CODE)], 0, [(ID, 0, 19, 0, None, False), (CODE, 19, 99, 0, None, False)]),
        ([version(10, 0, ID), version(20, 0, CODE)], 19, [(CODE, 19, 99, 0, None, False)]),
        # Amid one, which stands by itself; and amid it twice.
        (
            [version(10, 0, ID), version(20, 3, CODE)],
            0,
            [
                (ID, 0, 19, 0, None, False),
                (ID, 19, 20, 0, 3, False),
                (CODE, 19, 20, 3, None, False),
                (CODE, 20, 99, 0, None, False),
            ],
        ),
        (
            [version(10, 0, ID), version(20, 3, CODE), version(20, 5, ID)],
            12,
            [
                (ID, 12, 19, 0, None, False),
                (ID, 19, 20, 0, 3, False),
                (CODE, 19, 20, 3, 5, False),
                (ID, 19, 20, 5, None, False),
                (ID, 20, 99, 0, None, False),
            ],
        ),
        ([version(10, 0, ID), version(20, 3, CODE)], 20, [(CODE, 20, 99, 0, None, False)]),
        # Another table under the name, from a transaction on and amid one.
        ([version(10, 0, ID), version(20, 0, ID, 2)], 0, [(ID, 0, 19, 0, None, False), (ID, 19, 99, 0, None, True)]),
        ([version(10, 0, ID), version(20, 0, ID, 2)], 30, [(ID, 30, 99, 0, None, False)]),
        (
            [version(10, 0, ID), version(20, 3, CODE, 2)],
            19,
            [(ID, 19, 20, 0, 3, False), (CODE, 19, 20, 3, None, True), (CODE, 20, 99, 0, None, False)],
        ),
        # Without a key: by the one that comes later; never by another table's.
        ([version(10, 0, NONE), version(20, 0, CODE)], 0, [(CODE, 0, 19, 0, None, False), (CODE, 19, 99, 0, None, False)]),
        ([version(10, 0, NONE), version(20, 0, CODE, 2)], 0, [(CODE, 19, 99, 0, None, True)]),
        ([version(10, 0, NONE)], 0, []),
        # From beyond the end: a copy came first.
        ([version(10, 0, ID), version(120, 0, CODE)], 99, []),
        ([version(10, 0, ID), version(120, 0, CODE)], 150, []),
    ],
)
def test_pieces(versions: list[Version], after_lsn: int, expected: list[tuple[object, ...]]) -> None:
    pieces = cut_pieces(versions, after_lsn, 99)
    found = [(p.key, p.after_lsn, p.until_lsn, p.first_ordinal, p.end_ordinal, p.is_new_table) for p in pieces]
    assert found == expected


@pytest.mark.parametrize(
    ("versions", "after_lsn", "expected"),
    [
        ([version(10, 0, ID), version(20, 0, CODE)], 0, [False, True]),
        ([version(10, 0, ID), version(20, 0, CODE)], 20, [False]),
        ([version(10, 0, NONE), version(20, 0, CODE)], 0, [True, True]),
        ([version(10, 0, ID), replace(version(20, 0, ID), fills=(Fill("id"),))], 0, [False, True]),
        ([version(10, 0, ID), replace(version(20, 0, ID), fills=(Fill("v"),))], 0, [False, False]),
    ],
)
def test_where_rows_from_before_may_lack_the_key(versions: list[Version], after_lsn: int, expected: list[bool]) -> None:
    assert [piece.is_new_key for piece in cut_pieces(versions, after_lsn, 99)] == expected


def test_columns_that_go_cut_nothing() -> None:
    """The replica loses them before the changes, whichever of these came before."""
    gone, again = replace(version(20, 3, ID), gone=("a",)), replace(version(30, 0, ID), fills=(Fill("a"),))
    (piece,) = cut_pieces([version(10, 0, ID), gone], 12, 99)
    assert (piece.is_plain, piece.gone) == (True, {"a"})
    (piece,) = cut_pieces([version(10, 0, ID), gone], 12, 19)
    assert piece.gone == set()
    pieces = list(cut_pieces([version(10, 0, ID), gone, again], 12, 99))
    assert [(piece.after_lsn, piece.until_lsn, set(piece.gone)) for piece in pieces] == [(12, 29, {"a"}), (29, 99, set())]

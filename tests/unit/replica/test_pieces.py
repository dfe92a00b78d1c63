"""The pieces in which a replica is merged when its table's key changes."""

import random
from dataclasses import replace

import pytest

from spark_sink.replica.pieces import cut_pieces
from spark_sink.schema.table import Fill, Version
from support.descriptions import CODE, ID, NONE, version
from support.seeds import SEED


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


def test_pieces_follow_each_other() -> None:
    """Whatever the versions, each change belongs to exactly one piece, that of its key."""
    rng = random.Random(SEED)
    for _ in range(2000):
        versions, place = [], (0, 0)
        for _ in range(rng.randint(1, 6)):
            lsn, ordinal = place
            is_amid = versions and rng.random() < 0.4
            place = (lsn, ordinal + rng.randint(1, 3)) if is_amid else (lsn + rng.randint(1, 5), rng.choice([0, 2]))
            versions.append(version(*place, rng.choice([ID, CODE]), rng.choice([1, 1, 2])))
        after_lsn, until_lsn = rng.randint(0, place[0] + 3), rng.randint(0, place[0] + 3)
        at, end = (after_lsn + 1, 0), (until_lsn + 1, 0)
        for piece in cut_pieces(versions, after_lsn, until_lsn):
            assert (piece.after_lsn + 1, piece.first_ordinal) == at
            of_version = [each for each in versions if each.place <= at][-1:] or versions[:1]
            assert piece.key == of_version[0].key
            at = (piece.until_lsn, piece.end_ordinal) if piece.end_ordinal else (piece.until_lsn + 1, 0)
        assert at == max(at, end)


def test_a_table_with_thousands_of_versions() -> None:
    """A job makes the table anew each hour, for months. Time that grows with the square of the versions would be minutes here."""
    versions = [version(10 * number, 3 * (number % 2), ID, number) for number in range(1, 5_001)]
    pieces = list(cut_pieces(versions, 0, 10 * len(versions) + 5))
    assert sum(piece.is_new_table for piece in pieces) == len(versions) - 1
    (last,) = cut_pieces(versions, 10 * len(versions), 10 * len(versions) + 5)
    assert last.is_plain

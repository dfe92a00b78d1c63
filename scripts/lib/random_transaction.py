"""One random transaction, step by step: savepoints, rollbacks to them, and all the ways in which a transaction can end.

Several of these, each advanced in turn, are overlapping transactions. The same seed gives the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

import psycopg

__all__ = ["Chances", "all_or_none", "steps"]


@dataclass(frozen=True)
class Chances:
    """The chances, at each step, of making or leaving a savepoint, and of each end of the transaction (otherwise a rollback)."""

    make: float
    leave: float
    prepare: float
    commit: float


def steps(
    rng: Random,
    run: Callable[[str], object],
    statements: Callable[[], Sequence[str]],
    gid: Callable[[], str],
    *,
    count: int,
    chances: Chances,
) -> Iterator[None]:
    """Run ``statements()`` ``count`` times: each time all of them or, if one fails, none. ``gid()`` returns a literal."""
    run("begin")
    depth = 0
    for _ in range(count):
        yield
        if rng.random() < chances.make:
            depth += 1
            run(f"savepoint s{depth}")
        if depth and rng.random() < chances.leave:
            run(f"{rng.choice(['rollback to', 'release'])} s{rng.randint(1, depth)}")
            depth = 0
        all_or_none(run, statements())
    yield
    end = rng.random()
    if end < chances.prepare:
        name = gid()
        run(f"prepare transaction {name}")
        yield
        run(f"{rng.choice(['commit', 'commit', 'rollback'])} prepared {name}")
    else:
        run("commit" if end < chances.prepare + chances.commit else "rollback")


def all_or_none(run: Callable[[str], object], statements: Sequence[str]) -> None:
    """Run the statements. If one fails with an SQL error, undo all of them."""
    run("savepoint try")
    try:
        for statement in statements:
            run(statement)
    except psycopg.Error:
        run("rollback to try")
    else:
        run("release try")

"""One random transaction, a step at a time: savepoints, rollbacks to them, and every way in which a transaction can end.

Several of them, each a step in turn, are transactions that overlap in one order, the same for the same seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

import psycopg

__all__ = ["Chances", "all_or_none", "steps"]


@dataclass(frozen=True)
class Chances:
    """How likely it is, at each step, that a savepoint is made or left, and how the transaction ends (else: rolled back)."""

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
    """Run ``count`` times all of ``statements()`` or, if one of them fails, none. ``gid()`` is a literal."""
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
    """Run the statements; of those that fail with an error of SQL, nothing stays."""
    run("savepoint try")
    try:
        for statement in statements:
            run(statement)
    except psycopg.Error:
        run("rollback to try")
    else:
        run("release try")

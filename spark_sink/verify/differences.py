"""Finds the keys for which a replica and its table differ, once the sums of some buckets have differed. No pyspark."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from pyspark.sql import DataFrame

    from spark_sink.client.checksum import ChecksumServer
    from spark_sink.verify.canonical import Canonical

    Sums = dict[str, tuple[int, int]]
    """The number of rows and the sum of their checksums for each bucket, or for each part of some buckets."""

__all__ = ["Difference", "Sides"]

_MANY_ROWS: Final = 250_000
"""If the buckets with differences have more rows, their parts are compared before rows are read: one more pass over the table. Ten
buckets have as many if the table has 100 million rows. The rows of both sides are in memory at once, some 500 bytes for each."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A key for which the two sides differ: the row is ``missing`` in the replica, ``surplus`` there, or ``changed``."""

    kind: str
    key: dict[str, str | None]


@dataclass(frozen=True, slots=True)
class Sides:
    """The two sides of a comparison: the table ``name`` on the server, and the replica's ``rows``."""

    server: ChecksumServer
    name: list[str]
    canonical: Canonical
    rows: DataFrame
    key: Sequence[str]

    def differences(self, ours: Sums, theirs: Sums, most: int) -> list[Difference]:
        """Return the first differences, at most ``most``. The sums are those of all buckets."""
        chosen = _different(ours, theirs)[:most]  # each has at least one key that differs
        if not chosen:
            return []
        if sum(max(ours.get(bucket, _NONE)[0], theirs.get(bucket, _NONE)[0]) for bucket in chosen) > _MANY_ROWS:
            self.server.send({"buckets": self.name, "key": self.key, "within": chosen})
            ours = self.canonical.checksums(self.rows, self.key, chosen)
            theirs = {part: (count, total) for part, (count, total) in self.server.receive().items()}
            chosen = _different(ours, theirs)[:most]
            if not chosen:  # a side answers otherwise now
                return []
        self.server.send({"rows": self.name, "key": self.key, "buckets": chosen})
        found = self.canonical.rows(self.rows, self.key, chosen)
        return _differences(self.key, found, self.server.receive())[:most]


_NONE: Final = (0, 0)


def _different(ours: Sums, theirs: Sums) -> list[str]:
    return sorted(bucket for bucket in ours.keys() | theirs.keys() if ours.get(bucket) != theirs.get(bucket))


def _differences(key: Sequence[str], ours: Collection[Sequence[Any]], theirs: Collection[Sequence[Any]]) -> list[Difference]:
    """Return the differences of two lists of rows, each with a key and a checksum, ordered by key."""
    here, there = (Counter(map(tuple, rows)) for rows in (ours, theirs))
    # Nearly all rows are equal. They are gone here.
    surplus, missing = (_by_key(side) for side in (here - there, there - here))
    found = []
    for values in sorted(surplus | missing, key=lambda values: tuple((len(v or ""), v or "") for v in values)):
        difference = surplus[values] - missing[values]
        kind = "changed" if difference == 0 else "missing" if difference < 0 else "surplus"
        found.append(Difference(kind, dict(zip(key, values, strict=True))))
    return found


def _by_key(rows: Counter[tuple[Any, ...]]) -> Counter[tuple[Any, ...]]:
    """Return the number of rows with each key."""
    counts: Counter[tuple[Any, ...]] = Counter()
    for row, count in rows.items():
        counts[row[:-1]] += count
    return counts

"""Tells which of the log's servers made the change at a place: only there, an OID and a column's number mean something. No I/O.

    servers = Servers([0x400])                  # dump and restore: behind 0/400 the changes are another server's
    servers.is_one((0x3F0, 0), (0x400, 7))      # True: the transaction that ends at 0/400 is the former server's
    servers.is_one((0x400, 7), (0x401, 0))      # False: an OID at one of these places is another table's at the other

A server that has lost changes (a failover, a restore) counts as another one: it gives their OIDs and numbers to other tables and
columns. But it has what was there before these changes:

    servers = Servers([0x400], [0x300])         # a failover: the standby had only what the log has up to 0/300
    servers.is_one((0x300, 0), (0x401, 0))      # True: an OID from before the lost changes is still that table's
    servers.is_one((0x301, 0), (0x401, 0))      # False

Whoever compares an OID or a column's number from one place with that of another place asks this first. The warehouse records where
the servers end (warehouse/gaps.py).
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Final

from spark_sink.schema.table import AFTER_ALL, Place

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["NOTHING", "Servers"]

NOTHING: Final = -1
"""No LSN: a server has nothing of what the log has from the one before it."""


class Servers:
    """The servers of a log, one after the other. ``ends`` are the LSNs, in order, behind which the log went on with another one.

    ``common`` has for each end the LSN up to which the server behind it has what the log has; `NOTHING` for another server, and
    for all if it is left out.
    """

    def __init__(self, ends: Iterable[int] = (), common: Iterable[int] = ()) -> None:
        self._ends = tuple(ends)
        self._common = tuple(common) or (NOTHING,) * len(self._ends)

    def number(self, place: Place) -> int:
        """Return the number of the server that made the change at a place. The first one has 0."""
        return bisect_left(self._ends, place[0])

    def is_one(self, place: Place, other: Place) -> bool:
        """Tell whether OIDs and numbers mean the same at both places: one server made, or has, the changes at both."""
        first, last = sorted((place, other))
        return all(first[0] <= lsn for lsn in self._common[self.number(first) : self.number(last)])

    def lost(self, place: Place) -> list[tuple[int, int]]:
        """Return what the server at a place has lost of the changes before it, as pairs: after this LSN, up to that one.

        An end to another server is not among them.
        """
        found: list[tuple[int, int]] = []
        for common, end in zip(self._common, self._ends, strict=True):
            if common > NOTHING and end < place[0]:
                # What an earlier server had lost up to there, this one has not got either.
                found.append((min([common, *(after for after, until in found if after < common <= until)]), end))
        return found

    def is_last(self, lsn: int) -> bool:
        """Tell whether the last server, which is that of now, made the transaction that ends at an LSN."""
        return self.is_one((lsn, 0), AFTER_ALL)

    def last_place(self, place: Place) -> Place:
        """Return the last place of the server at ``place``: it is behind all of this server's changes."""
        number = self.number(place)
        return (self._ends[number], AFTER_ALL[0]) if number < len(self._ends) else AFTER_ALL

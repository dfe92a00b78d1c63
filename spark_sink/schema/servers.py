"""Tells which of the log's servers made the change at a place: only there, an OID and a column's number mean something. No I/O.

    servers = Servers([0x400])                  # a failover without the slot: behind 0/400 the changes are another server's
    servers.is_one((0x3F0, 0), (0x400, 7))      # True: the transaction that ends at 0/400 is the former server's
    servers.is_one((0x400, 7), (0x401, 0))      # False: an OID at one of these places is another table's at the other

Whoever compares an OID or a column's number from one place with that of another place asks this first. The warehouse records where
the servers end (warehouse/gaps.py).
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from spark_sink.schema.table import AFTER_ALL, Place

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Servers"]


class Servers:
    """The servers of a log, one after the other. ``ends`` are the LSNs, in order, behind which the log went on with another one."""

    def __init__(self, ends: Iterable[int] = ()) -> None:
        self._ends = tuple(ends)

    def number(self, place: Place) -> int:
        """Return the number of the server that made the change at a place. The first one has 0."""
        return bisect_left(self._ends, place[0])

    def is_one(self, place: Place, other: Place) -> bool:
        """Tell whether one server made the changes at both places."""
        return self.number(place) == self.number(other)

    def is_last(self, lsn: int) -> bool:
        """Tell whether the last server, which is that of now, made the transaction that ends at an LSN."""
        return self.is_one((lsn, 0), AFTER_ALL)

    def last_place(self, place: Place) -> Place:
        """Return the last place of the server at ``place``: it is behind all of this server's changes."""
        number = self.number(place)
        return (self._ends[number], AFTER_ALL[0]) if number < len(self._ends) else AFTER_ALL

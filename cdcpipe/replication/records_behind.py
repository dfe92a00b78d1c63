"""Records that are outstanding although no comparison of positions tells so. See rule 5 of `cdcpipe.replication.progress`.

Of some output plugins' records only the beginning is known. A transaction that began early and commits late begins before positions
that were confirmed meanwhile. Transactions come in the order of their commits. So feedback is for such a record if it names the
record's own position, or a position beyond everything that was there before the record. No I/O.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

__all__ = ["RecordsBehind"]


class _Record(NamedTuple):
    number: int
    lsn: int
    before: int


class RecordsBehind:
    """The records, in the order in which they are written; each has a number. At most ``most`` of them are remembered."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._records: deque[_Record] = deque()

    def __bool__(self) -> bool:
        """Tell whether a record is outstanding."""
        return bool(self._records)

    def add(self, number: int, lsn: int, before: int) -> None:
        """Add a record at ``lsn`` that came after everything up to ``before``."""
        if self._records and self._records[-1].lsn == lsn:  # all rows of one COPY
            self._records.pop()
        self._records.append(_Record(number, lsn, before))
        if len(self._records) > self._most:
            self._records.popleft()  # the later ones are outstanding for longer

    def confirm(self, lsn: int, written: int) -> None:
        """Drop the records that feedback is for, and those before them. Only the first ``written`` records are written."""
        for record in reversed(self._records):
            if record.number <= written and (lsn == record.lsn or lsn > record.before):
                self.confirm_all(record.number)
                return

    def confirm_all(self, written: int) -> None:
        """Drop the first ``written`` records."""
        while self._records and self._records[0].number <= written:
            self._records.popleft()

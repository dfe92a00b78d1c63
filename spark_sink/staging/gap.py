"""A gap of the log: changes that it lacks, or that it has although they never happened. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cdcpipe.lsn import LSN, format_lsn
from cdcpipe.units import counted

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Gap", "LostChanges"]


@dataclass(frozen=True, slots=True)
class LostChanges:
    """How many changes the log has that never happened on the server that was promoted or restored."""

    transactions: int
    rows: Mapping[str, int]
    """The number of changes of each table ("schema.table")."""
    end_lsn: int
    """The end of the last of these transactions."""
    is_complete: bool = True
    """False if there were more, in segments that were removed because all readers had them."""

    def __str__(self) -> str:
        """Return the counts for a message."""
        most = sorted(self.rows.items(), key=lambda each: -each[1])
        named = [f"{name}: {count}" for name, count in most[:_MOST_TABLES]]
        if len(most) > _MOST_TABLES:
            named.append(f"{len(most) - _MOST_TABLES} more tables: {sum(count for _, count in most[_MOST_TABLES:])}")
        what = counted(self.transactions, "transaction")
        changes = f", changes of {', '.join(named)}" if named else ""
        return f"{'' if self.is_complete else 'at least '}{what} up to {format_lsn(self.end_lsn)}{changes}"

    def to_json(self) -> dict[str, Any]:
        """Return the counts as a JSON object."""
        return {
            "transactions": self.transactions,
            "rows": dict(self.rows),
            "end": format_lsn(self.end_lsn),
            "complete": self.is_complete,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> LostChanges:
        """Read the object of `to_json`; raise ValueError, KeyError or TypeError for anything else."""
        rows = {str(name): int(count) for name, count in value["rows"].items()}
        return cls(int(value["transactions"]), rows, int(LSN.parse(value["end"])), bool(value["complete"]))


_MOST_TABLES = 5
"""How many tables a message names."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Changes that the log lacks, or has although they never happened: those between ``after_lsn`` and the epoch's start.

    Tables that were copied at the epoch's start or later are right again.
    """

    after_lsn: int
    """The log is right up to this LSN."""
    cause: str
    """What has happened, in one sentence."""
    since: float
    """When the log was last known to be right, in seconds since 1970."""
    found: float
    """When the gap was found, in seconds since 1970."""
    is_divergence: bool = False
    """Whether the log, or the tables alone, have changes that never happened on the server that was promoted or restored."""
    lost: LostChanges | None = None
    """With ``is_divergence``: how many changes these are, if they were counted."""

    def to_json(self) -> dict[str, Any]:
        """Return the gap as a JSON object."""
        value: dict[str, Any] = {"after": format_lsn(self.after_lsn), "cause": self.cause, "since": self.since, "found": self.found}
        if self.is_divergence:
            value["diverged"] = True
        if self.lost is not None:
            value["lost"] = self.lost.to_json()
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Gap:
        """Read the object of `to_json`; raise ValueError, KeyError or TypeError for anything else."""
        after_lsn = int(LSN.parse(value["after"]))
        lost = None if value.get("lost") is None else LostChanges.from_json(value["lost"])
        since, found = float(value["since"]), float(value["found"])
        return cls(after_lsn, str(value["cause"]), since, found, bool(value.get("diverged")), lost)

"""The findings of a doctor: their JSON form, and their lines for people. Both command lines print them.

A check yields verdicts. A verdict together with the check's name is a finding:

    {"level": "warning", "check": "server.wal_limit", "subject": null, "message": "max_slot_wal_keep_size is unlimited",
     "why": "a slot that nobody reads fills the server's disk", "fix": "ALTER SYSTEM SET max_slot_wal_keep_size = '64GB'; …"}

``why`` and ``fix`` are null if everything is in order. ``subject`` is the table, slot or server concerned, if there are several.
docs/operations/doctor.md documents this form and the names.
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from cdcpipe.printable import json_text, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

__all__ = [
    "VERSION",
    "Finding",
    "Level",
    "Verdict",
    "error",
    "examine",
    "has_errors",
    "named",
    "ok",
    "parse",
    "printed",
    "render",
    "report",
    "warning",
]

VERSION: Final = 1
"""The version of the JSON object."""

_SHOWN_OF_A_KIND: Final = 10
"""The number of findings of one check and level that are shown as lines. The others are only counted."""

_Facts = TypeVar("_Facts")


class Level(enum.StrEnum):
    """How severe a finding is. An error stops a stream or breaks an application. A warning may do so later."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One result of a check.

    ``message`` is the observation, ``why`` the reason that it matters, ``fix`` the SQL or the command that solves the problem.
    """

    level: Level
    message: str
    why: str | None = None
    fix: str | None = None
    subject: str | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """A verdict, and the name of the check that gave it (``server.wal_level``)."""

    level: Level
    check: str
    subject: str | None
    message: str
    why: str | None
    fix: str | None

    @property
    def line(self) -> str:
        """The finding as one line of text."""
        about = f"{self.subject}: " if self.subject else ""
        why = f": {self.why}" if self.why else ""
        fix = f". Fix: {self.fix}" if self.fix else ""
        return f"{about}{self.message}{why}{fix}"


def ok(message: str, *, subject: str | None = None) -> Verdict:
    """Return the verdict that something is in order."""
    return Verdict(Level.OK, message, subject=subject)


def warning(message: str, why: str, fix: str, *, subject: str | None = None) -> Verdict:
    """Return the verdict that something may go wrong later."""
    return Verdict(Level.WARNING, message, why, fix, subject)


def error(message: str, why: str, fix: str, *, subject: str | None = None) -> Verdict:
    """Return the verdict that something does go wrong."""
    return Verdict(Level.ERROR, message, why, fix, subject)


def examine(checks: Mapping[str, Callable[[_Facts], Iterable[Verdict]]], facts: _Facts) -> list[Finding]:
    """Run the checks in their order, and return their findings."""
    return [finding for name, check in checks.items() for finding in named(name, check(facts))]


def named(check: str, verdicts: Iterable[Verdict]) -> Iterator[Finding]:
    """Yield the findings of a check that gave these verdicts."""
    for verdict in verdicts:
        yield Finding(verdict.level, check, verdict.subject, verdict.message, verdict.why, verdict.fix)


def report(findings: Sequence[Finding], **facts: Any) -> dict[str, Any]:
    """Return the JSON object: the findings, the number of findings of each level, and ``facts``."""
    levels = Counter(finding.level for finding in findings)
    return {
        "version": VERSION,
        **facts,
        "counts": {level.value: levels[level] for level in Level},
        "findings": [asdict(finding) for finding in findings],
    }


def has_errors(findings: Iterable[Finding]) -> bool:
    """Return whether one of the findings is an error. A command that examines something then ends with exit code 1.

    Other commands end with 1 if their arguments are invalid. Many programs that check something use 1 as this one does.
    """
    return any(finding.level is Level.ERROR for finding in findings)


def printed(findings: Sequence[Finding], *, as_json: bool, **facts: Any) -> str:
    """Return what a command prints: the JSON object of `report`, or the lines of `render`."""
    return json_text(report(findings, **facts), indent=1) if as_json else "\n".join(render(findings))


def parse(found: Mapping[str, Any]) -> list[Finding]:
    """Return the findings in a JSON object that `report` made. Raises ValueError, KeyError or TypeError for any other object."""
    if found["version"] != VERSION:
        raise ValueError(f"version {found['version']!r}")
    return [Finding(**{**each, "level": Level(each["level"])}) for each in found["findings"]]


def render(findings: Sequence[Finding]) -> list[str]:
    """Return a line for each finding, and a last line that counts them. Of many findings of one kind, only the first are shown."""
    width = max((len(finding.check) for finding in findings), default=0)
    lines: list[str] = []
    kinds: Counter[tuple[str, Level]] = Counter((finding.check, finding.level) for finding in findings)
    shown: Counter[tuple[str, Level]] = Counter()
    for finding in findings:
        kind = finding.check, finding.level
        shown[kind] += 1
        if shown[kind] <= _SHOWN_OF_A_KIND:
            lines.append(f"{finding.level:7}  {finding.check:{width}}  {finding.line}")
        elif shown[kind] == kinds[kind]:
            more = kinds[kind] - _SHOWN_OF_A_KIND
            lines.append(f"{finding.level:7}  {finding.check:{width}}  and {more} more: --json has them all")
    levels = Counter(finding.level for finding in findings)
    return [*map(printable, lines), f"errors: {levels[Level.ERROR]}, warnings: {levels[Level.WARNING]}, ok: {levels[Level.OK]}"]

"""The history of a server's timeline: at which positions of the WAL it left the timelines before.

Source: the manual, "Streaming Replication Protocol", TIMELINE_HISTORY; for the content of the file also ``readTimeLineHistory`` in
PostgreSQL's ``timeline.c``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from cdcpipe import sqlstate
from cdcpipe.errors import ProtocolError, ServerError
from cdcpipe.libpq.walsender import Walsender
from cdcpipe.lsn import LSN

__all__ = ["TimelineEnd", "parse_timeline_history", "timeline_history"]

_LINE = re.compile(r"\s*([0-9]{1,10})\s+([0-9A-Fa-f]{1,8}/[0-9A-Fa-f]{1,8})(?:\s.*)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class TimelineEnd:
    """A timeline that the server has left. Its WAL is the server's WAL up to ``end_lsn``, and from the end before it on."""

    timeline: int
    end_lsn: LSN


def timeline_history(walsender: Walsender, timeline: int) -> list[TimelineEnd]:
    """Ask for the timelines that the server has left, in order, the first one first. ``timeline`` is the server's own.

    The list is empty on timeline 1, which has no history. It is also empty if the server has no file with the history, for example
    after pg_resetwal: PostgreSQL itself then assumes that no timeline came before. Raises ProtocolError for a malformed file.
    """
    if timeline <= 1:
        return []
    try:
        rows = walsender.execute(f"TIMELINE_HISTORY {timeline}")
    except ServerError as ex:
        if ex.sqlstate == sqlstate.UNDEFINED_FILE:
            return []
        raise
    if len(rows) != 1 or len(rows[0]) != 2:
        msg = f"the server's answer to TIMELINE_HISTORY {timeline} is not one row with two columns"
        raise ProtocolError(msg)
    return parse_timeline_history(rows[0][1] or "", timeline)


def parse_timeline_history(text: str, timeline: int) -> list[TimelineEnd]:
    r"""Read the file with the history of a timeline: a line ``TIMELINE\tEND_LSN\tREASON`` for each timeline before it.

    As in PostgreSQL, empty lines and those with ``#`` do not count, and the timelines rise. Any other text raises ProtocolError.
    """
    ends: list[TimelineEnd] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            msg = f"line {number} of the history of timeline {timeline} is not TIMELINE END_LSN REASON"
            raise ProtocolError(msg)
        end = TimelineEnd(int(match[1]), LSN.parse(match[2]))
        if not (ends[-1].timeline if ends else 0) < end.timeline < timeline:
            msg = f"line {number} of the history of timeline {timeline} has timeline {end.timeline}, which is out of order"
            raise ProtocolError(msg)
        ends.append(end)
    return ends

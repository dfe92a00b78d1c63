"""Compares the result of `describe` with limits, like a Nagios plugin: returns a state, one line, and the numbers. No I/O.

    CDCPIPE WARNING: shop_cdc is 75 s behind (limit 60 s) | lag=75s;60;300;0; lag_bytes=1048576B;;;0;

The exit code is the state: 0 OK, 1 WARNING, 2 CRITICAL, 3 UNKNOWN. UNKNOWN is for values that cannot be determined, such as a lag
while the server does not answer. Source: the Nagios Plugin Development Guidelines.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from cdcpipe.lsn import LSN
from cdcpipe.pipe.exitcode import ExitCode
from cdcpipe.printable import printable
from cdcpipe.units import format_duration, format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["Alert", "Limit", "Limits", "State", "judge", "moved_slot", "unknown"]

_ON_THE_WAY_BYTES: Final = 16 << 20
"""A walsender that is at most this far behind (one WAL segment) counts as up to date: the rest of the WAL is only just written."""


class State(enum.IntEnum):
    """The states of monitoring systems. The numbers are exit codes."""

    OK = 0
    WARNING = 1
    CRITICAL = 2
    UNKNOWN = 3


_SEVERITY: Final = (State.OK, State.WARNING, State.UNKNOWN, State.CRITICAL)


@dataclass(frozen=True, slots=True)
class Limit:
    """A value above ``critical`` is CRITICAL, a value above ``warning`` is WARNING. If ``warning`` is None, no value is WARNING."""

    critical: float
    warning: float | None = None

    def state(self, value: float) -> State:
        """Return the state for a value."""
        if value > self.critical:
            return State.CRITICAL
        return State.WARNING if self.warning is not None and value > self.warning else State.OK


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits to check: a lag in seconds, a lag in bytes of WAL, and how much WAL the server keeps for the slot."""

    lag_s: Limit | None = None
    lag_bytes: Limit | None = None
    wal_bytes: Limit | None = None


@dataclass(slots=True)
class Alert:
    """The findings, each with its state, and the numbers behind them."""

    found: list[tuple[State, str]] = field(default_factory=list)
    numbers: list[str] = field(default_factory=list)

    @property
    def state(self) -> State:
        """The worst state of the findings."""
        return max((state for state, _ in self.found), key=_SEVERITY.index, default=State.OK)

    @property
    def worst_first(self) -> list[tuple[State, str]]:
        """The findings, the worst first."""
        return sorted(self.found, key=lambda each: _SEVERITY.index(each[0]), reverse=True)

    @property
    def line(self) -> str:
        """The line that a plugin prints. ``|`` is replaced in texts, because it starts the numbers."""
        words = "; ".join(words for _, words in self.worst_first)
        numbers = f" | {' '.join(self.numbers)}" if self.numbers else ""
        return f"CDCPIPE {self.state.name}: {printable(' '.join(words.replace('|', '/').split()))}{numbers}"

    def add(self, state: State, words: str) -> None:
        """Add a finding."""
        self.found.append((state, words))

    def measure(self, name: str, value: float, unit: str, limit: Limit | None, text: str, show: Callable[[float], str]) -> None:
        """Compare a value with its limit, and add it to the numbers."""
        shown = f"{value:.3f}".rstrip("0").rstrip(".")
        if limit is None:
            self.numbers.append(f"{name}={shown}{unit};;;0;")
            self.add(State.OK, text)
            return
        self.numbers.append(
            f"{name}={shown}{unit};{'' if limit.warning is None else f'{limit.warning:.15g}'};{limit.critical:.15g};0;"
        )
        state = limit.state(value)
        exceeded = limit.critical if state == State.CRITICAL else limit.warning
        self.add(state, text if state == State.OK or exceeded is None else f"{text} (limit {show(exceeded)})")


def unknown(words: str) -> Alert:
    """Return an alert with the state UNKNOWN."""
    return Alert([(State.UNKNOWN, words)])


def judge(found: Mapping[str, Any], limits: Limits) -> Alert:
    """Return the alert for a result of `describe`."""
    alert = Alert()
    if found["server_error_code"] == ExitCode.SLOT_NOT_EXIST:
        alert.add(State.CRITICAL, _missing_slot(found))
    elif found["server_error"] is not None:
        alert.add(State.UNKNOWN, f"the server can't be asked: {found['server_error']}")
    if found["source"] is None:
        alert.add(State.UNKNOWN, f"{found['staging']} has no log yet")
        return alert
    _judge_ending(alert, found)
    _judge_gaps(alert, found)
    _judge_waiting(alert, found["waiting"])
    if found["server_error"] is None:
        slot = found["source"]["slot"]
        _judge_silence(alert, found, limits)
        if words := moved_slot(found):
            alert.add(State.CRITICAL, words)
        _judge_other_reader(alert, found)
        _judge_lag(alert, found, limits)
        _judge_wal(alert, found["server"], slot, limits.wal_bytes)
    return alert


def _missing_slot(found: Mapping[str, Any]) -> str:
    """Say that the server has answered, but has no such slot. It does not say which server it is."""
    has = "" if found["account"] is None else f"; the log has everything only up to {found['account']}"
    return f"{found['server_error']}: later changes are lost, unless this is the wrong server{has}"


def _judge_silence(alert: Alert, found: Mapping[str, Any], limits: Limits) -> None:
    """Add a finding if nobody asked the server for what only the server knows."""
    has_limit = any(limit is not None for limit in (limits.lag_s, limits.lag_bytes, limits.wal_bytes))
    if found["server"] is None and (has_limit or found["launcher"] is None):
        words = "only the server knows what the log lacks, and how much WAL is kept: name it with -d, or another connection option"
        alert.add(State.UNKNOWN if has_limit else State.WARNING, words)


def moved_slot(found: Mapping[str, Any]) -> str:
    """Say that the slot is beyond what the log has: the server may not send the changes in between again. Empty if it is not.

    The launcher confirms nothing beyond its account. It says the same when it starts, and calls it a gap.
    """
    server = found["server"]
    confirmed, known = (None, None) if server is None else (server["confirmed_flush_lsn"], found["account"])
    if confirmed is None or known is None or LSN.parse(confirmed) <= LSN.parse(known):
        return ""
    return (
        f"slot {found['source']['slot']} is at {confirmed}, but the log has everything only up to {known}:"
        " the slot was made anew or moved, or this directory is an older copy; the log lacks the changes in between"
    )


def _judge_ending(alert: Alert, found: Mapping[str, Any]) -> None:
    """Add a finding if an error ended the launcher. Without an error the stop may be intended: then the lag is judged.

    An error from before the last start ended an earlier launcher. If the last one was killed, it recorded nothing.
    """
    error, start = found["last_error"], found["last_start"]
    if found["launcher"] is not None:
        return
    if error is not None and (start is None or error["time"] >= start):
        alert.add(State.CRITICAL, f"cdcpipe-spark {error['command']} ended at {error['time']}: {error['message']}")
    elif found["server"] is None and found["server_error"] is None:
        alert.add(State.WARNING, "no launcher is running")


def _judge_gaps(alert: Alert, found: Mapping[str, Any]) -> None:
    """Add a finding if changes are missing from the tables."""
    if found["warehouse"] is not None and found["gaps"] and found["gaps"][-1]["healed"] is None:
        gap = found["gaps"][-1]
        alert.add(State.CRITICAL, f"the tables lack changes from {gap['after']} to {gap['start']}, and were not copied since")


def _judge_waiting(alert: Alert, waiting: Sequence[Mapping[str, Any]]) -> None:
    """Add a finding if tables wait for a copy of their rows."""
    if waiting:
        first, others = waiting[0], len(waiting) - 1
        why = "; ".join(each["reason"] for each in first["reasons"])
        failed = f", and copying it has failed {first['failures']} times" if first["failures"] else ""
        more = f"; and {others} more" if others else ""
        alert.add(State.WARNING, f"table {first['table']} waits for a copy of its rows: {why}{failed}{more}")


def _judge_other_reader(alert: Alert, found: Mapping[str, Any]) -> None:
    """Add a finding if another program may stream from the slot: what it confirms is lost for the log.

    After the machine of a launcher has lost its power or its network, the server holds the slot until wal_sender_timeout.
    """
    server = found["server"]
    if found["launcher"] is None and server is not None and server["active"]:
        who = "another program streams from it, or the server still has the connection of a launcher that has ended"
        alert.add(State.WARNING, f"slot {found['source']['slot']} is in use, but no launcher runs here: {who}")


def _judge_lag(alert: Alert, found: Mapping[str, Any], limits: Limits) -> None:
    """Judge the stage that is furthest behind: behind the server, or behind the log if the server was not asked.

    The log stays as it is while a launcher does not reach its server. So it does not tell that a limit is kept.
    """
    ladder, slot = found["ladder"], found["source"]["slot"]
    behind = "behind the log" if found["server"] is None else "behind"
    missing = [rung["rung"] for rung in ladder if rung["position"] is None and rung["rung"] != "sent"]
    seconds = [_seconds(rung, found) for rung in ladder if rung["behind_seconds"] is not None]
    sizes = [rung["behind_bytes"] for rung in ladder if rung["behind_bytes"] is not None]
    is_untimed = any(rung["behind_seconds"] is None and rung["behind_bytes"] for rung in ladder)
    if seconds:
        alert.measure(
            "lag", max(seconds), "s", limits.lag_s, f"{slot} is {format_duration(max(seconds))} {behind}", format_duration
        )
    if sizes:
        alert.measure("lag_bytes", max(sizes), "B", limits.lag_bytes, f"{format_size(max(sizes))} of WAL {behind}", format_size)
    if missing and (limits.lag_s is not None or limits.lag_bytes is not None):
        alert.add(State.UNKNOWN, f"nobody knows how far {', '.join(missing)} is")
    elif limits.lag_s and (is_untimed or not seconds):
        alert.add(State.UNKNOWN, "nobody knows for how long it has been behind")


def _seconds(rung: Mapping[str, Any], found: Mapping[str, Any]) -> float:
    """Return for how long a stage is known to be behind.

    Of the changes that have just been sent, those count that have come, for as long as they have waited to be sealed. Without a
    launcher, what the server sends does not come here.
    """
    seconds: float = rung["behind_seconds"]
    if found["launcher"] is None or not _is_on_the_way(rung, found["ladder"]):
        return seconds
    return min(seconds, found["epochs"][-1]["open_seconds"] or 0.0)


def _is_on_the_way(rung: Mapping[str, Any], ladder: list[Mapping[str, Any]]) -> bool:
    """Tell whether the changes that a stage lacks have just been sent to it.

    If the log lacks them, too, ``behind_seconds`` is only an upper limit: the age of the log's newest transaction. That can be
    hours if the published tables rarely change.
    """
    sent = next((each["behind_bytes"] for each in ladder if each["rung"] == "sent"), None)
    return bool(rung["at_most"]) and sent is not None and sent <= _ON_THE_WAY_BYTES


def _judge_wal(alert: Alert, server: Mapping[str, Any] | None, slot: str, limit: Limit | None) -> None:
    """Judge how much WAL the server keeps for the slot, and whether the server will continue to keep it."""
    if server is None:
        return
    if server["wal_status"] in ("lost", "unreserved"):
        alert.add(State.CRITICAL, f"slot {slot} is {'lost' if server['wal_status'] == 'lost' else 'about to be lost'}")
    if server["restart_lsn"] is not None:
        kept = max(LSN.parse(server["wal_lsn"]) - LSN.parse(server["restart_lsn"]), 0)
        alert.measure("wal", kept, "B", limit, f"the server keeps {format_size(kept)} of WAL", format_size)

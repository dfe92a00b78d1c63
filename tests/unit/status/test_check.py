"""`cdcpipe-spark status --check`: which state follows from which facts, and the line of a monitoring plugin."""

from typing import Any

import pytest

from spark_sink.commands.parameters import limit
from spark_sink.status.check import Alert, Limit, Limits, State, judge, unknown

KB = 1 << 10
ERROR = {"time": "2026-03-01T12:00:00Z", "command": "run", "message": "the disk is full | really", "hint": None, "exit_code": 7}


def rung(name: str, behind: int | None = 0, seconds: float | None = 0.0, *, at_most: bool = False) -> dict[str, Any]:
    position = None if behind is None else "1:0/100"
    return {"rung": name, "position": position, "behind_bytes": behind, "behind_seconds": seconds, "at_most": at_most}


SERVER = {
    "wal_lsn": "0/3000000",
    "confirmed_flush_lsn": "0/2000000",
    "restart_lsn": "0/1000000",
    "wal_status": "reserved",
    "active": False,
}
BEHIND = [rung("server"), rung("sent"), rung("confirmed"), rung("sealed"), rung("changelog", 10 * KB, 75.0)]


def found(*ladder: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return what `describe` returns, with the parts that these tests need."""
    known: dict[str, Any] = {
        "staging": "/srv/staging",
        "launcher": {"pid": 1},
        "last_start": "2026-03-01T11:00:00Z",
        "last_error": None,
        "source": {"slot": "shop_cdc"},
        "server": SERVER,
        "server_error": None,
        "server_error_code": None,
        "account": "0/2000000",
        "warehouse": None,
        "gaps": [],
        "waiting": [],
        "ladder": list(ladder) or BEHIND,
        "epochs": [{"open_seconds": None}],
    }
    return known | changes


def waiting(table: str, failures: int = 0) -> dict[str, Any]:
    return {"table": table, "reasons": [{"reason": "it was renamed"}], "failures": failures}


OK, WARNING, CRITICAL, UNKNOWN = State
S60, S60_300, B1K = Limit(60.0), Limit(300.0, 60.0), Limit(1 * KB)

CASES = [
    pytest.param(found(), Limits(), OK, "shop_cdc is 75 s behind; 10.0 KiB of WAL behind; the server keeps 32.0", id="no limits"),
    pytest.param(found(), Limits(lag_s=Limit(75.0)), OK, "75 s", id="a limit is what is still well"),
    pytest.param(found(), Limits(lag_s=S60), CRITICAL, "75 s behind (limit 60 s)", id="lag in seconds"),
    pytest.param(found(), Limits(lag_s=S60_300), WARNING, "75 s behind (limit 60 s)", id="beyond the first of two"),
    pytest.param(
        found(rung("server"), rung("sealed", 1, 301.0)), Limits(lag_s=S60_300), CRITICAL, "(limit 5 min)", id="beyond both"
    ),
    pytest.param(found(), Limits(lag_bytes=B1K), CRITICAL, "10.0 KiB of WAL behind (limit 1.0 KiB)", id="lag in bytes"),
    pytest.param(found(), Limits(wal_bytes=Limit(32 << 20)), OK, "keeps 32.0 MiB", id="WAL"),
    pytest.param(found(), Limits(wal_bytes=Limit(31 << 20)), CRITICAL, "keeps 32.0 MiB of WAL (limit 31.0 MiB)", id="too much WAL"),
    pytest.param(
        found(server=SERVER | {"wal_status": "lost", "restart_lsn": None}), Limits(), CRITICAL, "slot shop_cdc is lost", id="lost"
    ),
    pytest.param(
        found(server=SERVER | {"wal_status": "unreserved"}), Limits(), CRITICAL, "about to be lost", id="about to be lost"
    ),
    pytest.param(found(account=None), Limits(), OK, "75 s", id="an old log without an account"),
    pytest.param(found(server=SERVER | {"confirmed_flush_lsn": None}), Limits(), OK, "75 s", id="the slot is being created"),
    pytest.param(
        found(account="0/1FFFFFF"),
        Limits(),
        CRITICAL,
        "slot shop_cdc is at 0/2000000, but the log has everything only up to 0/1FFFFFF",
        id="somebody has moved the slot",
    ),
    pytest.param(found(server_error="no answer"), Limits(lag_s=S60), UNKNOWN, "can't be asked: no answer", id="no server"),
    pytest.param(
        found(server_error="no answer", launcher=None, last_error=ERROR),
        Limits(lag_s=S60),
        CRITICAL,
        "cdcpipe-spark run ended at 2026-03-01T12:00:00Z: the disk is full / really; the server can't be asked: no answer",
        id="no server, and ended with an error",
    ),
    pytest.param(
        found(server_error="no answer", warehouse="w", gaps=[{"after": "1:0/1", "start": "2:0/5", "healed": None}]),
        Limits(lag_s=S60),
        CRITICAL,
        "the tables lack changes from 1:0/1 to 2:0/5",
        id="no server, and a gap",
    ),
    pytest.param(
        found(server_error="no answer", launcher=None, server=None),
        Limits(),
        UNKNOWN,
        "can't be asked",
        id="no server, nobody runs",
    ),
    pytest.param(
        found(server_error="replication slot 's' does not exist", server_error_code=8, server=None, launcher=None),
        Limits(lag_s=S60),
        CRITICAL,
        "'s' does not exist: later changes are lost, unless this is the wrong server; the log has everything only up to 0/2000000",
        id="the slot is gone",
    ),
    pytest.param(found(source=None), Limits(), UNKNOWN, "/srv/staging has no log yet", id="no log"),
    pytest.param(found(launcher=None), Limits(), OK, "75 s", id="nobody runs, and the lag tells"),
    pytest.param(found(launcher=None, server=None), Limits(), WARNING, "no launcher is running", id="nobody runs, nobody knows"),
    pytest.param(found(server=None), Limits(wal_bytes=B1K), UNKNOWN, "only the server knows", id="WAL without a server"),
    pytest.param(
        found(rung("sealed"), rung("changelog"), server=None),
        Limits(lag_s=S60),
        UNKNOWN,
        "name it with -d, or another connection option; shop_cdc is 0 s behind the log;",
        id="lag in seconds without a server",
    ),
    pytest.param(found(rung("sealed"), server=None), Limits(lag_bytes=B1K), UNKNOWN, "lacks", id="lag in bytes without a server"),
    pytest.param(
        found(server=None, launcher=None, last_error=ERROR), Limits(lag_s=Limit(100.0)), CRITICAL, "lacks", id="ended, no server"
    ),
    pytest.param(found(server=None), Limits(lag_s=S60), CRITICAL, "75 s behind the log (limit 60 s)", id="the log tells enough"),
    pytest.param(found(server=None), Limits(), OK, "10.0 KiB of WAL behind the log", id="without a server and limits"),
    pytest.param(found(launcher=None, last_error=ERROR), Limits(), CRITICAL, "run ended at 2026", id="ended with an error"),
    pytest.param(found(last_error=ERROR), Limits(), OK, "75 s", id="an error, and a launcher since then"),
    pytest.param(
        found(launcher=None, last_error=ERROR, last_start="2026-03-01T12:00:01Z"),
        Limits(lag_s=Limit(100.0)),
        OK,
        "75 s",
        id="an error, and a launcher since then, which was killed",
    ),
    pytest.param(
        found(launcher=None, last_error=ERROR, last_start=None), Limits(), CRITICAL, "run ended at 2026", id="an unsigned lock"
    ),
    pytest.param(found(rung("sealed"), rung("changelog", None, None)), Limits(lag_s=S60), UNKNOWN, "changelog", id="no tables yet"),
    pytest.param(found(rung("sealed"), rung("changelog", None, None)), Limits(), OK, "0 s behind", id="no tables, no limit"),
    pytest.param(found(rung("server"), rung("sent", None, None)), Limits(lag_s=S60), OK, "0 s behind", id="nobody streams"),
    pytest.param(found(rung("server"), rung("sealed", 5, None)), Limits(lag_s=S60), UNKNOWN, "for how long", id="no time"),
    pytest.param(
        found(rung("server"), rung("sent", 5, 9e4, at_most=True), rung("sealed", 70, 9e4, at_most=True)),
        Limits(lag_s=S60),
        OK,
        "70 B of WAL behind",
        id="what is missing has been sent",
    ),
    pytest.param(
        found(
            rung("server"),
            rung("sent", 5, 9e4, at_most=True),
            rung("sealed", 70, 9e4, at_most=True),
            epochs=[{"open_seconds": None}, {"open_seconds": 80.0}],
        ),
        Limits(lag_s=S60_300),
        WARNING,
        "80 s behind (limit 60 s)",
        id="what is missing has come, and the disk does not take it",
    ),
    pytest.param(
        found(rung("server"), rung("sent", 1 << 30, 9e4, at_most=True), rung("sealed", 1 << 30, 9e4, at_most=True)),
        Limits(lag_s=S60),
        CRITICAL,
        "25 h behind",
        id="what is missing has not been sent",
    ),
    pytest.param(
        found(rung("server"), rung("sent", None, None), rung("sealed", 70, 9e4, at_most=True)),
        Limits(lag_s=S60),
        CRITICAL,
        "25 h behind",
        id="what is missing is sent by nobody",
    ),
    pytest.param(
        found(
            rung("server"),
            rung("sent", 5, 9e4, at_most=True),
            rung("sealed", 70, 9e4, at_most=True),
            launcher=None,
            server=SERVER | {"active": True},
        ),
        Limits(lag_s=S60),
        CRITICAL,
        "25 h behind (limit 60 s); slot shop_cdc is in use, but no launcher runs here: another program streams from it, or the"
        " server still has the connection of a launcher that has ended",
        id="what is missing has been sent to another program",
    ),
    pytest.param(
        found(rung("server"), waiting=[waiting("public.a"), waiting("public.b", failures=2)]),
        Limits(),
        WARNING,
        "table public.a waits for a copy of its rows: it was renamed; and 1 more",
        id="tables wait",
    ),
    pytest.param(
        found(rung("server"), waiting=[waiting("public.b", failures=2)]),
        Limits(),
        WARNING,
        "table public.b waits for a copy of its rows: it was renamed, and copying it has failed 2 times",
        id="a table waits in vain",
    ),
]


@pytest.mark.parametrize(("given", "limits", "state", "words"), CASES)
def test_states(given: dict[str, Any], limits: Limits, state: State, words: str) -> None:
    alert = judge(given, limits)
    assert (alert.state, alert.line.startswith(f"CDCPIPE {state.name}: ")) == (state, True)
    assert words in alert.line


def test_the_line() -> None:
    limits = Limits(S60_300, B1K, Limit(1 << 30, 1 << 20))
    assert judge(found(launcher=None, last_error=ERROR), limits).line == (
        "CDCPIPE CRITICAL: cdcpipe-spark run ended at 2026-03-01T12:00:00Z: the disk is full / really;"
        " 10.0 KiB of WAL behind (limit 1.0 KiB); shop_cdc is 75 s behind (limit 60 s);"
        " the server keeps 32.0 MiB of WAL (limit 1.0 MiB)"
        " | lag=75s;60;300;0; lag_bytes=10240B;;1024;0; wal=33554432B;1048576;1073741824;0;"
    )
    assert unknown("two\nlines").line == "CDCPIPE UNKNOWN: two lines"


def test_the_worst_counts() -> None:
    alert = Alert()
    assert alert.state == OK
    for state in (OK, WARNING, CRITICAL, UNKNOWN):
        alert.add(state, state.name.lower())
    assert alert.line == "CDCPIPE CRITICAL: critical; unknown; warning; ok"


def test_limits_of_the_command_line() -> None:
    parse = limit(float)
    assert parse("60") == Limit(60.0)
    assert parse("60,300") == Limit(300.0, 60.0)
    with pytest.raises(ValueError, match="WARNING,CRITICAL"):
        parse("300,60")
    with pytest.raises(ValueError, match="could not convert"):
        parse("60,")

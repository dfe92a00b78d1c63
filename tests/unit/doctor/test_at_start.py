"""The doctor's part in the start of `run`: what it refuses, what it logs, and that `run` does not wait for its answer."""

import fcntl
import json
import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cdcpipe.doctor.findings import Finding, Level, report
from cdcpipe.errors import InitError
from spark_sink.doctor import directories
from spark_sink.doctor.at_start import ServerLook, refuse_what_fails
from spark_sink.doctor.pipeline_doctor import PlannedRun, examine_machine, examine_server
from support.waiting import until

FOUND = [
    Finding(Level.OK, "server.version", None, "PostgreSQL 18.4", None, None),
    Finding(Level.WARNING, "server.wal_limit", None, "unlimited", "the disk", "SET it"),
    Finding(Level.WARNING, "server.ddl_capture", None, "version 2", "rows", "install"),
    Finding(Level.ERROR, "failover.standby_slots", "a", "no standby uses it", "nothing is sent", "start it"),
]


def planned(tmp_path: Path, **changes: Any) -> PlannedRun:
    return PlannedRun((), "s", ("p",), tmp_path / "staging", warehouse=tmp_path / "warehouse", **changes)


def cdcpipe(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", f"import sys, time; {code}")


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    return [(record.levelno, record.getMessage()) for record in caplog.records if record.name.startswith("spark_sink.doctor")]


def test_errors_on_this_machine_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    refuse_what_fails(planned(tmp_path), starts_spark=False)
    refuse_what_fails(planned(tmp_path), starts_spark=True)
    (tmp_path / "jars").mkdir()
    with pytest.raises(InitError, match="no delta-spark"):
        refuse_what_fails(planned(tmp_path, jars=tmp_path / "jars"), starts_spark=True)
    refuse_what_fails(planned(tmp_path, jars=tmp_path / "jars"), starts_spark=False)
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    with pytest.raises(InitError) as caught:
        refuse_what_fails(planned(tmp_path), starts_spark=False)
    assert caught.value.hint == "use a local disk, or NFS 4"


def test_other_findings_on_this_machine_are_logged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(directories, "_LEAST_FREE", 1 << 60)
    refuse_what_fails(planned(tmp_path), starts_spark=False)
    said = lines(caplog)
    assert [level for level, _ in said] == [logging.WARNING] * 2
    assert "are free for staging: a full disk stops the pipeline. Fix: " in said[0][1]


def test_findings_on_the_server_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "spark_sink.doctor")
    answer = json.dumps(report(FOUND, server=None))
    asked = f"assert sys.argv[1:] == {['doctor', '-S', 's', '--quick', '--publication', 'p', '--json']!r}"
    with ServerLook(planned(tmp_path), command=cdcpipe(f"{asked}; print({answer!r}); sys.exit(1)")):
        until(lambda: len(lines(caplog)) == 3)
    assert lines(caplog) == [
        (logging.INFO, "unlimited: the disk. Fix: SET it"),
        (logging.WARNING, "version 2: rows. Fix: install"),
        (logging.WARNING, "a: no standby uses it: nothing is sent. Fix: start it"),
    ]


@pytest.mark.parametrize("command", [cdcpipe("sys.exit('cdcpipe: error: no')"), cdcpipe("print('{}')"), ("/nonesuch/cdcpipe",)])
def test_an_invalid_answer_does_not_stop_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, command: tuple[str, ...]
) -> None:
    caplog.set_level(logging.INFO, "spark_sink.doctor")
    with ServerLook(planned(tmp_path), command=command):
        until(lambda: lines(caplog))
    [(level, text)] = lines(caplog)
    assert (level, text.startswith("the doctor can't look at the server: ")) == (logging.INFO, True)


def test_the_run_does_not_wait_for_an_answer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "spark_sink.doctor")
    with ServerLook(planned(tmp_path), command=cdcpipe("time.sleep(3600)")):
        pass
    with ServerLook(planned(tmp_path), command=cdcpipe("print('asked')"), delay_s=86400):
        pass
    stopping = ServerLook(planned(tmp_path), command=cdcpipe("time.sleep(3600)"), is_stopping=lambda: True)
    with stopping:
        until(lambda: not stopping._thread.is_alive())
    assert lines(caplog) == []


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({}, ""),
        ({"create_slot": True}, "-c --copy"),
        ({"create_slot": True, "snapshot": "never"}, "-c"),
        ({"snapshot": "initial"}, "--copy"),
        ({"create_slot": True, "warehouse": None}, "-c"),
    ],
)
def test_the_server_is_asked_about_a_start_that_copies(tmp_path: Path, options: dict[str, Any], asked: str) -> None:
    assert words(replace(planned(tmp_path), **options)) == asked


def words(asked: PlannedRun) -> str:
    """Return the options that `cdcpipe doctor` gets."""
    answer = f'{json.dumps(report([]))[:-1]}, "server": '
    says = cdcpipe(f"import json; print({answer!r}, json.dumps({{'words': sys.argv[sys.argv.index('p') + 1:-1]}}), '}}')")
    _, server = examine_server(asked, command=says)
    return " ".join(server["words"])


@pytest.mark.parametrize(
    ("files", "is_copied"),
    [
        ([], {"initial": True, "-c": True, "never": False}),
        (["warehouse"], {"initial": True, "-c": False, "never": False}),
        (["warehouse", "complete"], {"initial": False, "-c": False, "never": False}),
        (["warehouse", "unfinished"], {"initial": True, "-c": True, "never": False, "": True}),
        (["unfinished"], {"initial": True, "-c": True, "never": False}),
        (["damaged"], {"initial": True, "-c": True, "never": False}),
    ],
)
def test_a_warehouse_that_has_its_copies_gets_none(tmp_path: Path, files: list[str], is_copied: dict[str, bool]) -> None:
    """The options stay in the command of a service. A new warehouse gets a copy, also if the slot exists."""
    place = tmp_path / "warehouse/_cdcpipe"
    place.mkdir(parents=True)
    known = {"version": 1, "format": "delta", "types": "exact", "system_id": "1", "database": "d", "slot": "s", "position": "1:0/1"}
    texts = {"warehouse": ("warehouse", json.dumps(known)), "damaged": ("snapshot", "{")}
    for file in files:
        name, text = texts.get(file, ("snapshot", json.dumps({"is_complete": file == "complete"})))
        (place / f"{name}.json").write_text(text)
    server = {"slot_exists": True, "table_bytes": 1 << 60}
    for mode, expected in is_copied.items():
        asked = planned(tmp_path, create_slot=mode == "-c", snapshot=mode if mode in ("initial", "never") else None)
        assert ("--copy" in words(asked)) == expected, mode
        found = [each for each in examine_machine(asked, server, starts_spark=False) if each.check == "warehouse.space"]
        assert ("are copied" in found[0].line) == expected, mode

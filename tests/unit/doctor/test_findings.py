"""Findings as JSON, read back, and as lines."""

import json

import pytest

from cdcpipe.doctor.findings import Finding, Level, error, examine, ok, parse, render, report, warning

CHECKS = {
    "a.first": lambda count: [ok("all is well")] * count,
    "a.second": lambda count: [warning("so", "because", "DO it", subject=f"t{number}") for number in range(count)],
    "b.third": lambda _: [error("broken", "it stops", "mend it")],
}


def test_json_and_back() -> None:
    findings = examine(CHECKS, 2)
    found = json.loads(json.dumps(report(findings, server={"version": 180004})))
    assert found["counts"] == {"ok": 2, "warning": 2, "error": 1}
    assert found["server"] == {"version": 180004}
    assert found["findings"][2] == {
        "level": "warning",
        "check": "a.second",
        "subject": "t0",
        "message": "so",
        "why": "because",
        "fix": "DO it",
    }
    assert parse(found) == findings


@pytest.mark.parametrize("found", [{}, {"version": 2, "findings": []}, {"version": 1, "findings": [{"level": "bad"}]}])
def test_invalid_reports(found: dict[str, object]) -> None:
    with pytest.raises((ValueError, KeyError)):
        parse(found)


def test_lines() -> None:
    assert render(examine(CHECKS, 1)) == [
        "ok       a.first   all is well",
        "warning  a.second  t0: so: because. Fix: DO it",
        "error    b.third   broken: it stops. Fix: mend it",
        "errors: 1, warnings: 1, ok: 1",
    ]


def test_of_many_only_some_are_lines() -> None:
    lines = render([Finding(Level.WARNING, "a", f"t{number}", "so", "because", "DO it") for number in range(25)])
    assert len(lines) == 12
    assert lines[9].startswith("warning  a  t9:")
    assert lines[10:] == ["warning  a  and 15 more: --json has them all", "errors: 0, warnings: 25, ok: 0"]

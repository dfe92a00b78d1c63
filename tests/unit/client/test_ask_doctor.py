"""How the client reads the output of `cdcpipe doctor`."""

import json

import pytest

from cdcpipe.doctor.findings import error, named, report
from cdcpipe.errors import CdcpipeError
from spark_sink.client.doctor import ask_doctor
from support.children import python

FINDINGS = list(named("a.first", [error("broken", "it stops", "mend it")]))
REPORT = report(FINDINGS, server={"version": 180004})


def printing(text: str) -> tuple[str, ...]:
    """Return a command in place of ``cdcpipe`` that prints this text, and ends as after an error was found."""
    return *python("import sys; print(sys.argv[1]); sys.exit(1)"), text


@pytest.mark.parametrize(("facts", "server"), [({"version": 180004}, {"version": 180004}), (None, {})])
def test_what_doctor_prints(facts: dict[str, int] | None, server: dict[str, int]) -> None:
    assert ask_doctor([], command=printing(json.dumps(REPORT | {"server": facts}))) == (FINDINGS, server)


@pytest.mark.parametrize(
    "found",
    [
        "{",
        "[]",
        "null",
        "{}",
        json.dumps(REPORT | {"version": 2}),
        json.dumps(REPORT | {"findings": [{"level": "bad"}]}),
        json.dumps(REPORT | {"findings": ["bad"]}),
        json.dumps({name: value for name, value in REPORT.items() if name != "server"}),
    ],
)
def test_what_cannot_be_read_is_named(found: str) -> None:
    with pytest.raises(CdcpipeError, match="cannot read what 'cdcpipe doctor' printed") as caught:
        ask_doctor([], command=printing(found))
    assert caught.value.hint == "are cdcpipe and cdcpipe-spark of the same version?"

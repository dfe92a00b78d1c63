"""--log-format json: one object on each line of stderr, whatever is said."""

import json
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pyspark.errors.exceptions.base import AnalysisException

from cdcpipe import logs
from spark_sink.commands.options import log_to_stderr
from spark_sink.commands.progress import ProgressLine
from spark_sink.launcher.launcher import Progress
from support.cli_process import run_cli
from support.forked_commands import ForkedCommands
from support.logging_state import logging_as_before


@pytest.fixture(autouse=True)
def text_again() -> Iterator[None]:
    with logging_as_before():
        yield


def test_a_line_is_one_object() -> None:
    found = json.loads(logs.line("error", "cdcpipe", 'a "b"\nc', at=0.5, hint=None, exit_code=2))
    assert found == {
        "time": "1970-01-01T00:00:00.500Z",
        "level": "error",
        "part": "cdcpipe",
        "message": 'a "b"\nc',
        "exit_code": 2,
    }
    assert "\n" not in logs.line("error", "cdcpipe", "a\nb")
    assert logs.line("error", "cdcpipe", "a\x7f\x9b2J\u2028ñ").isprintable()
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d\d\dZ", json.loads(logs.line("info", "p", "m"))["time"])


def test_records_and_the_progress_are_objects(capsys: pytest.CaptureFixture[str]) -> None:
    logs.use("json")
    log_to_stderr(verbose=False)
    logging.getLogger("a.b").warning("%s is %d", "x", 3)
    try:
        raise ValueError("no")
    except ValueError:
        logging.getLogger("a").exception("failed")
    ProgressLine(0.0).update(Progress(records=7), 1.0, is_last=True)
    said = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(each["level"], each["part"], each["message"]) for each in said[:2]] == [
        ("warning", "a.b", "x is 3"),
        ("error", "a", "failed"),
    ]
    assert said[1]["stack"].endswith("ValueError")
    assert said[2]["part"] == "progress"
    assert "7 records" in said[2]["message"]


@pytest.mark.parametrize("form", logs.FORMATS)
def test_what_a_full_disk_does_not_take_is_dropped(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command goes on if nothing can be written to its log, and ends with its own exit code."""
    full = Path("/dev/full").open("w")  # noqa: SIM115 - its end is an error
    monkeypatch.setattr("sys.stderr", full)
    logs.use(form)
    log_to_stderr(verbose=False)
    logging.getLogger("a.b").warning("x")
    ProgressLine(0.0).update(Progress(records=7), 1.0, is_last=True)
    logs.complain("cdcpipe-spark", "no room", "make room", 7)
    with pytest.raises(OSError, match="No space left"):
        full.close()


class Context:
    """Where an error of Spark comes from."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def contextType(self) -> Any:  # noqa: N802 - PySpark's name, as the next one
        return SimpleNamespace(name=self._kind)

    def callSite(self) -> str:  # noqa: N802
        return "program.py:7"

    def fragment(self) -> str:
        return "cast"


@pytest.mark.parametrize("verbose", [False, True])
@pytest.mark.parametrize("kind", ["DataFrame", "SQL"])
def test_pyspark_does_not_print_what_it_raises(kind: str, verbose: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """The message may have a value of a row: [CAST_INVALID_INPUT] The value 'secret' …"""
    log_to_stderr(verbose=verbose)
    error = AnalysisException("The value 'secret' …", contexts=[cast("Any", Context(kind))])
    error._log_exception()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("name", "file"), [("py4j.clientserver", "py4j/clientserver.py"), ("root", "py4j/java_gateway.py")])
def test_py4j_does_not_print_what_it_raises(name: str, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It logs the loss of the JVM with the root logger."""
    record = logging.LogRecord(name, logging.ERROR, f"/lib/{file}", 1, "Exception while sending command.", None, None)
    log_to_stderr(verbose=False)
    logging.getLogger(name).handle(record)
    assert capsys.readouterr().err == ""
    log_to_stderr(verbose=True)
    logging.getLogger(name).handle(record)
    assert "Exception while sending command." in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--log-format", "json"], ["--log-format=json"]])
def test_mistakes_are_objects(option: list[str], tmp_path: Path, commands: ForkedCommands) -> None:
    file = tmp_path / "shop.toml"
    file.write_text('log-format = "json"\n')
    for ended in [
        commands.cdcpipe("-S", "s", "-j", "-J", *option),
        commands.cdcpipe("-S", "s", "--endpos", "x", *option),
        commands.cdcpipe_spark("land", *option),
        commands.cdcpipe_spark("run", "-S", "s", *option),
        commands.cdcpipe_spark("land", "-S", "s", "--config", str(file)),
    ]:
        found = json.loads(ended.stderr)
        assert (ended.code, found["level"], found["exit_code"]) == (1, "error", 1)
        assert {*found} == {"time", "level", "part", "message", "hint", "exit_code"}
    assert not commands.cdcpipe_spark("land").stderr.startswith("{")


def test_objects_are_in_utf8_whatever_the_locale_is() -> None:
    """In that of Poland, the letter ï came as \\xef, which is no JSON."""
    environment = os.environ | {"PYTHONIOENCODING": "iso8859-2"}
    code, _, said = run_cli("-S", "s", "--log-format", "json", "--publication", "p", "-c", "--table", "naïve", env=environment)
    assert code == 1
    assert "naïve" in json.loads(said)["message"]

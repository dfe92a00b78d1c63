"""`cdcpipe-spark verify`: its progress bar, and its exit codes."""

import sys

import pytest

from spark_sink.commands.verify import ProgressBar, exit_code
from spark_sink.schema.table import Table
from spark_sink.verify.comparison import (
    DIFFERENT,
    NOT_COMPARED,
    TableResult,
)


def test_the_progress_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    bar = ProgressBar()
    bar.show("public.t, 2 of 3", 0.5)
    bar.clear()
    assert capsys.readouterr().err == "\r\x1b[K[############............]  50%  public.t, 2 of 3\r\x1b[K"


def test_exit_codes() -> None:
    table = Table("public", "t")
    equal, different, problem = TableResult(table, is_equal=True), TableResult(table, 1, 2), TableResult(table, problem="gone")
    assert exit_code([equal, equal]) == 0
    assert exit_code([equal, problem, different]) == DIFFERENT == 10
    assert exit_code([equal, problem]) == exit_code([]) == NOT_COMPARED == 11

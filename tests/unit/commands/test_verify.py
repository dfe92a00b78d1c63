"""`cdcpipe-spark verify`: its progress bar, and its exit codes."""

import json
import os
import sys

import pytest

from spark_sink.commands.verify import ProgressBar, _json, _lines, exit_code
from spark_sink.schema.table import Table
from spark_sink.verify.comparison import (
    DIFFERENT,
    NOT_COMPARED,
    TableResult,
)


def test_the_progress_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(os, "get_terminal_size", lambda _fd: os.terminal_size((80, 24)))
    bar = ProgressBar()
    bar.show("public.t, 2 of 3", 0.5)
    bar.show("public." + 100 * "t", 1.0)
    bar.clear()
    assert capsys.readouterr().err == (
        f"\r\x1b[K[##########----------]  50%  public.t, 2 of 3\r\x1b[K[####################] 100%  public.{43 * 't'}\r\x1b[K"
    )


def test_what_was_left_out_is_said() -> None:
    table = Table("public", "t")
    [line] = _lines([TableResult(table, 2, 2, is_equal=True, hashed=("ssn",), without_deleted=True)])
    assert line == "public.t: equal, 2 rows; compared as hashes: ssn; without the deleted rows that the replica keeps"


def test_exit_codes() -> None:
    table = Table("public", "t")
    equal, different, problem = TableResult(table, is_equal=True), TableResult(table, 1, 2), TableResult(table, problem="gone")
    assert exit_code([equal, equal]) == 0
    assert exit_code([equal, problem, different]) == DIFFERENT == 10
    assert exit_code([equal, problem]) == exit_code([]) == NOT_COMPARED == 11


def test_a_table_that_was_not_compared_has_no_numbers_of_rows() -> None:
    found = json.loads(
        _json([TableResult(Table("public", "t"), 2, 2, is_equal=True), TableResult(Table("public", "u"), problem="gone")])
    )
    assert [(each["server_rows"], each["replica_rows"]) for each in found.values()] == [(2, 2), (None, None)]

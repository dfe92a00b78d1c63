"""What names may not do to a terminal or a log."""

import json
import logging

import pytest

from cdcpipe import logs
from cdcpipe.doctor.findings import Finding, Level, render
from cdcpipe.printable import printable, printable_json, printable_lines
from spark_sink.commands.verify import _lines
from spark_sink.schema.table import Table
from spark_sink.status.check import unknown
from spark_sink.status.text import aligned
from spark_sink.verify.comparison import TableResult


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("public.fruit", "public.fruit"),
        ("Ŗ ñ 表 \u00a0", "Ŗ ñ 表 \u00a0"),
        ("a\nb\tc\rd", r"a\nb\tc\rd"),
        ("\x1b[2J\x7f\x9b\u2028\U000e0001", r"\x1b[2J\x7f\u009b\u2028\U000e0001"),
        ("a\udcff", r"a\xff"),
    ],
)
def test_a_line(text: str, expected: str) -> None:
    assert printable(text) == expected


def test_lines_stay_lines() -> None:
    assert printable_lines("one\n\ttwo\x1b[31m\r\n") == "one\n\ttwo\\x1b[31m\\r\n"


@pytest.mark.parametrize("text", ["a\x7f\x9b2J\u2028\u2029\x85\u00a0", "\U000e0001", "\udcff", 'ñ 表 "\\\n'])
def test_json_means_the_same(text: str) -> None:
    shown = printable_json(json.dumps({"a": text}, ensure_ascii=False, indent=1))
    assert shown.replace("\n", "").isprintable()
    assert json.loads(shown) == {"a": text}
    assert ("表" in shown) == ("表" in text)


def test_who_prints_names() -> None:
    """A name of several lines is in one line, in each kind of output."""
    name = "a\nb\x1b[2J"
    shown = r"a\nb\x1b[2J"
    assert aligned([[name, "1"]], "<>") == [f"{shown}  1"]
    assert shown in render([Finding(Level.ERROR, "tables.key", name, "no key", None, None)])[0]
    record = logging.LogRecord("x", logging.WARNING, "", 0, "table %s", (name,), None)
    assert logs.formatter("cdcpipe: %(message)s").format(record) == "cdcpipe: table a\nb\\x1b[2J"
    assert unknown(name).line == r"CDCPIPE UNKNOWN: a b\x1b[2J"
    assert _lines([TableResult(Table("public", name), 2, 2, is_equal=True)]) == [f"public.{shown}: equal, 2 rows"]

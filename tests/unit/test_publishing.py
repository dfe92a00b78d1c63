"""Patterns of tables: what they match, what is no pattern, and that a command line passes them on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from cdcpipe.errors import InitError, InvalidArgumentsError
from cdcpipe.publishing import ColumnPattern, NewPublication, TablePattern, with_companions
from cdcpipe.replication.column_lists import without_columns
from spark_sink.launcher.config import LauncherConfig

if TYPE_CHECKING:
    from cdcpipe.libpq.connection import Connection


@pytest.mark.parametrize(
    ("text", "matching", "other"),
    [
        ("public.orders", [("public", "orders")], [("public", "Orders"), ("public", "orders2"), ("x.public", "orders")]),
        ("public.*", [("public", "a"), ("public", "")], [("Public", "a"), ("public2", "a")]),
        ("*.log_*", [("a", "log_1"), ("b", "log_")], [("a", "log")]),
        ("*.*", [("a", "b"), ('odd "one"', "new\nline.")], []),
        # The schema ends at the first dot, and everything else is in the name.
        ("a.b.c", [("a", "b.c")], [("a.b", "c")]),
        ('"a.b".c', [("a.b", "c")], [("a", "b.c")]),
        ('"a*".*', [("a*", "t")], [("ab", "t")]),
        ('s."say ""hi"""', [("s", 'say "hi"')], []),
        ("s.a(b)[c]+?", [("s", "a(b)[c]+?")], [("s", "ab")]),
        ("s.a*b*c", [("s", "abc"), ("s", "a1b\n2c")], [("s", "abcd"), ("s", "ac")]),
    ],
)
def test_what_a_pattern_matches(text: str, matching: list[tuple[str, str]], other: list[tuple[str, str]]) -> None:
    pattern = TablePattern.parse(text, "--table")
    assert [each for each in matching + other if pattern.matches(*each)] == matching
    assert pattern.is_exact == (len(matching) == 1 and text.count("*") == text.count('*"'))


@pytest.mark.parametrize("text", ["", "orders", ".", "public.", ".orders", '"".a', '"public.orders', 'public."a'])
def test_what_is_no_pattern(text: str) -> None:
    with pytest.raises(InvalidArgumentsError) as raised:
        TablePattern.parse(text, "--exclude-table")
    assert raised.value.message.startswith("--exclude-table ")
    assert raised.value.hint


def test_the_options_of_a_command_line() -> None:
    made = NewPublication.of(tables=["a.*", '"b.c".d'], exclude_tables=["a.log"], keyless="full", via_root=True)
    assert made.arguments == ["--table", "a.*", "--table", '"b.c".d', "--exclude-table", "a.log", "--keyless", "full", "--via-root"]
    assert NewPublication().arguments == []


def test_the_publications_that_a_stream_has_to_name() -> None:
    new = NewPublication.of(keyless="insert-only")
    assert with_companions(("a", "b"), NewPublication.of(keyless="full")) == ("a", "b")
    assert with_companions(("a", "b"), new) == ("a", "b", "a_keyless", "b_keyless")
    # A command that is started with all of them, and with the option, names no third one.
    assert with_companions(("a", "b", "a_keyless", "b_keyless"), new) == ("a", "b", "a_keyless", "b_keyless")
    assert LauncherConfig("s", Path("staging"), ("a",), new_publication=new).publications == ("a", "a_keyless")
    with pytest.raises(InvalidArgumentsError, match="at most 63 bytes"):
        with_companions(("é" * 28,), new)
    with pytest.raises(InvalidArgumentsError, match="refuse, insert-only, full"):
        NewPublication.of(keyless="maybe")


def test_patterns_of_columns() -> None:
    pattern = ColumnPattern.parse('"a.b".*.c*', "--exclude-column")
    assert pattern.matches("a.b", "t", "c1")
    assert not pattern.matches("a.b", "t", "dc")
    assert ColumnPattern.parse("a.b.c.d", "--mask").matches("a", "b", "c.d")
    for text in "a.b", "a..c", "a.b.":
        with pytest.raises(InvalidArgumentsError, match=r"--mask takes SCHEMA\.TABLE\.COLUMN"):
            ColumnPattern.parse(text, "--mask")


def test_columns_are_left_out_since_version_15() -> None:
    class Server:
        server_version = 140022

    wanted = NewPublication.of(exclude_columns=["a.b.c"])
    with pytest.raises(InitError, match="takes PostgreSQL 15 or newer; this server has 14"):
        without_columns(cast("Connection", Server()), (), wanted)

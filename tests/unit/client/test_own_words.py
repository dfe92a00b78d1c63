"""What `land` and `run` say of an error of ``cdcpipe`` names options that they have."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from cdcpipe.errors import CdcpipeError, GapError, ServerError
from spark_sink.client.failure import Failure, error_of
from spark_sink.commands.run import command
from support.paths import ROOT

OPTIONS = {name for param in command.params for name in param.opts} | {"--help"}

NOT_ASKED_FOR = (
    # the commands that cdcpipe-spark does not start, or not with these options
    "a capture is all that cdcpipe -H wrote",
    "leave the option out, or capture without --streaming",
    "without --schema it stays there; cdcpipe ddl remove removes it",
    "cdcpipe ddl install with --statements",
    "wait longer (-u)",
    "--two-phase takes them as they come",
    "with --binary the server ends the stream",
    "leave --binary out",
    "-P %s has no effect",
    "or use -P pgoutput",  # the plugin is always pgoutput
    "leave -P out",
    "create one: -c -P pgoutput",  # prepare has checked the slot before
    "leave --whole-transactions out, or name a slot with pgoutput",
    "with --output or -J, -o also takes those of the output plugin",  # the launcher chooses the options
    "the stream ends with its commands",  # the launcher holds stdin
    'write a JSON array of options, like ["-S"',
    # output plugins, which work in cdcpipe alone
    "(--whole-transactions)",
    "-o database.dbname=NAME",
    "(or -o ",
    # options of other programs
    "iconv -f UTF-8",
    "ulimit -n",
    "ulimit -u",
    # replaced by the message, see the test below
    "try --binary, with which a bytea takes half",
    "--startpos",
    "With --whole-transactions on a two-phase slot, move the slot behind the commit instead",
    # the whole hint is left out, see the test below
    "also an idle one without --idle-positions",
    "the slot was dropped. Copy the tables anew; or go on without the changes: leave --expect-lsn out",
)


def foreign(text: str) -> set[str]:
    """Return the options in a text that `run` does not have."""
    return {name for name in re.findall(r"(?<![\w-])(?:--[a-z][a-z-]+|-[a-zA-Z])\b(?!-)", text) if name not in OPTIONS}


def texts(path: Path) -> Iterator[str]:
    """Yield the texts in a module, without docstrings. What is computed is …."""
    tree = ast.parse(path.read_text())
    skipped = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.JoinedStr):
            skipped |= {id(part) for part in ast.walk(node)}
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "\N{HORIZONTAL ELLIPSIS}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.value


def test_no_hint_names_an_option_that_run_does_not_have() -> None:
    found = {text for path in (ROOT / "cdcpipe").rglob("*.py") for text in texts(path) if foreign(text)}
    assert len(found) > 20
    asked_for = {text for text in found if not any(part in text for part in NOT_ASKED_FOR)}
    assert len(asked_for) > 5
    assert {text for text in asked_for if foreign(Failure(2, "", text).hint or "")} == set()
    assert {text for text in asked_for if foreign(Failure(2, text).message)} == set()
    unused = {part for part in NOT_ASKED_FOR if not any(part in text for text in found)}
    assert unused == set()


@pytest.mark.parametrize("part", [ServerError.NO_PUBLICATION, ServerError.UNSENDABLE])
def test_a_transaction_that_cannot_be_sent_has_a_hint_of_its_own(part: str) -> None:
    hint = Failure(5, f"x: {part}, because", "try --binary; start with --startpos 0/1").hint or ""
    assert "--on-gap resnapshot" in hint
    assert not foreign(hint)


def test_a_slot_that_a_hint_has_made_to_look_ends_with_its_session() -> None:
    """A permanent one would keep WAL for ever, because no hint has it dropped and nothing looks at it."""
    found = [text for folder in ("cdcpipe", "spark_sink") for path in (ROOT / folder).rglob("*.py") for text in texts(path)]
    made = [text for text in found if "pg_copy_logical_replication_slot(" in text]
    assert made
    assert [text for text in made if "'look', true, " not in text or "in one psql session" not in text] == []


def test_a_gap_is_judged_by_the_launcher() -> None:
    failure = Failure(2, f"{GapError.BEGINNING}slot is at 0/2, 1 B of WAL beyond 0/1 (--expect-lsn), and", "leave --expect-lsn out")
    assert (failure.is_gap, foreign(failure.message), failure.hint) == (True, set(), None)


def test_a_full_disk_is_named_with_the_option_for_another_one() -> None:
    said = "cannot keep a transaction in progress in /a: No space left on device"
    hint = "make room there, set TMPDIR to a larger directory, or keep more in memory (--spill-threshold); nothing was confirmed"
    error = error_of(Failure(7, said, hint))
    assert (type(error), error.message) == (CdcpipeError, said)
    assert error.hint == "make room there, or name a larger directory (--spill); nothing was confirmed"

"""Work in the background: its end, and its errors."""

import subprocess
import sys

import pytest

from cdcpipe.background import Background
from cdcpipe.errors import CdcpipeError


class Counting(Background):
    def __init__(self, problem: Exception | None = None) -> None:
        super().__init__("counting")
        self.problem = problem

    def _work(self) -> None:
        if self.problem is not None:
            raise self.problem
        self._stopping.wait()


def test_work_in_the_background_ends_when_it_is_asked_to() -> None:
    with Counting() as counting:
        assert not counting.wait(0.01)
        assert not counting.has_ended
    assert counting.has_ended
    assert counting.wait()
    assert counting.error is None
    Counting().stop()  # it was never started


_FORKED = """
import os, signal, sys
from cdcpipe.background import Background
class Waiting(Background):
    def _work(self):
        self._stopping.wait()
with Waiting("waiting") as waiting:
    if not (child := os.fork()):
        signal.alarm(20)
        if sys.argv[1] == "exit":
            sys.exit()
    else:
        assert os.waitpid(child, 0)[1] == 0
        assert not waiting.has_ended
"""


@pytest.mark.parametrize("ending", ["exit", "the end of the block"])
def test_a_forked_child_that_ends_does_not_stop_the_work_of_its_parent(ending: str) -> None:
    """It used to wait for ever for a thread that it does not have."""
    ended = subprocess.run([sys.executable, "-c", _FORKED, ending], stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_the_owner_of_work_in_the_background_gets_its_error() -> None:
    problem = ValueError("no such luck")
    counting = Counting(problem).start()
    with pytest.raises(ValueError, match="no such luck"):
        counting.wait(60)
    assert counting.error is problem
    counting.stop()
    with pytest.raises(ValueError, match="no such luck"), Counting(problem):
        pass  # the end of the context waits for the work, and raises its error
    with pytest.raises(KeyError), Counting(problem):
        raise KeyError("an error of the owner comes first")


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        (CdcpipeError("the disk is full", hint="make room"), "the work has ended: the disk is full (hint: make room)"),
        (CdcpipeError("the disk is full"), "the work has ended: the disk is full"),
        (ValueError("a value of a row"), "the work has ended: unexpected ValueError"),
    ],
)
@pytest.mark.parametrize("is_shown", [True, False])
def test_an_error_that_nobody_waits_for_is_logged_once(
    caplog: pytest.LogCaptureFixture, problem: Exception, said: str, *, is_shown: bool
) -> None:
    """A launcher in the background of a notebook ended without a word."""
    counting = Counting(problem)
    counting.logs_error = not is_shown
    counting.start().stop()
    found = [record.getMessage().partition(" in line ")[0] for record in caplog.records if record.levelname == "ERROR"]
    assert found == ([] if is_shown else [said])
    assert counting.error is problem

"""The error for an exception of Spark that no other part of cdcpipe explains."""

import pytest

import spark_sink.__main__ as command
from cdcpipe.errors import CdcpipeError
from spark_sink.spark.failure import SparkFailedError, explained
from support.spark_errors import Py4JError


class AnalysisError(Exception):
    __module__ = "pyspark.errors.exceptions.captured"


FULL = (
    "An error occurred while calling o102.start.\n"
    ": java.io.IOException: mkdir of file:/lake/_cdcpipe/checkpoint failed: No space left on device\n\tat X.y(X.java:1)\n"
)


def test_the_reason_is_one_line_and_the_hint_fits_it() -> None:
    error = explained(Py4JError(FULL))
    assert isinstance(error, SparkFailedError)
    assert error.message == "Spark failed: mkdir of file:/lake/_cdcpipe/checkpoint failed: No space left on device"
    assert "make room" in str(error.hint)
    assert error.exit_code == 7


def test_a_killed_process_of_spark_is_no_defect() -> None:
    """Spark asks the process that forks its Python workers to end one, and finds that this process has ended, too."""
    error = explained(
        Py4JError("An error occurred while calling o102.load.\n: java.io.IOException: Stream closed\n\tat X.y(X.java:1)\n")
    )
    assert isinstance(error, SparkFailedError)
    assert error.message == "Spark failed: Stream closed"
    assert "dmesg" in str(error.hint)


@pytest.mark.parametrize("raised", [Py4JError("Answer from Java side is empty"), AnalysisError("no such column")])
def test_another_error_of_spark_says_where_to_look(raised: Exception) -> None:
    error = explained(raised)
    assert isinstance(error, SparkFailedError)
    assert str(raised).partition("\n")[0] in error.message
    assert "-v shows where" in str(error.hint)


@pytest.mark.parametrize("raised", [ValueError("x"), OSError(28, "No space left on device"), CdcpipeError("x")])
def test_errors_of_others_stay_as_they_are(raised: Exception) -> None:
    assert explained(raised) is raised


def test_the_command_line_prints_it_without_javas_stack(capsys: pytest.CaptureFixture[str]) -> None:
    assert command._unexpected(Py4JError(FULL)) == 7
    error, hint = capsys.readouterr().err.splitlines()
    assert error.endswith("error: Spark failed: mkdir of file:/lake/_cdcpipe/checkpoint failed: No space left on device")
    assert "make room" in hint

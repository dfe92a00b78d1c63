"""What Spark says of exceptions, without values of rows."""

import json
import os

import pytest

from cdcpipe import logs
from cdcpipe.error_texts import SETTING
from spark_sink.pipeline.failures import own_error
from spark_sink.spark.failure import raised_of, reason_of
from spark_sink.spark.java_texts import Lines, withheld
from spark_sink.spark.jvm_output import JvmOutput
from support.spark_errors import Py4JError

CAST = '[CAST_INVALID_INPUT] The value \'secret\nof two lines\' of the type "STRING" cannot be cast to "INT". SQLSTATE: 22018'
LOST = "2026-03-01 12:00:00 WARN TaskSetManager: Lost task 0.0 in stage 3.0 (TID 5) (host executor driver): "


class NumberFormatException(Exception):  # noqa: N818 - pyspark's name
    __module__ = "pyspark.errors.exceptions.captured"


@pytest.fixture(autouse=True)
def without_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SETTING, raising=False)


JAVA = (
    f"An error occurred while calling o1.x.\n: org.apache.spark.SparkException: Job aborted: {CAST}\n\tat x\nCaused by: a.B: no\n"
)
FORMAT = 'An error occurred while calling o1.x.\n: java.lang.NumberFormatException: For input string: "secret"\n\tat x\n'
PYTHON = '[FOREACH] Failed:\nTraceback (most recent call last):\n  File "x.py", line 1, in f\n{}\n SQLSTATE: 38000'


@pytest.mark.parametrize(
    ("raised", "reason"),
    [
        (Py4JError(JAVA), "[CAST_INVALID_INPUT]"),
        (Py4JError(FORMAT), "NumberFormatException"),
        (NumberFormatException(CAST.partition(" SQLSTATE")[0]), "NumberFormatException"),
        (Py4JError(PYTHON.format("ValueError: invalid literal: 'secret'")), "ValueError"),
        (Py4JError(PYTHON.format("pyarrow.lib.ArrowInvalid: Could not convert 'secret'")), "ArrowInvalid"),
        (ValueError("secret"), "ValueError"),
    ],
)
def test_a_reason_has_no_values(raised: Exception, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert reason in reason_of(raised)
    assert "secret" not in str(own_error(raised))
    assert f"{SETTING}=1 shows it" in reason_of(raised) or raised.args == (FORMAT,)
    monkeypatch.setenv(SETTING, "1")
    assert "secret" in reason_of(raised)


def test_errors_of_ours_and_of_files_keep_their_texts() -> None:
    assert raised_of(Py4JError(PYTHON.format("spark_sink.staging.StagingError: segment 1 is damaged"))) == (
        "StagingError",
        "segment 1 is damaged",
    )
    assert raised_of(Py4JError(PYTHON.format("OSError: [Errno 28] No space left"))) == ("OSError", "[Errno 28] No space left")
    missing = "[FAILED_READ_FILE.NO_HINT] Encountered error while reading file /lake/a.parquet. SQLSTATE: KD001"
    assert reason_of(Py4JError(missing)) == missing


@pytest.mark.parametrize(
    ("line", "rest"),
    [
        (f"{LOST}org.apache.spark.SparkDateTimeException: [CAST_INVALID_INPUT] The value 'secret", "SparkDateTimeException"),
        (f"{LOST}org.apache.spark.SparkException: {CAST.replace(chr(10), ' ')}", "SparkException: [CAST_INVALID_INPUT]"),
        ('Caused by: java.lang.NumberFormatException: For input string: "secret"', "NumberFormatException"),
        (
            "x.DeltaInvariantViolationException: [DELTA_X] CHECK violated by row with values: secret",
            "DeltaInvariantViolationException",
        ),
        ("ValueError: invalid literal for int() with base 10: 'secret'", "ValueError"),
        ("pyarrow.lib.ArrowInvalid: secret", "ArrowInvalid"),
    ],
)
def test_a_line_ends_before_a_value(line: str, rest: str) -> None:
    assert withheld(line).endswith(rest)
    entry = json.dumps({"time": "2026-03-01T12:00:00.000Z", "level": "warn", "message": line})
    assert json.loads(str(Lines().take(entry)))["message"] == withheld(line)


@pytest.mark.parametrize(
    "line",
    [
        f"{LOST}java.io.IOException: No space left on device",
        'Exception in thread "main" java.lang.OutOfMemoryError: Java heap space',
        "cdcpipe.errors.InitError: no slot",
        "BrokenPipeError: [Errno 32] Broken pipe",
    ],
)
def test_other_lines_stay(line: str) -> None:
    assert withheld(line) == line


def test_a_text_of_several_lines_is_left_out_as_a_whole(capsys: pytest.CaptureFixture[str]) -> None:
    output = JvmOutput(holds=False)
    said = [
        'java.lang.NumberFormatException: For input string: "secret',
        'secret too"',
        "\tat x.Y.z(Y.scala:1)",
        "Caused by: java.io.IOException: full",
    ]
    output.session_is_ready()
    os.write(output.writer, "".join(f"{line}\n" for line in said).encode())
    output.take()
    output.close_writer()
    assert capsys.readouterr().err.splitlines() == ["java.lang.NumberFormatException", *said[2:]]
    assert not logs.is_json()

"""What is shown of the JVM's stderr, and what is held back."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from cdcpipe import logs
from cdcpipe.threads import _call_in
from spark_sink.spark.jvm_output import JvmOutput
from support.waiting import until

INCUBATOR = "WARNING: Using incubator modules: jdk.incubator.vector"
ENTRY = "2026-03-01 12:00:00 WARN TaskSetManager: Lost task 0.0 in stage 1.0"
IVY = ["downloading https://repo1.maven.org/maven2/io/delta/delta-storage/4.4.0/delta-storage-4.4.0.jar ...", ":: retrieving ::"]


@pytest.fixture(autouse=True)
def text_again() -> Iterator[None]:
    yield
    logs.use("text")


def say(output: JvmOutput, *lines: str) -> None:
    os.write(output.writer, "".join(f"{line}\n" for line in lines).encode())
    output.take()


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_noise_is_held_back_and_log_entries_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    output = JvmOutput(holds=True)
    say(output, INCUBATOR, *IVY, ENTRY)
    assert said(capsys) == [ENTRY]
    output.close_writer()


@pytest.mark.parametrize("holds", [True, False])
def test_options_from_the_environment_are_not_shown(capsys: pytest.CaptureFixture[str], *, holds: bool) -> None:
    """Behind a proxy, JAVA_TOOL_OPTIONS has its password."""
    output = JvmOutput(holds=holds)
    say(output, "Picked up JAVA_TOOL_OPTIONS: -Dhttps.proxyPassword=S3CRET -Da=b")
    output.show_held()
    assert said(capsys) == output.at_start() == ["Picked up JAVA_TOOL_OPTIONS: ***"]
    output.close_writer()


@pytest.mark.parametrize("form", logs.FORMATS)
def test_a_name_does_nothing_to_a_terminal(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An entry of Spark's log has names of tables as they are."""
    logs.use(form)
    output = JvmOutput(holds=True)
    say(output, f"{ENTRY}\t\x1b[2J\x9b\x7f", '{"time": "2026-03-01T12:00:00Z", "message": "\x9b\x7f"}')
    first, second = capsys.readouterr().err[:-1].split("\n")
    if form == "text":
        assert first == rf"{ENTRY}" + "\t" + r"\x1b[2J\u009b\x7f"
        assert second.isprintable()
    else:
        assert first.isprintable()
        assert second.isprintable()
        assert json.loads(first)["message"] == f"{ENTRY}\t\x1b[2J\x9b\x7f"
        assert json.loads(second)["message"] == "\x9b\x7f"
    output.close_writer()


def test_later_exceptions_in_java_are_shown_at_once_and_the_rest_before_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    output = JvmOutput(holds=True)
    say(output, INCUBATOR, *IVY)
    output.session_is_ready()
    output.show_held()
    assert said(capsys) == []  # Spark has started
    of_java = [
        'Exception in thread "main" java.lang.OutOfMemoryError: Java heap space',
        "java.lang.OutOfMemoryError: Java heap space",
        "\tat org.apache.spark.X.run(X.scala:1)",
        "Caused by: java.io.IOException: No space left on device",
        "\t... 12 more",
        ENTRY,
    ]
    of_a_worker = ["Traceback (most recent call last):", "BrokenPipeError: [Errno 32] Broken pipe", "Fatal Python error: Aborted"]
    say(output, *of_a_worker, *of_java)
    assert said(capsys) == of_java
    output.show_held()
    assert said(capsys) == of_a_worker
    output.show_held()
    assert said(capsys) == []
    output.close_writer()


def test_what_was_held_back_is_shown_when_spark_does_not_start(capsys: pytest.CaptureFixture[str]) -> None:
    output = JvmOutput(holds=True)
    say(output, INCUBATOR, *IVY, "x" * 5000)
    os.write(output.writer, b"no newline at the end")
    output.close_writer()
    output.show_held()
    assert said(capsys) == [INCUBATOR, *IVY, "x" * 2000, "no newline at the end"]


def test_what_is_shown_later_has_a_bound(capsys: pytest.CaptureFixture[str]) -> None:
    output = JvmOutput(holds=True)
    say(output, *(f"line {number}" for number in range(1234)))
    output.show_held()
    lines = said(capsys)
    assert lines[:2] == ["(1,034 lines before these are left out)", "line 1034"]
    assert lines[-1] == "line 1233"
    output.close_writer()


def test_verbose_shows_all(capsys: pytest.CaptureFixture[str]) -> None:
    output = JvmOutput(holds=False)
    say(output, INCUBATOR, *IVY, ENTRY)
    assert said(capsys) == [INCUBATOR, *IVY, ENTRY]
    output.close_writer()


def test_each_line_is_an_object_with_log_format_json(capsys: pytest.CaptureFixture[str]) -> None:
    logs.use("json")
    output = JvmOutput(holds=False)
    entry = '{"time": "2026-03-01T12:00:00.000Z", "level": "warn", "part": "spark.X", "message": "m"}'
    say(output, INCUBATOR, entry)
    first, second = said(capsys)
    assert (json.loads(first)["part"], json.loads(first)["message"]) == ("spark.jvm", INCUBATOR)
    assert second == entry
    output.close_writer()


def test_a_jar_that_is_fetched_is_named() -> None:
    steps: list[str] = []
    output = JvmOutput(holds=True, on_step=steps.append)
    say(output, *IVY)
    assert steps == ["fetching delta-storage-4.4.0.jar"]
    output.close_writer()


def test_the_jvm_never_waits_for_a_full_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also not when our own stderr is closed: the lines are taken all the same."""
    output = JvmOutput(holds=False)
    closed = open(os.devnull, "w")  # noqa: SIM115 - it has to be closed
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    program = "import sys; sys.stderr.write('x' * 99 + '\\n' * 1); sys.stderr.write(('y' * 999 + '\\n') * 2000)"
    with subprocess.Popen([sys.executable, "-c", program], stderr=output.writer) as process:
        output.close_writer()
        assert process.wait(60) == 0
    until(lambda: output.has_ended)


def test_a_forked_child_leaves_the_last_words_to_its_parent(capfd: pytest.CaptureFixture[str]) -> None:
    output = JvmOutput(holds=False)
    with output._lock:  # so that only this thread takes them
        os.write(output.writer, f"{ENTRY}\n".encode())
        _call_in(os.getpid() + 1, output.take, ())
        assert capfd.readouterr().err == ""
        _call_in(os.getpid(), output.take, ())
        assert capfd.readouterr().err == f"{ENTRY}\n"
    output.close_writer()

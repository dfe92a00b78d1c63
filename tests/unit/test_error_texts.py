"""What is shown of an exception that cdcpipe does not expect: no value of a row, whatever prints it."""

import errno
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from traceback import format_exception

import pytest

import cli.invoke
import spark_sink.__main__
from cdcpipe import logs
from cdcpipe.error_texts import SETTING, TaskError, shown, stack_of, unexpected, without_values
from cdcpipe.errors import InitError
from spark_sink.commands.options import log_to_stderr
from support.logging_state import logging_as_before

SECRET = "4711 of Main Street"


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(SETTING, raising=False)
    with logging_as_before():
        yield


def fail(error: Exception | None = None) -> None:
    try:
        int(SECRET)
    except ValueError as ex:
        raise error or KeyError(SECRET) from ex


def failure() -> Exception:
    with pytest.raises(KeyError) as caught:
        fail()
    return caught.value


class RefusedError(Exception):
    """Stands for an error of psycopg, with the server's code."""

    def __init__(self, text: str, state: str) -> None:
        super().__init__(text)
        self.sqlstate = state


class StoreError(Exception):
    """Stands for an error of the library of an object store."""

    __module__ = "botocore.exceptions"


@pytest.mark.parametrize(
    ("raised", "text"),
    [
        (ValueError(SECRET), "ValueError"),
        (UnicodeDecodeError("utf-8", SECRET.encode(), 0, 1, "no"), "UnicodeDecodeError"),
        (OSError(errno.ENOSPC, "No space left on device", "a.json"), "OSError: [Errno 28] No space left on device: 'a.json'"),
        (ModuleNotFoundError("No module named 'x'"), "ModuleNotFoundError: No module named 'x'"),
        (RuntimeError("can't start new thread"), "RuntimeError: can't start new thread"),
        (RuntimeError(SECRET), "RuntimeError"),
        (StoreError("no bucket"), "botocore.exceptions.StoreError: no bucket"),
        (InitError("no slot"), "cdcpipe.errors.InitError: no slot"),
        (RefusedError(f"canceled\nDETAIL: {SECRET}", "57014"), f"{__name__}.RefusedError: canceled"),
        (RefusedError(SECRET, "22P02"), f"{__name__}.RefusedError"),
    ],
)
def test_a_text_is_shown_where_it_has_no_values(raised: Exception, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(raised) == text
    monkeypatch.setenv(SETTING, "1")
    assert str(raised) in shown(raised)


def test_a_stack_has_all_frames_and_classes_and_no_text() -> None:
    found = stack_of(failure())
    assert SECRET not in found
    assert found.count("Traceback (most recent call last):") == 2
    assert "int(SECRET)" in found
    assert (
        found.index("\nValueError\n") < found.index("was the direct cause") < found.index("in failure") < found.index("\nKeyError")
    )
    assert "unexpected KeyError in line" in unexpected(failure())
    ours = InitError("a")
    ours.__cause__ = ours.__context__ = ours
    assert stack_of(ours).endswith("cdcpipe.errors.InitError: a")


@pytest.mark.parametrize("form", logs.FORMATS)
@pytest.mark.parametrize("texts", ["", "1"])
def test_both_commands_print_no_value(
    form: str, texts: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SETTING, texts)
    logs.use(form)
    for complain, verbose in [
        (cli.invoke._unexpected, lambda: logs.to_stderr(logging.DEBUG, "%(message)s")),
        (spark_sink.__main__._unexpected, lambda: log_to_stderr(verbose=True)),
    ]:
        verbose()
        assert complain(failure()) == 7
        said = capsys.readouterr().err
        assert (SECRET in said) == bool(texts)
        assert "unexpected KeyError in line" in said
        assert "raise error or KeyError(SECRET) from ex" in said
        assert f"{SETTING}=1" in said


HOOKED = """
import sys, threading
from cdcpipe import logs
logs.use(sys.argv[1])
logs.hook_exceptions("cdcpipe")
def fail():
    int(bytes.fromhex("736563726574"))
class Careless:
    def __del__(self):
        fail()
thread = threading.Thread(target=fail, name="copy")
thread.start()
thread.join()
Careless()
fail()
"""


@pytest.mark.parametrize("form", logs.FORMATS)
def test_what_python_itself_would_print_follows_the_rule(form: str) -> None:
    ended = subprocess.run([sys.executable, "-c", HOOKED, form], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "secret" not in ended.stderr
    if form == "json":
        entries = [json.loads(line) for line in ended.stderr.splitlines()]
        assert all("Traceback" in entry["stack"] for entry in entries)
        messages = [entry["message"] for entry in entries]
    else:
        messages = [line.partition(": error: ")[2] for line in ended.stderr.splitlines() if ": error: " in line]
        assert ended.stderr.count("Traceback") == 3
    assert len(messages) == 3
    assert messages[0].endswith(", in the thread copy")
    assert messages[1].endswith(", which Python ignores")
    assert all(message.startswith("unexpected ValueError in line") for message in messages)


def test_a_task_of_spark_raises_errors_without_values(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TaskError, match=r"unexpected KeyError in line \d+ of ") as caught, without_values():
        fail()
    assert SECRET not in str(caught.value)
    assert caught.value.__suppress_context__  # else Spark would print the error before it, too
    for other in (
        InitError("no slot"),
        OSError(errno.ENOSPC, "full"),
        StoreError("no bucket"),
        RuntimeError("can't start new thread"),
    ):
        with pytest.raises(type(other)) as same, without_values():
            fail(other)
        assert same.value is other
        assert SECRET not in "".join(format_exception(other))
    monkeypatch.setenv(SETTING, "1")
    with pytest.raises(KeyError), without_values():
        fail()

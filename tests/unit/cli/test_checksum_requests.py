"""Requests to ``cdcpipe checksum`` that are wrong: it says so without a connection."""

import json
import os
import subprocess
import sys

import pytest

NOBODY = ("-h", "127.0.0.1", "-p", "1", "-d", "nowhere")


def ask(line: str) -> tuple[int, str]:
    """Return the exit code and stderr, where no server listens and no key is set."""
    environment = {name: value for name, value in os.environ.items() if name != "CDCPIPE_MASK_KEY"}
    command = [sys.executable, "-m", "cli", "checksum", *NOBODY]
    done = subprocess.run(command, input=line + "\n", capture_output=True, text=True, env=environment)
    assert done.stdout == ""
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "line", ["nonsense", "[]", '{"buckets": ["public", "t"]}', '{"begin": 5}', '{"begin": [], "masks": [1]}', '{"pending": "s"}']
)
def test_a_line_that_is_no_request(line: str) -> None:
    code, errors = ask(line)
    assert code == 6
    assert "not a request" in errors


@pytest.mark.parametrize("redirection", ["</dev/null", "<&-", "0>/dev/null"])
def test_a_stdin_without_requests(redirection: str) -> None:
    """It is empty, closed, or open for writing only, as nohup gives it. The last two were called a defect."""
    command = ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-m", "cli", "checksum", *NOBODY]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_hashed_columns_without_a_key() -> None:
    code, errors = ask(json.dumps({"begin": [["public", "t"]], "masks": {"public.t.email": "hash"}}))
    assert code == 1
    assert "CDCPIPE_MASK_KEY" in errors


def test_a_request_goes_to_the_server() -> None:
    code, errors = ask(json.dumps({"begin": [["public", "t"]]}))
    assert code == 2
    assert "no connection to the server" in errors

"""Usage of the command line: mistakes that are refused before a connection is tried, help, version."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from support.cli_process import COMMAND, run_cli
from support.forked_commands import ForkedCommands

USAGE = [
    ([], "--slot"),
    (["-S", "s", "--nonsense"], "--nonsense"),
    (["-S", "s", "-D", "0"], "--fd"),
    (["-S", "s", "-D", "-1"], "--fd"),
    (["-S", "s", "-D", "x"], "--fd"),
    (["-S", "s", "-D", "99"], "--fd"),
    (["-S", "s", "-s", "-1"], "seconds"),
    (["-S", "s", "-F", "nan"], "seconds"),
    (["-S", "s", "-L", "-u", "inf"], "seconds"),
    (["-S", "s", "-m", "novalue"], "KEY=VALUE"),
    (["-S", "s", "-m", "nonsense=1"], "nonsense"),
    (["-S", "s", "-m", "sslmode=Mars"], "correct sslmode, which -m or -d gives"),
    (["-S", "s", "-p", "Mars", "-L"], "correct -p"),
    (["-S", "s", "-U", "n\udcfc"], "argument 4 is not UTF-8"),
    (["prepare", "-S", "s", "-d", "dbname=n\udcfc"], "argument 5 is not UTF-8"),
    (["prepare", "-S", "s", "-p", "Mars"], "correct -p"),
    (["-S", "s", "-m", "password=CANARY"], "password"),
    (["-S", "s", "-d", "postgresql://u:CANARY@h/db"], "password"),
    (["-S", "s", "-d", "host=h password=CANARY"], "password"),
    (["-S", "s", "-d", "host=h password=CANARY CANARY"], "connection string"),
    (["-S", "s", "-j", "-J"], "exclude"),
    (["-S", "s", "-L", "--standby"], "exclude"),
    (["-S", "s", "-L", "--metrics", "9187"], "not with -L"),
    (["-S", "s", "--endpos", "junk"], "LSN"),
    (["-S", "s", "--endpos-wait"], "--endpos"),
    (["-S", "s", "--idle-positions", "-N"], "-H"),
    (["-S", "s", "--spill-threshold", "1MiB"], "--whole-transactions"),
    (["-S", "s", "--spill-threshold", "0"], "--whole-transactions"),
    (["decode", "-J", "--spill-threshold", "0"], "--whole-transactions"),
    (["decode", "--explain", "--spill-threshold", "0"], "--explain"),
    (["-S", "s", "--expect-lsn", "junk"], "LSN"),
    *((["-S", "s", "--expect", given], "system identifier") for given in ("foo", "7", "7/", "7/x", "/1", "7/1/1", "-7/1", "7/0")),
    (["-S", "s", "--expect", f"{1 << 64}/1"], "system identifier"),
    (["-S", "s", "--create-timeout", "5"], "goes with -c"),
    (["prepare", "-S", "s", "--create-timeout", "0"], "goes with -c"),
    (["-S", "s", "--table", "nodot"], "SCHEMA.NAME"),
    # The server would cut the name off: another long name could mean the same slot.
    (["-S", "s" * 64, "-c"], f"the server calls it '{'s' * 63}'"),
    (["slot", "-S", "s" * 64], "PostgreSQL keeps 63 bytes of a name"),
    (["prepare", "-S", "s", "--publication", "ü" * 32, "-c"], f"the server calls it '{'ü' * 31}'"),
    (["prepare", "-S", "s", "--publication", "", "-c"], "empty name"),
    (["ddl", "install", "--schema", "s" * 64], "PostgreSQL keeps 63 bytes of a name"),
    (["ddl", "install", "--publication", "s" * 64], "PostgreSQL keeps 63 bytes of a name"),
    (["nonsense"], "nonsense"),
    (["-S", "s", "-publication", "shop"], "--publication has two hyphens"),
    (["prepare", "-slot=s", "--publication", "shop"], "--slot has two hyphens"),
    (["-S", "s", "-publication=shop"], "--publication has two hyphens"),  # which is a port that libpq refuses
    (["-S", "s", "-m", "client_encoding=LATIN1"], "iconv -f UTF-8 -t LATIN1"),
    (["-d", "S", "nonsense"], "--help shows the options"),  # the value S is not the option -S
    (["prepare", "--nonsense"], "--nonsense"),
    (["-d", "shop", "-U", "me", "ddl", "remove"], "before ddl has no effect on it: -d, -U;"),
    (["-S", "s", "prepare"], "before prepare has no effect on it: -S;"),
    (["ddl"], "Missing command"),
    (["ddl", "nonsense"], "install, remove, status"),
    (["ddl", "install", "--schema"], "--schema"),
]


@pytest.mark.parametrize(("args", "named"), USAGE)
def test_usage_errors(args: list[str], named: str, commands: ForkedCommands) -> None:
    code, out, err = commands.cdcpipe(*args)
    assert (code, out) == (1, "")
    assert named in err
    assert "CANARY" not in err
    assert "Traceback" not in err


def test_the_format_of_the_log_may_stand_before_a_command(commands: ForkedCommands) -> None:
    """It counts for each command."""
    code, _, err = commands.cdcpipe("--log-format", "json", "prepare")
    assert (code, json.loads(err)["level"]) == (1, "error")


@pytest.mark.parametrize("option", ["-?", "--help"])
def test_help_is_on_stdout(option: str) -> None:
    code, out, err = run_cli(option)
    assert (code, err) == (0, "")
    assert b"--slot" in out
    assert b"\nExample:\n" in out


@pytest.mark.parametrize("command", [[], ["prepare"], ["doctor"], ["slot"]], ids=" ".join)
def test_help_is_in_utf8_whatever_the_locale_is(command: list[str]) -> None:
    code, out, err = run_cli(*command, "--help", env=os.environ | {"PYTHONIOENCODING": "iso8859-1"})
    assert (code, err) == (0, "")
    assert "…" in out.decode()


@pytest.mark.parametrize("arguments", [["--help"], ["ddl", "install", "--print"]], ids=" ".join)
def test_a_full_disk_under_an_answer_is_no_defect(arguments: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        ended = subprocess.run([*COMMAND, *arguments], stdout=full, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 7
    assert ended.stderr.startswith("cdcpipe: error: the answer can't be written to stdout: No space left on device\n")


def test_version() -> None:
    code, out, _ = run_cli("--version")
    assert code == 0
    assert re.fullmatch(rb"cdcpipe \d+\.\d+.*\n", out)


def test_no_server(tmp_path: os.PathLike[str]) -> None:
    code, _, err = run_cli("-S", "s", "-h", str(tmp_path))
    assert code == 2
    assert "hint" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--output", "debezum"), "there is no output plugin 'debezum'"),
        (("--output", "debezium", "-o", "topic.prefx=x"), "no option 'topic.prefx'"),
        (("--output", "test_decoding", "-o", "include-rewrites=1"), "include-rewrites"),
        (("-J", "-o", "format-version=3"), "format-version"),
        (("-J", "--two-phase"), "can't render prepared transactions"),
        (("-J", "-o", "filter-origins=1", "--streaming", "on", "--whole-transactions"), "'filter-origins' can't be honoured"),
        (("-J", "-o", "include-origin=1", "--streaming", "on", "--whole-transactions", "--origin", "any"), "'include-origin'"),
        (("--output", "test_decoding", "-o", "only-local", "-o", "stream-changes"), "'only-local' can't be honoured"),
        (("--output", "json", "-o", 'publication_names="p'), "not a list of identifiers"),
    ],
)
def test_mistakes_show_before_a_connection_is_tried(options: tuple[str, ...], message: str, commands: ForkedCommands) -> None:
    """There is no server. Exit code 2 would mean that the command tried to connect."""
    code, _, err = commands.cdcpipe("-h", "/nonexistent", "-S", "s", "--publication", "p", "-c", *options)
    assert (code, message in err) == (1, True), err


@pytest.mark.parametrize(
    "options",
    [
        ("-J", "-o", "filter-origins=1"),
        ("-J", "--streaming", "on", "--whole-transactions"),
        ("-J", "-o", "filter-origins=1", "--streaming", "on", "--whole-transactions", "--origin", "none"),
        ("--output", "test_decoding", "-o", "only-local=0", "-o", "stream-changes"),
        ("--output", "test_decoding", "-o", "only-local", "-o", "stream-changes", "--origin", "none"),
    ],
)
def test_origins_are_known_without_streaming_or_do_not_matter(options: tuple[str, ...], commands: ForkedCommands) -> None:
    code, _, err = commands.cdcpipe("-h", "/nonexistent", "-S", "s", "--publication", "p", *options)
    assert code == 2, err


WAITS = [(("-u", "5"), True), (("-i", "1"), True), (("-L", "-u", "5", "-i", "1"), False)]


@pytest.mark.parametrize(("options", "is_warned"), WAITS)
def test_options_of_a_wait_without_one_are_named(options: tuple[str, ...], is_warned: bool, commands: ForkedCommands) -> None:
    """They are no error: pg_logical_cdc takes them."""
    code, _, err = commands.cdcpipe("-h", "/nonexistent", "-S", "s", "--publication", "p", *options)
    assert (code, "-u and -i have no effect" in err) == (2, is_warned), err


def test_mistakes_in_rendering_a_capture_show_before_a_connection_is_tried(commands: ForkedCommands) -> None:
    code, _, err = commands.cdcpipe("decode", "-h", "/nonexistent", "--output", "debezium", "-o", "topic.prefx=x")
    assert (code, "no option 'topic.prefx'" in err) == (1, True), err


@pytest.mark.parametrize(("entry", "imported"), [("cli.__main__", "cli.invoke"), ("spark_sink.console", "spark_sink.__main__")])
def test_an_interrupt_during_the_imports_is_no_traceback(entry: str, imported: str) -> None:
    program = f"""
import importlib, os, signal, sys

class Interrupting:
    def find_spec(self, name, *_):
        if name == {imported!r}:
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests may run where it is ignored
sys.meta_path.insert(0, Interrupting())
importlib.import_module({entry!r}).main()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, "", "")

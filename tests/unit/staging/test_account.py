"""The account of the slot: what a file that is missing, damaged or not readable now means."""

import errno
import os
from pathlib import Path
from typing import NoReturn

import pytest

from spark_sink.staging import account


def test_the_account_only_grows(tmp_path: Path):
    assert account.read(tmp_path) == account.Account()
    assert account.record(tmp_path, 0x200)
    assert account.record(tmp_path, 0x100)
    assert account.read(tmp_path).lsn == 0x200
    account.cut(tmp_path, 0x300)
    assert account.read(tmp_path).lsn == 0x200
    account.cut(tmp_path, 0x100)
    assert account.read(tmp_path).lsn == 0x100


def test_an_account_of_a_log_that_had_more_says_nothing(tmp_path: Path):
    assert account.record(tmp_path, 0x400, 0x300)
    assert account.read(tmp_path).of_log(0x300).lsn == account.read(tmp_path).of_log(0x380).lsn == 0x400
    assert account.read(tmp_path).of_log(0x2FF) == account.Account()
    account.settle(tmp_path, 0x300)
    assert account.read(tmp_path).lsn == 0x400
    account.settle(tmp_path, 0x200)  # the log goes on there, and may become longer than the other one was
    assert account.read(tmp_path).of_log(0x500).lsn == 0x200


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"lsn": "x"}', '{"lsn": null}'])
def test_a_damaged_file_is_a_lost_account(tmp_path: Path, text: str):
    (tmp_path / "known.json").write_text(text)
    assert account.read(tmp_path) == account.Account()
    assert account.record(tmp_path, 0x100)
    assert account.read(tmp_path).lsn == 0x100


def test_a_file_that_cannot_be_read_now_is_no_lost_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The launcher would take a lost account for a gap, and copy all tables anew if it is told to."""
    assert account.record(tmp_path, 0x200)

    def fail(_path: Path) -> NoReturn:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as context:
        context.setattr(account, "read_json", fail)
        with pytest.raises(OSError, match="Too many open files"):
            account.read(tmp_path)
        assert not account.record(tmp_path, 0x100)
    assert account.read(tmp_path).lsn == 0x200


def test_the_time_is_when_the_server_was_there(tmp_path: Path) -> None:
    """A run with --available-now records at its end where the server was at its start. A copy of the file has another mtime."""
    account.record(tmp_path, 0x200, at=1000.0)
    assert account.read(tmp_path).time == 1000.0
    account.cut(tmp_path, 0x100)
    assert account.read(tmp_path) == account.Account(0x100, 1000.0)
    (tmp_path / "known.json").write_text('{"lsn": "0/300"}')  # of an older version
    os.utime(tmp_path / "known.json", (7.0, 7.0))
    assert account.read(tmp_path).time == 7.0

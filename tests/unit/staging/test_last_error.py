"""The last error of a command that uses a staging directory."""

import errno
import fcntl
import os
from contextlib import closing
from pathlib import Path

import pytest

from cdcpipe.errors import CdcpipeError, SlotDoesNotExistError
from spark_sink.staging import last_error
from spark_sink.staging.lock import StagingLock


def test_nothing_is_recorded_while_the_directory_is_in_use(tmp_path: Path) -> None:
    last_error.note(tmp_path, "run", CdcpipeError("of the last one"))
    with closing(StagingLock(tmp_path)):
        last_error.note(tmp_path, "run", CdcpipeError("of one that was refused"))
        last_error.clear(tmp_path)
    found = last_error.read(tmp_path)
    assert found is not None
    assert found["message"] == "of the last one"
    last_error.clear(tmp_path)
    assert last_error.read(tmp_path) is None


def test_the_last_error_is_kept(tmp_path: Path) -> None:
    last_error.note(tmp_path / "nowhere", "run", ValueError("x"))
    assert not (tmp_path / "nowhere").exists()
    assert last_error.read(tmp_path) is None
    (tmp_path / "warehouse/_cdcpipe").mkdir(parents=True)
    last_error.note(tmp_path / "warehouse", "run", ValueError("x"))
    assert last_error.read(tmp_path / "warehouse") is None
    last_error.note(tmp_path, "run", ValueError("a row's value"))
    found = last_error.read(tmp_path)
    assert found is not None
    assert (found["message"], found["exit_code"]) == ("unexpected ValueError", 7)
    last_error.note(tmp_path, "land", SlotDoesNotExistError("no slot", hint="make one"))
    found = last_error.read(tmp_path)
    assert found is not None
    assert (found["command"], found["message"], found["hint"], found["exit_code"]) == ("land", "no slot", "make one", 8)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EIO])
def test_a_file_system_without_locks_does_not_hide_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    (tmp_path / "lock").touch()
    monkeypatch.setattr(fcntl, "flock", refuse)
    last_error.note(tmp_path, "land", CdcpipeError("the disk has no locks"))
    found = last_error.read(tmp_path)
    assert found is not None
    assert found["message"] == "the disk has no locks"
    last_error.clear(tmp_path)
    assert last_error.read(tmp_path) is None


def test_the_lock_of_another_user_does_not_hide_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    last_error.note(tmp_path, "run", CdcpipeError("of the owner"))

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(last_error, "lock_owner", refuse)
    last_error.note(tmp_path, "run", CdcpipeError("belongs to user id 7"))
    last_error.clear(tmp_path)
    found = last_error.read(tmp_path)
    assert found is not None
    assert found["message"] == "of the owner"


def test_a_directory_that_cannot_be_looked_at_does_not_hide_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *_: object, **__: object) -> os.stat_result:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))

    monkeypatch.setattr(Path, "stat", refuse)
    monkeypatch.setattr(os, "open", refuse)
    last_error.note(tmp_path, "run", CdcpipeError("x"))
    last_error.clear(tmp_path)


def test_a_damaged_file_is_no_error(tmp_path: Path) -> None:
    """It stopped ``status``."""
    last_error.note(tmp_path, "run", CdcpipeError("x"))
    (path,) = tmp_path.iterdir()
    path.write_text("{")
    assert last_error.read(tmp_path) is None

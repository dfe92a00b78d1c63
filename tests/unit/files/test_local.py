"""Errors of the system about files that are open: they name the file."""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cdcpipe.errors import CdcpipeError, InvalidArgumentsError
from cdcpipe.pipe.exitcode import ExitCode
from spark_sink.files import places
from spark_sink.files.local import check_usable, fsync_directory, local_directory, nameable_directory, read_json, write_json
from spark_sink.files.places import put_if_absent, sync_file
from spark_sink.files.system_hints import hint_of


def fail(*_: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_file_that_cannot_be_read_is_named() -> None:
    unreadable = Path("/proc/self/mem")  # it can be opened, and its first byte can't be read
    with pytest.raises(OSError, match="Input/output error") as raised:
        read_json(unreadable)
    assert raised.value.filename == str(unreadable)


def test_a_file_that_cannot_be_made_durable_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    path.touch()
    monkeypatch.setattr(os, "fsync", fail)
    for write, named in (
        (lambda: write_json(path, {}), path),
        (lambda: put_if_absent(path, b""), tmp_path),
        (lambda: sync_file(path), path),
        (lambda: fsync_directory(tmp_path), tmp_path),
    ):
        with pytest.raises(OSError, match="Input/output error") as raised:
            write()
        assert str(raised.value.filename).startswith(str(named))
    assert os.listdir(tmp_path) == ["a.json"]


def test_who_reads_the_tables_reads_what_is_noted_of_them(tmp_path: Path) -> None:
    """The umask decides for a warehouse. A staging directory is private whatever the umask is."""
    before = os.umask(0o027)
    try:
        places.write_json(tmp_path / "of_a_warehouse", {})
        put_if_absent(tmp_path / "of_a_copy", b"")
        write_json(tmp_path / "of_a_log", {})
    finally:
        os.umask(before)
    modes = {each.name: stat.S_IMODE(each.stat().st_mode) for each in tmp_path.iterdir()}
    assert modes == {"of_a_warehouse": 0o640, "of_a_copy": 0o640, "of_a_log": 0o600}


def test_a_disk_that_was_mounted_read_only_is_no_missing_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux mounts a disk read-only after an error of it. Another directory, or another user, does not help then."""
    flags = 0
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=flags))
    with pytest.raises(CdcpipeError, match=r"is not writable$") as raised:
        check_usable(tmp_path / "lake", "the warehouse")
    assert "this user" in (raised.value.hint or "")
    assert raised.value.exit_code == ExitCode.SYSTEM_ERROR  # systemd starts it again: the mount may come later
    flags = os.ST_RDONLY
    with pytest.raises(CdcpipeError, match=r"the warehouse can't be there: .* that is mounted read-only$") as raised:
        check_usable(tmp_path / "lake", "the warehouse")
    assert "mount it for writing" in (raised.value.hint or "")
    assert raised.value.exit_code == ExitCode.SYSTEM_ERROR


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO])
def test_a_mount_that_is_away_is_not_taken_for_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    lake, stat_of = tmp_path / "lake", os.stat

    def answer(path: Any, **options: Any) -> os.stat_result:
        if Path(path) == lake:
            raise OSError(number, os.strerror(number))
        return stat_of(path, **options)

    monkeypatch.setattr(os, "stat", answer)
    monkeypatch.setattr(os, "lstat", lambda path: answer(path, follow_symlinks=False))
    with pytest.raises(CdcpipeError, match=re.escape(os.strerror(number))) as raised:
        check_usable(lake, "the warehouse")
    assert (raised.value.exit_code, raised.value.hint) == (ExitCode.SYSTEM_ERROR, hint_of(OSError(number, "")))


def test_a_directory_has_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark removes .. from the text of a path. Behind a symbolic link that is another directory than the system's."""
    (tmp_path / "work").mkdir()
    (tmp_path / "far/away").mkdir(parents=True)
    (tmp_path / "link").symlink_to("far/away")
    (tmp_path / "here").symlink_to("work")
    monkeypatch.chdir(tmp_path / "work")
    found = [local_directory(path, "it") for path in ("../lake", Path("../work/./lake"), "../link/../lake", "../here/lake")]
    assert found == [tmp_path / name for name in ("lake", "work/lake", "far/lake", "here/lake")]
    assert local_directory(f"/{tmp_path}/lake", "it") == tmp_path / "lake"
    assert str(local_directory("../link/lake", "it")) == f"{tmp_path}/link/lake"  # a link stays, if there is no question
    assert str(local_directory("/", "it")) == "/"


@pytest.mark.parametrize(
    ("path", "encoding", "hint"),
    [("l\udcffke", "utf-8", "another path"), ("lake-ä", "iso8859-1", "LC_ALL=C.UTF-8")],
)
def test_a_directory_has_the_same_name_for_arrow_and_java(
    path: str, encoding: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take paths as UTF-8, and fail at others, after the slot has been made."""
    monkeypatch.setattr("sys.getfilesystemencoding", lambda: encoding)
    with pytest.raises(InvalidArgumentsError, match="not UTF-8 text") as raised:
        nameable_directory(path, "the staging directory")
    assert hint in str(raised.value.hint)
    monkeypatch.undo()
    assert nameable_directory("lake-ä", "it").name == "lake-ä"

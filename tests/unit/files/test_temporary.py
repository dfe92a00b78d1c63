"""The directory of a process's temporary files."""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from spark_sink.files.lock import try_lock
from spark_sink.files.temporary import _remove_left

MARK = "made-by-cdcpipe-spark"

_PROGRAM = """
import os, sys
from spark_sink.files.temporary import directory_of_process
directory = directory_of_process()
assert directory_of_process() == directory
(directory / "some").mkdir()
(directory / "some/file").touch()
if not (child := os.fork()):
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
print(directory, flush=True)
sys.stdin.read()
"""


def _start(tmpdir: Path) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmpdir)},
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().rstrip("\n"))


def test_a_process_removes_its_directory_and_those_of_killed_ones(tmp_path: Path) -> None:
    """But a child that it has forked, and that ends with `sys.exit`, leaves the directory alone."""
    (tmp_path / "of another program").mkdir()
    killed, left = _start(tmp_path)
    living, used = _start(tmp_path)
    killed.kill()
    killed.communicate()
    assert sorted(tmp_path.glob("cdcpipe-*")) == sorted([left, used])
    with (used / MARK).open("r+b") as mark:
        assert not try_lock(mark.fileno())
    third, own = _start(tmp_path)
    assert not left.exists()
    for process, directory in [(living, used), (third, own)]:
        assert (directory / "some/file").exists()
        process.communicate()
        assert process.returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["of another program"]


def _make(directory: Path, mark: str | None = None) -> Path:
    """Make a directory as this program makes it, unless another text is asked for."""
    (directory / "some").mkdir(parents=True)
    (directory / "some/file").touch()
    (directory / MARK).write_text(directory.name if mark is None else mark)
    return directory


def test_what_is_no_directory_of_ours_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    target = _make(tmp_path / "target")
    (tmp_path / "cdcpipe-spark-a_link_1").symlink_to(target)
    (tmp_path / "cdcpipe-spark-a_file_1").touch()
    _make(tmp_path / "cdcpipe-spark-another1")
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    before = sorted(tmp_path.rglob("*"))
    _remove_left()
    assert sorted(tmp_path.rglob("*")) == before


def test_what_this_program_did_not_make_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator's directory whose name begins as ours used to be deleted, with all that was in it, by the next start of Spark."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    _make(tmp_path / "cdcpipe-spark-backup")
    _make(tmp_path / "cdcpipe-spark-shop")
    for name in ["cdcpipe-spark-warehous", "cdcpipe-spark-staging_"]:  # as long as our names
        (tmp_path / name / "tables").mkdir(parents=True)
        (tmp_path / name / "tables/rows").touch()
    (tmp_path / "cdcpipe-spark-empty_01").mkdir()
    _make(tmp_path / "cdcpipe-spark-a_copy_1", mark="cdcpipe-spark-original")
    before = sorted(tmp_path.rglob("*"))
    _remove_left()
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("locked", ["", MARK])
def test_a_directory_is_removed_as_soon_as_nobody_holds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locked: str) -> None:
    """On NFS a machine has the locks of its own directories only: it deleted the files of a Spark that ran on another one."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    directory = _make(tmp_path / "cdcpipe-spark-x1y2z3_4")
    fd = os.open(directory / locked, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_SH)
    _remove_left()
    assert directory.exists()
    os.close(fd)
    _remove_left()
    assert not directory.exists()


def test_a_removal_that_was_ended_goes_on_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    directory = _make(tmp_path / "cdcpipe-spark-x1y2z3_4")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        _remove_left()
    assert (directory / "some/file").exists()
    _remove_left()
    assert not directory.exists()

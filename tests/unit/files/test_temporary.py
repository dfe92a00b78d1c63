"""The directory of a process's temporary files."""

import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from spark_sink.files.temporary import _remove_left

_PROGRAM = """
import sys
from spark_sink.files.temporary import directory_of_process
directory = directory_of_process()
assert directory_of_process() == directory
(directory / "some").mkdir()
(directory / "some/file").touch()
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
    (tmp_path / "of another program").mkdir()
    killed, left = _start(tmp_path)
    living, used = _start(tmp_path)
    killed.kill()
    killed.communicate()
    assert sorted(tmp_path.glob("cdcpipe-*")) == sorted([left, used])
    third, own = _start(tmp_path)
    assert not left.exists()
    for process, directory in [(living, used), (third, own)]:
        assert (directory / "some/file").exists()
        process.communicate()
        assert process.returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["of another program"]


def test_what_is_no_directory_of_ours_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    target = tmp_path / "target"
    target.mkdir()
    (tmp_path / "cdcpipe-spark-link").symlink_to(target)
    (tmp_path / "cdcpipe-spark-file").touch()
    (tmp_path / "cdcpipe-spark-of-another").mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    before = sorted(tmp_path.iterdir())
    _remove_left()
    assert sorted(tmp_path.iterdir()) == before


def test_a_directory_is_removed_as_soon_as_nobody_holds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    directory = tmp_path / "cdcpipe-spark-x"
    directory.mkdir()
    fd = os.open(directory, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_SH)
    _remove_left()
    assert directory.exists()
    os.close(fd)
    _remove_left()
    assert not directory.exists()

"""Errors of the files that hold transactions in progress. (What they hold is tested with the transactions, in test_held.py.)"""

import os
import resource
import signal
from pathlib import Path

import pytest

from cdcpipe.errors import OutputError
from cdcpipe.pipe.spill import Spills


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def spill_files(directory: Path) -> list[Path]:
    """Return the process's open files without names in the directory."""
    links = [Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd")]
    return [link for link in links if link.is_symlink() and os.readlink(link).startswith(f"{directory}/")]


def test_a_directory_that_is_not_there(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(directory / "gone"))
    with pytest.raises(OutputError, match=r"in progress in .*/gone: No such file") as raised:
        Spills().open()
    assert "TMPDIR" in raised.value.hint


def test_a_file_that_may_not_grow(directory: Path) -> None:
    """The kernel refuses the second block. What was written before stays."""
    spill = Spills().open()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        spill.append(b"a" * 90_000)
        with pytest.raises(OutputError, match="File too large"):
            spill.append(b"b" * 90_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert spill.read(0, 90_000) == b"a" * 90_000
    spill.close()
    assert spill_files(directory) == []


def test_a_file_that_another_program_cuts(directory: Path) -> None:
    spill = Spills().open()
    spill.append(b"a" * 100_000)
    (file,) = spill_files(directory)
    os.truncate(file, 70_000)
    assert spill.read(0, 70_000) == b"a" * 70_000
    with pytest.raises(OutputError, match="another program has cut a file"):
        spill.read(0, 100_000)
    spill.close()


@pytest.mark.parametrize(("mode", "method"), [(os.O_RDONLY, "truncate"), (os.O_WRONLY, "read")])
def test_a_disk_that_fails(directory: Path, mode: int, method: str) -> None:
    spill = Spills().open()
    spill.append(b"a" * 100_000)
    (file,) = spill_files(directory)
    other = os.open(directory, os.O_TMPFILE | os.O_RDWR)
    refusing = os.open(f"/proc/self/fd/{other}", mode)
    os.dup2(refusing, int(file.name))
    os.close(refusing)
    os.close(other)
    with pytest.raises(OutputError, match="cannot keep a transaction in progress"):
        spill.truncate(0) if method == "truncate" else spill.read(0, 1)
    spill.close()

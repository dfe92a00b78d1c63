"""The scripts, as far as they need no server."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import ROOT

SCRIPTS = [
    path
    for folder in ("scripts", "scripts/lib", "scripts/bench", ".ci")
    for path in sorted((ROOT / folder).iterdir())
    if path.suffix == ".sh" or (path.is_file() and path.read_bytes().startswith(b"#!/bin/sh\n"))
]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_shell_scripts_are_shell(path: Path) -> None:
    assert subprocess.run(["sh", "-n", path]).returncode == 0
    assert path.suffix == ".sh" or os.access(path, os.X_OK)


def test_pg_says_what_is_wrong() -> None:
    done = subprocess.run([sys.executable, ROOT / "scripts/lib/postgres.py", "9"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "PostgreSQL 9 is not among" in done.stderr


def test_help_of_pg_needs_no_virtual_environment(tmp_path: Path) -> None:
    environment = os.environ | {"CDCPIPE_VENV": str(tmp_path / "venv")}
    done = subprocess.run([ROOT / "scripts/pg", "--help"], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: scripts/pg ")
    assert not (tmp_path / "venv").exists()


def test_the_demo_leaves_other_directories_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/lib/demo.py", "--directory", tmp_path],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 2
    assert "not from an earlier demo" in done.stderr
    assert (tmp_path / "precious").exists()

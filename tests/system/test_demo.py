"""`scripts/demo`, the first command that README names, with less to do."""

import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import ROOT
from support.requirements import need


@pytest.mark.spark
def test_the_demo_ends_with_equal_tables(tmp_path: Path) -> None:
    need("18")
    argv = [sys.executable, ROOT / "scripts/lib/demo.py", "--directory", tmp_path / "demo", "--changes", "4000"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=900, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = [line.split()[-1] for line in done.stdout.splitlines() if line.endswith(("equal", "DIFFERENT"))]
    assert verdicts == ["equal"] * 7

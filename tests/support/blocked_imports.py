"""Runs programs as if some packages were not installed."""

import subprocess
import sys

from support.paths import ROOT

BLOCKED = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"{{name}} is blocked", name=name)

sys.meta_path.insert(0, Block())
import {module}
"""


def import_without(blocked: set[str], module: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BLOCKED.format(blocked=blocked, module=module)], capture_output=True, text=True, cwd=ROOT
    )

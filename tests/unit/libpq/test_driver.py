"""psycopg's parts come without the rest of psycopg, which is there for everyone who asks for it."""

import subprocess
import sys

import pytest

from support.paths import ROOT


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_stream_imports_nothing_else_of_psycopg() -> None:
    assert run("import sys, cli.invoke; print('psycopg.pq' in sys.modules, 'psycopg.connection' in sys.modules)") == "True False\n"


@pytest.mark.parametrize(
    "use",
    [
        "import psycopg; psycopg.connect, psycopg.sql, psycopg.types",
        "from psycopg import connect",
        "from psycopg.types.json import Json",
        "import psycopg.rows; psycopg.AsyncConnection",
        "from psycopg import *; connect",
    ],
)
def test_psycopg_is_whole_for_everyone_else(use: str) -> None:
    same = "psycopg.pq is driver.pq and psycopg.errors is driver.errors and psycopg.Error is driver.errors.Error"
    for order in (["from cdcpipe.libpq import driver", use], [use, "from cdcpipe.libpq import driver"]):
        assert run("\n".join([*order, "import psycopg", f"print({same}, psycopg.__version__ != '')"])) == "True True\n"

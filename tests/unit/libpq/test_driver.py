"""psycopg's parts come without the rest of psycopg and without asyncio, which are there for everyone who asks for them."""

import subprocess
import sys

import pytest

from support.paths import ROOT


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_stream_imports_nothing_else() -> None:
    names = "'psycopg.pq', 'psycopg.connection', 'asyncio.base_events'"
    assert run(f"import sys, cli.invoke; print([name in sys.modules for name in ({names})])") == "[True, False, False]\n"


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


@pytest.mark.parametrize(
    "use",
    [
        "import asyncio; asyncio.run(asyncio.sleep(0))",
        "from asyncio import run, sleep; run(sleep(0))",
        "import asyncio.subprocess; asyncio.subprocess.PIPE, asyncio.Queue",
        "from asyncio import *; run(sleep(0))",
    ],
)
def test_asyncio_is_whole_for_everyone_else(use: str) -> None:
    same = "asyncio.CancelledError is asyncio.exceptions.CancelledError"
    for order in (["from cdcpipe.libpq import driver", use], [use, "from cdcpipe.libpq import driver"]):
        assert run("\n".join([*order, "import asyncio", f"print({same})"])) == "True\n"

"""`cdcpipe-spark status --check`: the exit codes of monitoring plugins, with a real server and a real log.

tests/unit/status/test_check.py tests which state follows from which facts, tests/unit/commands/test_status.py what is refused.
"""

import re
import subprocess
import sys
from pathlib import Path

import postgres

from support.paths import ROOT
from support.waiting import DEADLINE_S


def cdcpipe_spark(*arguments: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "spark_sink", *arguments], capture_output=True, text=True, timeout=DEADLINE_S, cwd=ROOT
    )
    return done.returncode, done.stdout, done.stderr


def check(*arguments: str) -> tuple[int, str]:
    """Return the exit code, and the line, which is the only output."""
    code, stdout, stderr = cdcpipe_spark("status", "--check", *arguments)
    assert (stderr, stdout.count("\n")) == ("", 1)
    return code, stdout.strip()


def test_a_log_that_falls_behind(database: postgres.Database, tmp_path: Path) -> None:
    staging = str(tmp_path / "staging")
    land = ("land", "-d", database.dsn, "-S", "check_s", "--publication", "p", "-c", "--staging", staging, "--available-now")
    with database.connect() as connection:
        connection.execute("create table t (id int primary key, v text)")
        assert cdcpipe_spark(*land)[0] == 0
        connection.execute("insert into t values (1, 'a')")
        assert cdcpipe_spark(*land)[0] == 0
        limits = ("--max-lag-bytes", "4M,64M", "--max-wal", "16G")
        code, line = check("--staging", staging, "-d", database.dsn, *limits)
        assert code == 0, line
        assert re.fullmatch(r"CDCPIPE OK: .* \| lag=[\d.]+s;;;0; lag_bytes=\d+B;4194304;67108864;0; wal=\d+B;;17179869184;0;", line)

        connection.execute("insert into t select n, repeat(md5(n::text), 40) from generate_series(2, 5000) n")
        code, line = check("--staging", staging, "-d", database.dsn, *limits)
        assert (code, line[:16]) == (1, "CDCPIPE WARNING:"), line
        assert "MiB of WAL behind (limit 4.0 MiB)" in line
        code, line = check("--staging", staging, "-d", database.dsn, "--max-wal", "1M")
        assert (code, "of WAL (limit 1.0 MiB)" in line) == (2, True), line
        # The change that the log lacks is no older than the newest that it has.
        code, line = check("--staging", staging, "-d", database.dsn, "--max-lag", "0")
        assert (code, " behind (limit 0 s)" in line) == (2, True), line
        connection.execute("select pg_drop_replication_slot('check_s')")
        code, line = check("--staging", staging, "-d", database.dsn)
        assert (code, "'check_s' does not exist: later changes are lost, unless" in line) == (2, True), line
    code, line = check("--staging", staging, "-d", f"{database.dsn} port=1", "--max-lag", "60")
    assert (code, line.startswith("CDCPIPE UNKNOWN: the server can't be asked")) == (3, True)
    code, line = check("--staging", staging)
    assert (code, "no launcher is running" in line) == (1, True)

"""`land` as a service of systemd: what its service manager hears, from the start to SIGTERM, and what it notes for status."""

import os
import signal
import socket
import subprocess
from pathlib import Path

import postgres

from support.cli_process import SPARK_COMMAND, run_spark_cli, spark_cli
from support.waiting import until


def test_a_service_says_when_it_is_ready_alive_and_ending(database: postgres.Database, tmp_path: Path) -> None:
    with database.connect() as connection:
        connection.execute("create table fruit (id int primary key)")
    options = ["-d", database.dsn, "-S", database.name, "-c", "--publication", "p", "--staging", str(tmp_path / "staging")]
    environment = os.environ | {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "60000000"}
    environment.pop("WATCHDOG_PID", None)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(60)
        with subprocess.Popen([*SPARK_COMMAND, "land", *options], env=environment, stderr=subprocess.DEVNULL) as process:
            try:
                assert manager.recv(100) == b"READY=1"
                with database.connect() as connection:
                    slots = "select count(*) from pg_replication_slots where slot_name = %s"
                    assert connection.execute(slots, (database.name,)).fetchone() == (1,)
                assert [manager.recv(100) for _ in range(3)] == [b"WATCHDOG=1"] * 3
                until((tmp_path / "staging/history.jsonl").exists, "the first sample of the history", deadline_s=60)
                process.send_signal(signal.SIGTERM)
                while (message := manager.recv(100)) == b"WATCHDOG=1":
                    pass
                assert message == b"STOPPING=1"
                assert process.wait(60) == 0
            finally:
                process.kill()
    spark_cli("status", "--staging", str(tmp_path / "staging"), "--html", str(tmp_path / "page.html"))
    assert "records per second in the log" in (tmp_path / "page.html").read_text()
    assert run_spark_cli("land", *options, "--available-now").returncode == 0

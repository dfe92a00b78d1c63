"""--metrics of `cdcpipe`, `land` and `run` on a real server, scraped as by Prometheus."""

import json
import re
import signal
import socket
import subprocess
from pathlib import Path

import postgres
import pytest
from ports import free_port
from prometheus_client import Metric as Family

from cdcpipe.lsn import LSN
from cdcpipe.streaming.metrics import METRICS as STREAM
from spark_sink.metrics.table import LAND, RUN
from spark_sink.staging.samples import read as read_samples
from support.cli_process import CLI, SPARK_COMMAND, run_cli, run_spark_cli
from support.metrics import names_of, scrape, value
from support.waiting import until


@pytest.fixture
def slot(database: postgres.Database) -> str:
    with database.connect() as connection:
        connection.execute("create table fruit (id int primary key, name text)")
        connection.execute("create publication p for all tables")
        connection.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", (database.name,))
    return database.name


def change(database: postgres.Database, first: int, last: int) -> None:
    with database.connect() as connection:
        connection.execute("insert into fruit select i, 'CANARY' from generate_series(%s::int, %s::int) i", (first, last))


def wal_lsn(database: postgres.Database) -> int:
    with database.connect() as connection:
        return LSN.parse(connection.execute("select pg_current_wal_lsn()::text").fetchone()[0])


def scraped(port: int, name: str, least: float, **labels: str) -> dict[str, Family]:
    """Scrape until a sample has at least this value, and return that scrape."""

    def look() -> dict[str, Family] | None:
        try:
            found = scrape(port)
        except ConnectionError:
            return None
        return found if (value(found, name, **labels) or -1) >= least else None

    found: dict[str, Family] = until(look, f"{name} of {least}", deadline_s=120)
    return found


def samples(families: dict[str, Family]) -> set[str]:
    return {sample.name for family in families.values() for sample in family.samples if not sample.name.startswith("process_")}


def test_a_stream_counts_what_it_writes(database: postgres.Database, slot: str) -> None:
    port = free_port()
    with CLI("-d", database.dsn, "-S", slot, "--publication", "p", "--metrics", str(port)) as stream:
        change(database, 1, 1000)
        lsn = stream.take(1003)[-1][0]
        found = scraped(port, "cdcpipe_position_bytes", lsn, stage="written")
        assert value(found, "cdcpipe_stream_transactions_total") == 1
        assert samples(found) == {*names_of(STREAM)}
        assert value(found, "cdcpipe_pipeline_info", command="cdcpipe", slot=slot) == 1
        assert value(found, "cdcpipe_stream_records_total") == 1003
        assert value(found, "cdcpipe_stream_bytes_total") > 1003 * 20
        assert value(found, "cdcpipe_position_bytes", stage="received") >= lsn
        assert value(found, "cdcpipe_pending_bytes") == 0
        stream.say(f"F {LSN(wal_lsn(database))}\n")
        scraped(port, "cdcpipe_position_bytes", lsn, stage="confirmed")
        assert stream.quit() == 0
    with pytest.raises(ConnectionError):
        scrape(port)


def test_a_reader_that_does_not_read_and_a_large_transaction_show(database: postgres.Database, slot: str) -> None:
    port = free_port()
    arguments = ["--whole-transactions", "--streaming", "on", "--spill-threshold", "1MiB", "--metrics", str(port)]
    arguments += ["-m", "options=-c logical_decoding_work_mem=64kB"]
    with CLI("-d", database.dsn, "-S", slot, "--publication", "p", *arguments) as stream, database.connect() as other:
        with other.transaction():
            other.execute("insert into fruit select i, repeat('x', 1000) from generate_series(1, 10000) i")
            found = scraped(port, "cdcpipe_spill_bytes", 1)
            assert value(found, "cdcpipe_held_bytes") <= 2 << 20
        found = scraped(port, "cdcpipe_pending_bytes", 1)
        stream.process.kill()


def test_a_port_in_use_is_an_error_before_anything_begins(database: postgres.Database, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        options = ("-d", database.dsn, "-S", "none", "-c", "--publication", "p", "--metrics", port)
        code, _, err = run_cli(*options)
        assert (code, f"--metrics 127.0.0.1:{port}: Address already in use" in err) == (7, True)
        for command in (["land"], ["run", "--warehouse", str(tmp_path / "warehouse")]):
            done = run_spark_cli(*command, *options, "--staging", str(tmp_path / "staging"))
            assert (done.returncode, f"--metrics 127.0.0.1:{port}: Address already in use" in done.stderr) == (7, True)
    assert list(tmp_path.iterdir()) == []
    with database.connect() as connection:
        assert connection.execute("select count(*) from pg_replication_slots where slot_name = 'none'").fetchone() == (0,)


def test_a_launcher_shows_stages_slot_and_staging(database: postgres.Database, slot: str, tmp_path: Path) -> None:
    port = free_port()
    options = ["-d", database.dsn, "-S", slot, "--publication", "p", "--staging", str(tmp_path), "--metrics", str(port)]
    with subprocess.Popen([*SPARK_COMMAND, "land", *options], stderr=subprocess.PIPE, text=True) as process:
        try:
            change(database, 1, 1000)
            after = wal_lsn(database)
            found = scraped(port, "cdcpipe_stream_records_total", 1003)
            found = scraped(port, "cdcpipe_position_bytes", after, stage="confirmed")
            optional = {"cdcpipe_slot_safe_wal_bytes", "cdcpipe_last_error_timestamp_seconds"}
            assert samples(found) == {*names_of(LAND)} - optional
            assert value(found, "cdcpipe_server_up") == value(found, "cdcpipe_slot_active") == 1
            assert value(found, "cdcpipe_slot_wal_status", status="reserved") == 1
            assert value(found, "cdcpipe_slot_wal_status", status="lost") == 0
            assert value(found, "cdcpipe_seal_duration_seconds_count") == value(found, "cdcpipe_segments_total") >= 1
            assert value(found, "cdcpipe_staging_segments") >= 1
            size = sum(path.stat().st_size for path in tmp_path.rglob("*.cdc"))
            assert value(found, "cdcpipe_staging_bytes") == value(found, "cdcpipe_stream_bytes_total") == size
            with database.connect() as connection:  # the stream is lost, and comes back
                connection.execute(
                    "select pg_terminate_backend(active_pid) from pg_replication_slots where slot_name = %s", (slot,)
                )
            found = scraped(port, "cdcpipe_restarts_total", 1)
            assert value(found, "cdcpipe_last_error_timestamp_seconds", part="streamer") > 1.7e9
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.communicate()


def test_a_launcher_shows_what_its_streamer_spills(database: postgres.Database, slot: str, tmp_path: Path) -> None:
    port = free_port()
    options = ["-d", database.dsn, "-S", slot, "--publication", "p", "--staging", str(tmp_path), "--metrics", str(port)]
    options += ["-m", "options=-c logical_decoding_work_mem=64kB"]
    with subprocess.Popen([*SPARK_COMMAND, "land", *options], stderr=subprocess.DEVNULL) as process, database.connect() as other:
        try:
            with other.transaction():  # more than the 64 MiB that the streamer holds in memory
                other.execute("insert into fruit select i, repeat('x', 1000) from generate_series(1, 80000) i")
                scraped(port, "cdcpipe_spill_bytes", 1 << 20)
            found = scraped(port, "cdcpipe_stream_transactions_total", 1)
            assert value(found, "cdcpipe_spill_bytes") == 0
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
        finally:
            process.kill()


@pytest.mark.spark
def test_a_run_shows_its_tables_and_says_objects_also_for_spark(database: postgres.Database, slot: str, tmp_path: Path) -> None:
    """One run for --metrics and for --log-format json (test_log_format.py has the commands without Spark)."""
    port = free_port()
    options = ["-d", database.dsn, "-S", slot, "--publication", "p", "--staging", str(tmp_path / "staging")]
    options += ["--warehouse", str(tmp_path / "warehouse"), "--metrics", str(port), "--replica-interval", "0.1"]
    options += ["--log-format", "json", "--conf", "spark.log.level=INFO"]
    log = tmp_path / "log"
    with log.open("w") as stderr, subprocess.Popen([*SPARK_COMMAND, "run", *options], stderr=stderr) as process:
        try:
            scraped(port, "cdcpipe_server_up", 1)
            before = wal_lsn(database)
            change(database, 1, 1000)
            found = scraped(port, "cdcpipe_merge_duration_seconds_count", 1)
            found = scraped(port, "cdcpipe_position_bytes", before + 1, stage="replica")
            optional = {"cdcpipe_slot_safe_wal_bytes", "cdcpipe_last_error_timestamp_seconds"}
            snapshot = {"cdcpipe_snapshot_tables", "cdcpipe_snapshot_rows"}
            assert samples(found) == {*names_of(RUN)} - optional - snapshot
            assert value(found, "cdcpipe_table_changes_total", table="public.fruit") == 1000
            assert value(found, "cdcpipe_batch_duration_seconds_count") >= 1
            sample = until(lambda: read_samples(tmp_path / "staging"), "the first sample of the history", deadline_s=60)[0]
            assert sample.seconds >= 10
            assert sample.changes is not None
            assert sample.lag_s is not None
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
        finally:
            process.kill()
    lines = log.read_text().splitlines()
    said = [json.loads(line) for line in lines]
    assert "1,000 changes in 1 table" in said[-1]["message"]
    of_spark = [each for each in said if each["part"].startswith("spark.")]
    assert len(of_spark) > 20
    assert {each["level"] for each in of_spark} <= {"info", "warn", "error"}
    assert all(re.fullmatch(r"\S{23}Z", each["time"]) for each in said)
    assert "CANARY" not in "".join(lines)

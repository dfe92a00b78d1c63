"""`cdcpipe decode` of a recorded stream: the same bytes as in a live stream."""

import contextlib
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import postgres
import pytest
from recording import run_workload

from cdcpipe.sql import quote_literal
from support.captures import decoded
from support.cli_process import COMMAND
from support.waiting import until

SMALL_MEMORY = "options=-c logical_decoding_work_mem=64kB"


class Recorded:
    """A database after the workload of the recordings, and a slot that begins before it."""

    def __init__(self, database: postgres.Database, directory: Path) -> None:
        self.database = database
        self.directory = directory
        self.slot = f"s_{database.name}"
        self.end_lsn = run_workload(database, self.make_slot)

    def make_slot(self, connection) -> None:
        connection.execute(f"select pg_create_logical_replication_slot({quote_literal(self.slot)}, 'pgoutput')")

    def released(self) -> None:
        with self.database.connect() as connection:
            sql = f"select 1 from pg_replication_slots where slot_name = {quote_literal(self.slot)} and not active"
            until(lambda: connection.execute(sql).fetchone(), "the slot's release")

    def live(self, *args: str) -> bytes:
        """Stream everything. Confirm nothing."""
        self.released()
        command = [*COMMAND, "-d", self.database.dsn, "-S", self.slot, "--publication", "p", "--endpos", self.end_lsn, *args]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            out = process.stdout.read()
            assert process.wait() == 0, process.stderr.read()
        return out

    def capture(self, name: str, *args: str) -> str:
        path = self.directory / name
        path.write_bytes(self.live("-H", *args))
        return str(path)


@contextlib.contextmanager
def record_workload(database: postgres.Database, directory: Path) -> Iterator[Recorded]:
    try:
        yield Recorded(database, directory)
    finally:
        with database.connect() as connection:  # origins belong to all databases
            connection.execute("select pg_replication_origin_drop(roname) from pg_replication_origin where roname = 'elsewhere'")


@pytest.fixture
def recorded(pg: postgres.Cluster, tmp_path: Path) -> Iterator[Recorded]:
    with pg.database() as database, record_workload(database, tmp_path) as made:
        yield made


FORMATS: Sequence[Sequence[str]] = [
    ["-j"],
    ["-J", "-N", *(f"-oinclude-{name}" for name in ("lsn", "xids", "timestamp", "pk", "origin", "domain-data-type"))],
    [
        "--output",
        "wal2json",
        "-H",
        *(f"-o{name}" for name in ("pretty-print", "write-in-chunks", "include-not-null", "include-default")),
    ],
    ["--output", "test_decoding", "-N", "-H", "-o", "skip-empty-xacts", "-o", "include-timestamp"],
    ["--output", "json", "-N"],
]


def test_the_same_bytes_as_live(recorded: Recorded) -> None:
    """Plain transactions, and streamed ones assembled; from a file and from stdin; with the server's catalog, as live."""
    day = recorded.capture("day.cdc", "--messages")
    mode = "parallel" if recorded.database.cluster.version_num >= 160000 else "on"
    streamed = recorded.capture("streamed.cdc", "--messages", "--streaming", mode, "-m", SMALL_MEMORY)
    assert Path(streamed).read_bytes() != Path(day).read_bytes()
    server = ["-d", recorded.database.dsn]
    for format_ in FORMATS:
        expected = recorded.live(*format_)
        assert expected
        assert decoded(*format_, *server, day) == expected
    assert decoded(*format_, *server, "--whole-transactions", streamed) == expected
    assert decoded(*format_, *server, recorded.capture("binary.cdc", "--messages", "--binary")) == expected
    expected = recorded.live("-J")
    assert decoded("-J", *server, stdin=Path(day).read_bytes()) == expected
    assert decoded("-J", *server, "--whole-transactions", "--spill-threshold", "1kB", streamed, "-") == expected
    # Without a server all is the same but the names of domains.
    names = {rb'"type":"price"': b'"type":"numeric"', rb'"type":"\"Odd schema\".\"Mood\""': b'"type":"mood"'}
    for theirs, ours in names.items():
        assert theirs in expected
        expected = expected.replace(theirs, ours)
    assert without_lengths(decoded("-J", day)) == without_lengths(expected)


def without_lengths(out: bytes) -> bytes:
    return re.sub(rb"w ([0-9A-F]+/[0-9A-F]+) \d+\n", rb"w \1\n", out)


def test_streamed_and_prepared_transactions_as_they_come(recorded: Recorded) -> None:
    """test_decoding also renders these in a live stream."""
    options = ["--output", "test_decoding", "-N", "-o", "stream-changes", "-o", "include-timestamp"]
    expected = recorded.live(*options, "-m", SMALL_MEMORY)
    assert b"opening a streamed block" in expected
    assert b"aborting streamed" in expected
    streamed = recorded.capture("streamed.cdc", "--messages", "--streaming", "on", "-m", SMALL_MEMORY)
    assert decoded(*options, "-d", recorded.database.dsn, streamed) == expected


def test_segments_of_a_staging_log(database: postgres.Database, tmp_path: Path) -> None:
    """All segments together, and each by itself: a segment describes its own relations."""
    with record_workload(database, tmp_path) as recorded:
        expected = recorded.live("-J", "-N")
        recorded.released()
        staging = str(tmp_path / "staging")
        source = ["-d", database.dsn, "-S", recorded.slot, "--publication", "p"]
        land = [COMMAND[0], "-m", "spark_sink", "land", *source, "--staging", staging, "--segment-size", "4kB", "--available-now"]
        subprocess.run(land, check=True, capture_output=True)
        segments = sorted(map(str, Path(staging).glob("*/*.cdc")))
        assert len(segments) > 1
        assert decoded("-J", "-N", "-d", database.dsn, *segments) == expected
        assert b"".join(decoded("-J", "-N", "-d", database.dsn, segment) for segment in segments) == expected

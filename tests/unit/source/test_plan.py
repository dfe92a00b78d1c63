"""The plans of the data source: options, ranges, offsets, tasks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes

from cdcpipe.errors import InvalidArgumentsError
from spark_sink.source import datasource
from spark_sink.source.datasource import ENVELOPE_SCHEMA, CdcpipeDataSource, quote_table
from spark_sink.staging import log_view
from spark_sink.staging.log import Position, StagingError, epoch_numbers, read_chain
from spark_sink.staging.readers import register_reader, remove_consumed
from support.segments import Log, into
from support.source_rows import A, fill, only, read, typed


def test_the_sources_can_be_imported_as_executors_do(tmp_path: Path) -> None:
    """From a zip file with a relative path, without anything else of this project."""
    archive = datasource._source_archive()
    shutil.copy(archive, tmp_path)
    modules = ["spark_sink.source.datasource", "spark_sink.source.typed", "spark_sink.snapshot.table"]
    code = f"import sys; sys.path.insert(0, './{archive.name}'); import {', '.join(modules)}; print(spark_sink.__file__)"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert archive.name in done.stdout


def test_ranges(log: Log) -> None:
    fill(log)

    def ends(**options: str) -> list[int]:
        return sorted({row["_cdc_end_lsn"] for row in read(log.root, **options)[0]})

    assert ends() == [0x1100, 0x1200, 0x1300, 0x1400, 0x1500]
    assert ends(start="1:0/1000") == ends()
    assert ends(start="1:0/1100") == [0x1200, 0x1300, 0x1400, 0x1500]
    assert ends(start="1:0/1200", end="2:0/1300") == [0x1300]
    assert ends(start="2:0/1200", end="2:0/1400") == [0x1300, 0x1400]
    assert ends(start="1:0/1100", end="2:0/1300") == [0x1200, 0x1300]
    assert ends(end="1:0/1000") == []
    assert ends(start="2:0/1500") == ends(start="2:0/1400", end="2:0/1400") == []
    assert only(typed(log.root, start="1:0/1100", end="1:0/1200"), "_cdc_op", "id") == [("update", 1), ("update", 3)]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"end": "2:0/1600"}, "not in this log"),
        ({"start": "2:0/1600"}, "not in this log"),
        ({"start": "1:0/1300"}, "not in this log"),
        ({"end": "1:0/1300"}, "not in this log"),
        ({"end": "3:0/1500"}, "not in this log"),
        ({"start": "1:0/900"}, "do not exist any more"),
    ],
)
def test_positions_that_are_not_in_the_log_are_refused(log: Log, options: dict[str, str], problem: str) -> None:
    fill(log)
    with pytest.raises(StagingError, match=problem):
        read(log.root, **options)


def test_a_missing_segment_is_an_error(log: Log) -> None:
    fill(log)
    made = CdcpipeDataSource({"path": str(log.root)}).streamReader(ENVELOPE_SCHEMA)
    start, end = made.initialOffset(), made.latestOffset(made.initialOffset(), ReadAllAvailable())
    parts = made.partitions(start, end)
    path = log.root / "000002" / "0000000000001200-0000000000001400.cdc"
    path.unlink()
    with pytest.raises(StagingError, match="segments are missing"):
        made.partitions(start, end)
    with pytest.raises(StagingError, match=f"{path} cannot be read"):
        [list(made.read(part)) for part in parts]


@pytest.mark.parametrize("removed", [1, 2])
def test_the_first_batch_that_runs_again_is_the_same_batch(log: Log, removed: int) -> None:
    """Spark asks for the start again. If a run had removed segments meanwhile, their rows were missing without a word."""
    fill(log)

    def made(**options: str) -> Any:
        return CdcpipeDataSource({"path": str(log.root), **options}).streamReader(ENVELOPE_SCHEMA)

    limit = ReadMaxBytes(1 if removed == 2 else 1 << 30)
    start, end = made().initialOffset(), made().latestOffset(made().initialOffset(), limit)
    planned = made().partitions(start, end)
    next_end = made().latestOffset(end, ReadAllAvailable())
    assert list(end) == list(next_end) == ["begin", "format", "position"]
    assert (end["begin"], next_end["begin"]) == ("1:0/1000", "1:0/1000")
    assert made().latestOffset(next_end, ReadAllAvailable()) == next_end
    register_reader(log.root, "tables", Position(1, 0x1200) if removed == 1 else Position(2, 0x1400))
    assert len(remove_consumed(log.root)) == removed
    later = made().initialOffset()
    assert later != start
    with pytest.raises(StagingError, match="do not exist any more"):
        made().partitions(later, end)
    assert made().partitions(later, {**end, "begin": later["position"]}) != planned
    # A stream that says where it begins, like that of the tables, goes on from there. So does one of an earlier version.
    assert made(start=later["position"]).partitions(later, next_end)
    assert made(start=later["position"]).latestOffset(later, ReadAllAvailable()) == later | {"position": "2:0/1500"}
    assert made().partitions(later, {"format": 1, "position": "2:0/1500"})


def test_offsets(log: Log) -> None:
    fill(log)
    size = {s.name: s.stat().st_size for s in log.root.rglob("*.cdc")}
    made = CdcpipeDataSource({"path": str(log.root), "max_bytes_per_trigger": "1"}).streamReader(ENVELOPE_SCHEMA)
    start = made.initialOffset()
    assert list(start.items()) == [("format", 1), ("position", "1:0/1000")]
    limit = made.getDefaultReadLimit()
    assert limit == ReadMaxBytes(1)

    def latest(position: str, limit: Any) -> str:
        return made.latestOffset({"position": position, "format": 1}, limit)["position"]

    assert latest("1:0/1000", limit) == "1:0/1200"
    assert latest("1:0/1200", limit) == "2:0/1400"
    assert latest("2:0/1500", limit) == latest("1:0/1000", ReadAllAvailable()) == "2:0/1500"
    total = sum(size.values())
    assert latest("1:0/1000", ReadMaxBytes(total)) == "2:0/1500"
    assert latest("1:0/1000", ReadMaxBytes(total - 1)) == "2:0/1400"
    assert made.reportLatestOffset()["position"] == "2:0/1500"
    assert made.partitions(start, start) == []

    made.prepareForTriggerAvailableNow()
    log.segment([A, into(A, b"9", None)])
    assert latest("1:0/1000", ReadAllAvailable()) == "2:0/1500"
    assert latest("2:0/1500", limit) == "2:0/1500"
    assert made.reportLatestOffset()["position"] == "2:0/1600"


def test_a_log_that_is_the_same_is_not_listed_again(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(log)
    listed = []
    monkeypatch.setattr(log_view, "read_chain", lambda *asked: listed.append(asked) or read_chain(*asked))
    made = log_view.LogView(log.root)
    directories = [log.root, *(log.root / f"{number:06d}" for number in epoch_numbers(log.root))]

    def look(age_s: float) -> int:
        """Return the end of the log, for a log whose directories were changed this long ago."""
        for directory in directories:
            os.utime(directory, (time.time() - age_s,) * 2)
        listed.clear()
        first, end, segments = made.end(), made.end(), made.segments()
        assert first == end == segments[-1].end
        return end.lsn

    assert (look(60), len(listed)) == (0x1500, 1)
    log.segment([A, into(A, b"9", None)])  # in its directory the time is another one now
    assert (look(50), len(listed)) == (0x1600, 1)
    log.segment([A, into(A, b"10", None)])
    assert (look(0), len(listed)) == (0x1700, 3)  # something may happen at the same time yet
    listed.clear()
    monkeypatch.setattr(log_view, "_LISTING_S", 0.0)
    assert (look(60), len(listed)) == (0x1700, 3)
    shutil.rmtree(directories[-1])
    with pytest.raises(StagingError, match="position 2:0/1700 is not in this log"):
        made.segments(Position(2, 0x1700))


@pytest.mark.parametrize(
    "offset", [{"format": 2, "position": "1:0/0"}, {"position": "1:0/0"}, {"format": 1}, {"format": 1, "position": "0/1"}]
)
def test_offsets_of_another_format_are_refused(log: Log, offset: dict[str, Any]) -> None:
    made = CdcpipeDataSource({"path": str(log.root)}).streamReader(ENVELOPE_SCHEMA)
    with pytest.raises(StagingError, match="the checkpoint has"):
        made.latestOffset(offset, ReadAllAvailable())


def test_a_log_that_has_not_begun(log: Log, tmp_path: Path) -> None:
    made = CdcpipeDataSource({"path": str(log.root)}).streamReader(ENVELOPE_SCHEMA)
    assert made.initialOffset()["position"] == "1:0/1000"
    assert made.latestOffset(made.initialOffset(), ReadAllAvailable()) == made.initialOffset()
    assert read(log.root)[0] == []
    (tmp_path / "empty").mkdir()
    made = CdcpipeDataSource({"path": str(tmp_path / "empty")}).streamReader(ENVELOPE_SCHEMA)
    start = made.initialOffset()
    assert start["position"] == "0:0/0"
    shutil.copytree(log.root, tmp_path / "empty", dirs_exist_ok=True)
    assert made.latestOffset(start, ReadAllAvailable()) == start
    fill(Log(tmp_path / "other"))
    shutil.copytree(tmp_path / "other", tmp_path / "empty", dirs_exist_ok=True)
    end = made.latestOffset(start, ReadAllAvailable())
    assert (end["begin"], end["position"]) == ("1:0/1000", "2:0/1500")
    assert len(made.partitions(start, end)) == 1
    with pytest.raises(StagingError, match="no such directory"):
        read(tmp_path / "nowhere")


def test_a_partition_of_another_version_is_refused(log: Log) -> None:
    """After an upgrade below a running driver, the workers are new, and the driver's plan is old."""
    fill(log)
    reader = CdcpipeDataSource({"path": str(log.root)}).reader(ENVELOPE_SCHEMA)
    [part] = reader.partitions()
    vars(part)["piece"] = vars(part).pop("pieces")
    with pytest.raises(StagingError, match="does not know"):
        list(reader.read(part))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "'path'.* is missing"),
        ({"path": "x", "tabel": "a.b"}, "'tabel'.* is not known"),
        ({"path": "x", "types": "all"}, "'types'.* can only be 'exact' or 'native'"),
        ({"path": "x", "view": "tables"}, "'view'.* can only be 'messages' or 'segments'"),
        ({"path": "x", "view": "segments", "table": "a.b"}, "cannot be given with 'view'"),
        ({"path": "x", "start": "0/1"}, "'start'.* cannot be read: not a position"),
        ({"path": "x", "end": "1:x"}, "'end'.* cannot be read: not a position"),
        ({"path": "x", "max_bytes_per_trigger": "0"}, "'max_bytes_per_trigger'.* above 0"),
        ({"path": "x", "max_partition_bytes": "64m"}, "'max_partition_bytes'.* cannot be read"),
        ({"path": "x", "table": "a"}, "'table'.* must be schema.name"),
        ({"path": "x", "table": "a.b.c"}, "'table'.* must be schema.name"),
    ],
)
def test_options_that_cannot_be(options: dict[str, str], problem: str) -> None:
    with pytest.raises(InvalidArgumentsError, match=problem):
        CdcpipeDataSource(options)


def test_a_stream_has_no_end_option() -> None:
    with pytest.raises(InvalidArgumentsError, match="a stream has no end"):
        CdcpipeDataSource({"path": "x", "end": "1:0/1"}).streamReader(ENVELOPE_SCHEMA)


@pytest.mark.parametrize("name", [("public", "a"), ("a.b", "c"), ('a"b', 'c".d'), ("x\n", " "), ("Ü", "é")])
def test_any_table_can_be_named(name: tuple[str, str]) -> None:
    assert datasource._parse_table(quote_table(*name)) == name

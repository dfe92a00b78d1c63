"""The samples of the last day: when they are written, what they say, and what damages do not break."""

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from spark_sink.staging import samples
from spark_sink.staging.samples import Counts, Recorder, Sample, read

START = Counts(0, 0, 0)


def test_a_sample_is_written_when_it_is_due(tmp_path: Path) -> None:
    recorder, asked = Recorder(tmp_path, 100.0, START, interval_s=60.0, first_s=10.0), []

    def count() -> Counts:
        asked.append(1)
        return Counts(10 * len(asked), 1000 * len(asked), 5 * len(asked), 7, 0.5)

    for now in (100.0, 109.9, 110.0, 111.0, 169.9, 170.0):
        recorder.tick(now, 1_000_000.0 + now, count)
    assert len(asked) == 2
    assert read(tmp_path) == [
        Sample(1_000_110.0, 10.0, 10, 1000, 5, 7, 0.5),
        Sample(1_000_170.0, 60.0, 10, 1000, 5, 7, 0.5),
    ]
    assert (tmp_path / "history.jsonl").stat().st_mode & 0o777 == 0o600


def test_what_came_before_does_not_count(tmp_path: Path) -> None:
    """The first sample used to have all that came while the tables were copied, as if it had come in ten seconds."""
    Recorder(tmp_path, 100.0, Counts(5_000_000, 1 << 30, 7)).tick(110.0, 110.0, lambda: Counts(5_000_003, (1 << 30) + 200, 9))
    assert read(tmp_path) == [Sample(110.0, 10.0, 3, 200, 2, None, None)]


def test_a_launcher_has_no_tables_and_no_lag(tmp_path: Path) -> None:
    Recorder(tmp_path, 0.0, START, first_s=0.0).tick(1.0, 1.0, lambda: Counts(1, 2))
    assert read(tmp_path) == [Sample(1.0, 1.0, 1, 2, None, None, None)]


def test_the_file_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "_KEPT", 3)
    recorder = Recorder(tmp_path, 0.0, START, interval_s=1.0, first_s=0.0)
    lengths = []
    for number in range(20):
        recorder.tick(float(number), float(number), lambda: Counts(0, 0))
        lengths.append(len(read(tmp_path)))
    assert max(lengths) == 6
    assert [sample.time for sample in read(tmp_path)][-3:] == [17.0, 18.0, 19.0]


def test_what_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    assert read(tmp_path) == []
    Recorder(tmp_path, 0.0, START, first_s=0.0).tick(2.0, 2.0, lambda: Counts(1, 2))
    Recorder(tmp_path, 0.0, START, first_s=0.0).tick(1.0, 1.0, lambda: Counts(1, 2))
    with (tmp_path / "history.jsonl").open("ab") as stream:
        stream.write(b'[1]\n{"time": 3}\nnull\n\xff\n{"time": 3.0, "seco')
    assert [sample.time for sample in read(tmp_path)] == [1.0, 2.0]
    for number in (4.0, 5.0):  # the first one continues the half line
        Recorder(tmp_path, 0.0, START, first_s=0.0).tick(number, number, lambda: Counts(1, 2))
    assert [sample.time for sample in read(tmp_path)] == [1.0, 2.0, 5.0]


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_a_file_that_cannot_be_written_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Callable[[Path], None]
) -> None:
    make(tmp_path / "history.jsonl")
    recorder = Recorder(tmp_path, 0.0, START, interval_s=1.0, first_s=0.0)
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            recorder.tick(float(number), float(number), lambda: Counts(0, 0))
    assert [record.getMessage() for record in caplog.records] == [
        f"the history of status --html is not written: {tmp_path}/history.jsonl is no file"
    ]

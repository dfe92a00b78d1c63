"""Sizes, durations and seconds as users write them, and as both command lines parse them."""

import pytest
from click.testing import CliRunner

from cdcpipe import units
from cli.main import cdcpipe
from spark_sink.__main__ import group


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("17", 17),
        ("17B", 17),
        ("64M", 64 << 20),
        ("64m", 64 << 20),
        ("64MiB", 64 << 20),
        (" 64 mib ", 64 << 20),
        ("64MB", 64 * 10**6),
        ("1k", 1024),
        ("3G", 3 << 30),
        ("1TiB", 1 << 40),
        ("2TB", 2 * 10**12),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert units.parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("1 second", 1), ("30min", 1800), ("2 minutes", 120), ("12h", 43200), ("30days", 30 * 86400), ("2W", 14 * 86400)],
)
def test_durations(text: str, seconds: float) -> None:
    assert units.parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "M", "-1M", "1.5G", "64X", "1 Mi B", "٣M", "1e3", "9" * 16, "30days"])
def test_invalid_sizes(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a size: .* K, M, G, T \(KiB"):
        units.parse_size(text)


@pytest.mark.parametrize("text", ["", "90", "1month", "1m", "-1h", "1.5h", "64M", "1h30min"])
def test_invalid_durations(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a duration: a number with s, min, h, d or w"):
        units.parse_duration(text)


@pytest.mark.parametrize("text", ["", "-1", "nan", "inf", "5s"])
def test_invalid_seconds(text: str) -> None:
    with pytest.raises(ValueError, match="is not a number of seconds"):
        units.parse_seconds(text)
    assert units.parse_seconds("0.5") == 0.5


@pytest.mark.parametrize(
    ("text", "message"), [("0.05", "is less than 0.1 seconds"), ("86401", "is more than 86400 seconds"), ("nan", "is not a number")]
)
def test_seconds_out_of_range(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        units.seconds_from(0.1, 86400)(text)
    assert units.seconds_from(0.1, 86400)("86400") == 86400


@pytest.mark.parametrize("text", ["", "-1", "0", "1.5", "x", "٣", "9" * 16])
def test_invalid_counts(text: str) -> None:
    with pytest.raises(ValueError, match="is not a whole number of at least 1"):
        units.count_from(1)(text)
    assert units.count_from(1)("17") == 17


RUN = ["run", "-S", "s", "--publication", "p", "--staging", "staging", "--warehouse", "warehouse"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*RUN, "--segment-size", "64X"], "K, M, G, T"),
        ([*RUN, "--segment-size", "0"], "more than 0"),
        ([*RUN, "--keep-segments", "10"], "a number with s, min, h, d or w"),
        ([*RUN, "--keep-segments", "10"], "a size with a unit"),
        ([*RUN, "--keep-changelog", "30"], "or it can be off"),
        ([*RUN, "--keep-changelog", "30min"], "less than 60min"),
        ([*RUN, "--keep-changelog", "30days", "--keep-segments", "64M", "--snapshot-hold", "off", "--format", "x"], "--format"),
        ([*RUN, "--segment-size", "64M", "--keep-segments", "2weeks", "--seal-interval", "1s"], "without a unit"),
        ([*RUN, "--replica-interval", "nan"], "is not a number of seconds"),
        ([*RUN, "--heal-tables", "0"], "'0' is not a whole number of at least 1"),
        (["start"], "no such command: start; the commands are as-of, config, doctor, land, purge, run, snapshot, status, verify"),
    ],
)
def test_the_command_line_of_spark_lists_what_there_is(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(group, arguments)
    assert done.exit_code == 2  # click's own
    assert message in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-S", "s", "--spill-threshold", "64X"], "K, M, G, T"),
        (["-S", "s", "--spill-threshold", "1T", "--receive-timeout", "5s"], "without a unit"),
        (["run"], "no such command: run; the commands are checksum, ddl, decode, doctor, prepare, slot"),
    ],
)
def test_the_command_line_lists_what_there_is(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(cdcpipe, arguments)
    assert done.exit_code == 2  # click's own
    assert message in done.output


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536 << 10, "1.5 MiB"), (3 << 30, "3.0 GiB"), (5 << 50, "5120.0 TiB")],
)
def test_sizes_for_people(size: int, text: str) -> None:
    assert units.format_size(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.25, "0.2 s"),
        (60, "60 s"),
        (119, "119 s"),
        (150, "2.5 min"),
        (7200, "2 h"),
        (86400, "24 h"),
        (259200, "3 days"),
    ],
)
def test_durations_for_people(seconds: float, text: str) -> None:
    assert units.format_duration(seconds) == text


def test_counts() -> None:
    assert [units.counted(number, "row") for number in (0, 1, 2, 12_000)] == ["0 rows", "1 row", "2 rows", "12,000 rows"]

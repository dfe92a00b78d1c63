"""The captured DDL that a warehouse has recorded."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spark_sink.changelog import ddl_log
from spark_sink.staging.gap import Gap
from spark_sink.staging.log import Epoch, Segment
from spark_sink.warehouse import gaps
from support.ddl_messages import content, described
from support.descriptions import table
from support.segments import describe_epoch


class Rows(list[dict[str, Any]]):
    """Stands for the DataFrame of the recorded messages."""

    def select(self, *_: str) -> "Rows":
        return self

    def orderBy(self, *_: str) -> "Rows":  # noqa: N802
        return self

    def toLocalIterator(self) -> "Rows":  # noqa: N802
        return self


def recorded(monkeypatch: pytest.MonkeyPatch, house: Path, texts: dict[int, bytes]) -> ddl_log.DdlLog:
    """Return the log of a warehouse that has recorded these messages, by their LSNs."""
    rows = Rows({"_cdc_end_lsn": lsn, "_cdc_ordinal": 0, "_cdc_lsn": lsn, "content": text.decode()} for lsn, text in texts.items())
    changelogs = SimpleNamespace(state=lambda _: SimpleNamespace(lsn=max(texts)), read=lambda _: rows)
    monkeypatch.setattr(ddl_log, "changelogs_of", lambda *_: changelogs)
    nothing: Any = SimpleNamespace(root=house, source=lambda: SimpleNamespace(position=None))
    return ddl_log.DdlLog(nothing, nothing)


def test_a_message_that_an_older_version_has_recorded_and_that_no_server_writes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    forged = described("id=1")
    forged["columns"][0]["number"] = 1 << 40
    texts = {10: content(described("id=1")), 20: content(forged), 30: content(described("id=1 a=2"))}
    log = recorded(monkeypatch, tmp_path, texts)
    assert log.descriptions.facts(table("id"), (20, 0)) is not None
    assert log.descriptions.facts(table("id a"), (30, 0)) is not None
    assert [record.getMessage().split(", is")[0] for record in caplog.records] == [
        "a logical message with the prefix of captured DDL, at 0/14"
    ]


@pytest.mark.parametrize("is_divergence", [True, False])
def test_a_server_that_lost_changes_gives_their_numbers_to_other_columns(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, is_divergence: bool
) -> None:
    dropped = {"type": "table column", "oid": 1, "number": 2, "schema": "public", "name": "t", "column": "a"}
    texts = {
        10: content(described("id=1 a=2"), kind="installed"),
        20: content(described("id=1 a=2 x=3'5")),
        25: content(described("id=1 x=3"), kind="drop", dropped=[dropped]),
        40: content(described("id=1 a=2 y=3'7")),
    }
    gap = Gap(15, "a failover", 0.0, 0.0, is_divergence=is_divergence)
    house: Any = SimpleNamespace(root=tmp_path)
    gaps.record(house, [replace(Epoch(2, "7123", 2, "shop", "slot", ("p",), {}, 30), gap=gap)])
    found = recorded(monkeypatch, tmp_path, texts).descriptions
    before, after = found.facts(table("id a x"), (20, 0)), found.facts(table("id a y"), (40, 0))
    assert before is not None
    assert before[2].missing == "5"
    # Without lost changes the numbers go on: a column that was dropped does not come back.
    assert (None if after is None else after[2].missing) == ("7" if is_divergence else None)


def test_only_the_lists_of_publications_that_the_stream_has_at_the_place_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`land` had "p", which was renamed to "q". Then it had "r". That `run` begins with other ones does not matter."""

    def lists(oid: int, name: str, tag: str = "CREATE PUBLICATION") -> bytes:
        tables = [{"oid": 1, "schema": "public", "name": "t", "columns": [1, 2], "has_filter": False}]
        return content(described("id=1 a=2"), tag=tag, publications=[{"oid": oid, "name": name, "tables": tables}])

    texts = {10: lists(8, "another"), 20: lists(7, "p"), 50: lists(7, "q", "ALTER PUBLICATION"), 75: lists(9, "r")}
    log = recorded(monkeypatch, tmp_path / "house", texts)
    segments = []
    for number, start_lsn, name in (1, 5, "p"), (2, 40, "q"), (3, 70, "r"):
        directory = tmp_path / f"{number:06d}"
        directory.mkdir()
        (directory / "epoch.json").write_text(describe_epoch(start_lsn, publications=[name]))
        segments.append(Segment(number, start_lsn, start_lsn + 30, directory / "segment"))
    log.record_new([], segments[:1])
    assert [log.descriptions.has_list(1, (lsn, 0)) for lsn in (15, 25)] == [False, True]
    log.record_new([], segments)
    found = {lsn: log.descriptions.has_list(1, (lsn, 0)) for lsn in (15, 25, 45, 55, 72, 77)}
    assert found == {15: False, 25: True, 45: True, 55: True, 72: False, 77: True}

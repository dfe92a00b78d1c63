"""The captured DDL that a warehouse has recorded."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spark_sink.changelog import ddl_log
from support.ddl_messages import content, described
from support.descriptions import table


class Rows(list[dict[str, Any]]):
    """Stands for the DataFrame of the recorded messages."""

    def select(self, *_: str) -> "Rows":
        return self

    def orderBy(self, *_: str) -> "Rows":  # noqa: N802
        return self

    def toLocalIterator(self) -> "Rows":  # noqa: N802
        return self


def test_a_message_that_an_older_version_has_recorded_and_that_no_server_writes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    forged = described("id=1")
    forged["columns"][0]["number"] = 1 << 40
    texts = {10: content(described("id=1")), 20: content(forged), 30: content(described("id=1 a=2"))}
    rows = Rows({"_cdc_end_lsn": lsn, "_cdc_ordinal": 0, "_cdc_lsn": lsn, "content": text.decode()} for lsn, text in texts.items())
    changelogs = SimpleNamespace(state=lambda _: SimpleNamespace(lsn=30), read=lambda _: rows)
    monkeypatch.setattr(ddl_log, "changelogs_of", lambda *_: changelogs)
    nothing: Any = SimpleNamespace(root=tmp_path, source=lambda: SimpleNamespace(position=None))
    log = ddl_log.DdlLog(nothing, nothing)
    assert log.descriptions.facts(table("id"), (20, 0)) is not None
    assert log.descriptions.facts(table("id a"), (30, 0)) is not None
    assert [record.getMessage().split(", is")[0] for record in caplog.records] == [
        "a logical message with the prefix of captured DDL, at 0/14"
    ]

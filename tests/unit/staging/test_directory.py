"""The owner of a staging directory, and what a writer finds in the directory."""

import errno
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from cdcpipe.pipe.exitcode import ExitCode
from spark_sink.staging.gap import Gap
from spark_sink.staging.lock import lock_owner
from spark_sink.staging.log import OtherSourceError, Position, StagingError, list_epochs, list_segments, log_end
from spark_sink.staging.readers import register_reader, remove_consumed
from spark_sink.staging.writer import StagingWriter
from support.pgoutput_stream import (
    Message,
    Transaction,
    decode_segment,
    message,
)
from support.staged import SOURCE, WORK, Server, fill, land, landed


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"system_id": "8"}, "system id 7; this server has system id 8"),
        ({"timeline": 4}, "timeline 4, .* timeline 5"),
        ({"database": "other"}, "database 'db', not of .* 'other'"),
    ],
)
def test_a_directory_of_another_source_is_refused(tmp_path: Path, change: dict[str, Any], words: str):
    server = Server(WORK)
    land(tmp_path, server)
    with StagingWriter(tmp_path, slot="s") as writer:
        writer.begin_epoch(replace(SOURCE, timeline=5))
    before = list_epochs(tmp_path)
    with StagingWriter(tmp_path, slot="s") as writer, pytest.raises(OtherSourceError, match=words) as caught:
        writer.begin_epoch(replace(SOURCE, **{"timeline": 5} | change))
    assert caught.value.hint
    assert ('RENAME TO "db"' in caught.value.hint) == ("database" in change)
    assert caught.value.exit_code == ExitCode.INIT_FAILED
    assert list_epochs(tmp_path) == before


def test_after_a_gap_the_log_goes_on_further(tmp_path: Path):
    land(tmp_path, Server(WORK))
    end = log_end(tmp_path)
    assert end is not None
    gap = Gap(end.lsn, "somebody moved the slot", since=1.0, found=2.5)
    with StagingWriter(tmp_path, slot="s") as writer:
        epoch = writer.begin_epoch(replace(SOURCE, number=40, start_lsn=end.lsn + 0x1000, gap=gap))
    assert (epoch.number, epoch.start_lsn, epoch.gap) == (40, end.lsn + 0x1000, gap)
    land(tmp_path, Server([*WORK, Transaction(end.lsn + 0x2000, ())]))
    assert [each.gap for each in list_epochs(tmp_path)] == [None, gap, None]  # the epoch with the gap stays, without a segment
    assert landed(tmp_path) == [*WORK, Transaction(end.lsn + 0x2000, ())]
    assert len(list_segments(tmp_path, end)) == 1


def test_a_reader_goes_on_behind_a_gap_after_an_empty_log(tmp_path: Path):
    """No change came before the gap, and the account of the log had gone on to 200. `run` did not start again behind such a gap."""
    gap = Gap(0x200, "somebody moved the slot", since=1.0, found=2.5)
    for wanted in (SOURCE, replace(SOURCE, start_lsn=0x300, gap=gap)):
        with StagingWriter(tmp_path, slot="s") as writer:
            begun = writer.begin_epoch(wanted)
    assert list_segments(tmp_path, Position(1, 0x100)) == []
    change = Transaction(0x400, ())
    land(tmp_path, Server([change]))
    assert begun.gap == gap
    assert [segment.end_lsn for segment in list_segments(tmp_path, Position(1, 0x100))] == [0x400]
    register_reader(tmp_path, "r", Position(1, 0x100))
    remove_consumed(tmp_path)
    assert [segment.end_lsn for segment in list_segments(tmp_path, Position(1, 0x100))] == [0x400]


def test_a_hole_without_a_gap_is_a_broken_log(tmp_path: Path):
    land(tmp_path, Server(WORK))
    end = log_end(tmp_path)
    assert end is not None
    with StagingWriter(tmp_path, slot="s") as writer:
        writer.begin_epoch(replace(SOURCE, start_lsn=end.lsn + 0x1000, gap=Gap(end.lsn, "moved", 1.0, 2.0)))
    path = tmp_path / f"{list_epochs(tmp_path)[-1].number:06d}/epoch.json"
    value = json.loads(path.read_text())
    del value["gap"]
    path.write_text(json.dumps(value))
    with pytest.raises(StagingError, match="segments are missing"):
        log_end(tmp_path)


def test_a_log_goes_on_with_an_accepted_system_id(tmp_path: Path):
    land(tmp_path, Server(WORK))
    for _ in range(2):
        with StagingWriter(tmp_path, slot="s") as writer:
            writer.begin_epoch(replace(SOURCE, system_id="8", former_system_id=list_epochs(tmp_path)[-1].system_id))
    assert [each.system_id for each in list_epochs(tmp_path)] == ["7", "8", "8"]
    with StagingWriter(tmp_path, slot="s") as writer, pytest.raises(StagingError) as caught:
        writer.begin_epoch(SOURCE)
    assert "--accept-system-id 7; if the slot was made after the upgrade, or the log is a copy from" in (caught.value.hint or "")


def test_a_directory_of_another_slot_is_refused_before_anything_is_asked(tmp_path: Path):
    land(tmp_path, Server(WORK))
    with pytest.raises(StagingError, match="slot 's', not of 't'"):
        StagingWriter(tmp_path, slot="t")
    with StagingWriter(tmp_path, slot="s"):
        pass


def test_a_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    with pytest.raises(StagingError, match="this process runs as 4242"):
        StagingWriter(tmp_path, slot="s")
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_made(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StagingError, match="cannot create"):
        StagingWriter(tmp_path / "file" / "staging", slot="s")


def test_files_are_private_whatever_the_umask(tmp_path: Path):
    before = os.umask(0)
    try:
        land(tmp_path / "a" / "b", Server(WORK))
        register_reader(tmp_path / "a" / "b", "r", Position(1, 0x100))
    finally:
        os.umask(before)
    for path in (tmp_path / "a").rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def test_a_planted_link_is_not_followed(tmp_path: Path):
    target = tmp_path / "target"
    with StagingWriter(tmp_path / "staging", slot="s") as writer:
        writer.begin_epoch(SOURCE)
        (tmp_path / "staging" / "000001" / f"{0x100:016X}.open").symlink_to(target)
        with pytest.raises(StagingError, match="File exists"):
            fill(writer, WORK)
    assert not target.exists()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "lock").symlink_to(target)
    with pytest.raises(StagingError, match="cannot open"):
        StagingWriter(tmp_path / "other", slot="s")
    assert not target.exists()


@pytest.mark.parametrize(
    ("function", "code"),
    [("fcntl.flock", errno.ENOLCK), ("os.fsync", errno.EINVAL), ("pathlib.Path.rename", errno.ENOTSUP)],
)
def test_a_file_system_without_what_sealing_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, code: int):
    def refuse(*arguments: Any, **options: Any) -> NoReturn:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(function, refuse)
    with pytest.raises(StagingError, match=re.escape(os.strerror(code))) as caught:
        StagingWriter(tmp_path, slot="s")
    assert "POSIX" in (caught.value.hint or "")
    monkeypatch.undo()
    StagingWriter(tmp_path, slot="s").close()
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_files_of_earlier_launchers_are_removed(tmp_path: Path):
    server = Server(WORK[:4])
    land(tmp_path, server)
    (tmp_path / "000001" / f"{WORK[3].end_lsn:016X}.open").write_bytes(b"half")
    (tmp_path / "000001" / ".tmp-1").write_bytes(b"half")
    (tmp_path / "000002").mkdir()
    server.transactions = WORK
    land(tmp_path, server)
    assert landed(tmp_path) == WORK
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000001", "000003", "lock"]
    assert all(path.suffix in {".cdc", ".json"} for path in (tmp_path / "000001").iterdir())


def test_epochs_in_which_nothing_came_do_not_pile_up(tmp_path: Path):
    server = Server(WORK)
    land(tmp_path, server)
    for _ in range(3):
        land(tmp_path, server)
    assert [epoch.number for epoch in list_epochs(tmp_path)] == [1, 4]
    assert log_end(tmp_path) == (4, WORK[-1].end_lsn)
    assert list_segments(tmp_path, Position(2, WORK[-1].end_lsn)) == []  # a position in an epoch that is gone


ENDS_WITH_A_MESSAGE = [*WORK, Message(WORK[-1].end_lsn + 9, message(WORK[-1].end_lsn + 9, b"one in the other"))]


def test_a_log_that_ends_with_a_message(tmp_path: Path):
    land(tmp_path, Server(ENDS_WITH_A_MESSAGE))
    more = [*ENDS_WITH_A_MESSAGE, Transaction(ENDS_WITH_A_MESSAGE[-1].end_lsn + 8, ((16384, b"x"),))]
    land(tmp_path, Server(more))
    assert [each for segment in list_segments(tmp_path) for each in decode_segment(segment.path.read_bytes())] == more


@pytest.mark.parametrize("work", [WORK, ENDS_WITH_A_MESSAGE], ids=["a transaction", "a message"])
@pytest.mark.parametrize("damage", ["cut", "empty", "grown", "renamed", "other bytes"])
def test_a_damaged_segment_is_found_at_the_start(tmp_path: Path, damage: str, work: list[Transaction | Message]):
    land(tmp_path, Server(work))
    segment = list_segments(tmp_path)[-1]
    data = segment.path.read_bytes()
    if damage == "renamed":
        segment.path.rename(segment.path.with_name(f"{segment.start_lsn:016X}-{segment.end_lsn + 1:016X}.cdc"))
    else:
        segment.path.write_bytes({"cut": data[:-1], "empty": b"", "grown": data + b"\x00", "other bytes": bytes(len(data))}[damage])
    with pytest.raises(StagingError, match=r"is damaged: it does not end with"):
        StagingWriter(tmp_path, slot="s")
    assert lock_owner(tmp_path) is None

"""The index of a segment: its content, when it is made again, and what it refuses."""

from __future__ import annotations

import errno
import os
from dataclasses import fields
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest

from cdcpipe.pgoutput.messages import Begin, Commit, Delete, Insert, LogicalMessage, Origin, StreamStop, Truncate, Type
from cdcpipe.pipe.framing import scan_records
from spark_sink.staging import index as segment_index
from spark_sink.staging.index import NO_TRANSACTION, _Builder, build, load
from spark_sink.staging.log import StagingError
from spark_sink.staging.scan import scan
from support.pgoutput_build import build as record
from support.segments import COMMIT_TIME_US, Log, encode, into, relation, transaction

if TYPE_CHECKING:
    from pathlib import Path

A = relation(16385, "a", ("id", 23), ("t", 25))
B = relation(0xFFFF0001, "b", ("id", 23))


@pytest.fixture
def segment(log: Log) -> Path:
    return log.segment(
        [A, Insert(None, A.relation_id, (b"1", b"x\ny")), B, Truncate(None, 0, (B.relation_id, A.relation_id))],
        [
            Origin(5, "élan"),
            LogicalMessage(None, 1, 0x1150, "p", b"in"),
            Insert(None, B.relation_id, (b"1",)),
            Type(None, 99, "public", "mood"),
            Delete(None, B.relation_id, (b"1",), None),
        ],
        before=[LogicalMessage(None, 0, 0x1010, "p", b"out")],
    ).path


def assert_same(one: segment_index.SegmentIndex, other: segment_index.SegmentIndex) -> None:
    for name in one.__slots__:
        mine, theirs = getattr(one, name), getattr(other, name)
        assert np.array_equal(mine, theirs), name
        if name != "size":
            assert mine.dtype == theirs.dtype, name


def test_the_content_of_an_index(segment: Path) -> None:
    index = build(segment)
    data = segment.read_bytes()
    kinds = b"".join(data[o : o + 1] for o in index.offset)
    assert kinds == index.kind.tobytes() == b"MBRIRTCBOMIYDC"
    starts, ends, _ = scan_records(data)
    assert index.offset.tolist() == starts
    assert (index.offset + index.length).tolist() == ends
    assert index.relation_id.tolist() == [
        0, 0, A.relation_id, A.relation_id, B.relation_id, B.relation_id, 0, 0, 0, 0, B.relation_id, 0, B.relation_id, 0,
    ]  # fmt: skip
    assert index.transaction.tolist() == [NO_TRANSACTION, *[0] * 6, *[1] * 7]
    changes = np.isin(index.kind, np.frombuffer(b"IUDT", np.uint8))
    assert index.ordinal[changes].tolist() == [0, 1, 0, 1]  # the T is 1 and 2
    assert index.ordinal[6] == 3
    assert index.commit_lsn.tolist() == [0x10D0, 0x11D0]
    assert index.end_lsn.tolist() == [0x1100, 0x1200]
    assert index.xid.tolist() == [700, 701]
    assert index.commit_time_us.tolist() == [COMMIT_TIME_US] * 2
    assert index.origin.tolist() == [None, "élan"]
    assert index.message_lsn.tolist() == [0x1010, 0x1150]
    records, places = index.messages()
    assert records.tolist() == [0, 9]
    assert places.tolist() == [0x1010, 0x1200]


def test_messages_alone_make_a_segment(tmp_path: Path) -> None:
    path = tmp_path / "0000000000001000-0000000000001020.cdc"
    path.write_bytes(encode([message(0, 0x1010), message(0, 0x1020)]))
    index = build(path)
    assert index.messages()[1].tolist() == [0x1010, 0x1020]
    assert index.ordinal.tolist() == [0, 0]
    assert_same(load(path), index)


def test_known_boundaries_give_the_same(segment: Path) -> None:
    starts, ends, _ = scan_records(segment.read_bytes())
    assert_same(build(segment, starts, ends), build(segment))


def test_the_file_is_read_back(segment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = build(segment)
    monkeypatch.setattr(segment_index, "build", None)
    assert_same(load(segment), built)


def damage_nothing(index: Path) -> None:
    index.unlink()


def cut(index: Path) -> None:
    index.write_bytes(index.read_bytes()[:-10])


def empty(index: Path) -> None:
    index.write_bytes(b"")


def zeros(index: Path) -> None:
    index.write_bytes(bytes(index.stat().st_size))


def zero_page(index: Path) -> None:
    data = index.read_bytes()
    middle = len(data) // 2
    index.write_bytes(data[: middle - 600] + bytes(1200) + data[middle + 600 :])


@pytest.mark.parametrize("damage", [damage_nothing, cut, empty, zeros, zero_page])
def test_an_index_that_is_missing_or_damaged_is_made_anew(segment: Path, damage) -> None:
    built = build(segment)
    index_path = segment.with_suffix(".idx")
    intact = index_path.read_bytes()
    damage(index_path)
    assert_same(load(segment), built)
    assert index_path.read_bytes() == intact
    assert {path.name for path in segment.parent.iterdir()} == {segment.name, index_path.name, "epoch.json"}


def test_a_page_of_zeros_anywhere_in_an_index_is_noticed(log: Log) -> None:
    """A power cut leaves such pages: the file is not synced."""
    rows = [Insert(None, A.relation_id, (b"1", b"x"))] * 6
    segment = log.segment(*([A, *rows, Origin(5, f"o{number}")] for number in range(400))).path
    built = build(segment)
    index_path = segment.with_suffix(".idx")
    intact, page = index_path.read_bytes(), 512
    damaged = [intact[:at] + bytes(len(intact[at : at + page])) + intact[at + page :] for at in range(0, len(intact), page)]
    assert len(damaged) > 100
    for contents in damaged:
        index_path.write_bytes(contents)
        assert_same(load(segment), built)
        assert index_path.read_bytes() == intact


def test_a_changed_byte_anywhere_in_an_index_is_noticed(segment: Path) -> None:
    built = build(segment)
    index_path = segment.with_suffix(".idx")
    intact = index_path.read_bytes()
    for at in range(0, len(intact), 7):
        index_path.write_bytes(intact[:at] + bytes([intact[at] ^ 0x10]) + intact[at + 1 :])
        assert_same(load(segment), built)
        assert index_path.read_bytes() == intact


def test_an_index_without_a_checksum_is_made_anew(segment: Path) -> None:
    """Such as those of format 2 and before."""
    built = build(segment)
    intact = segment.with_suffix(".idx").read_bytes()
    for size in (-4, 4, 1):
        segment.with_suffix(".idx").write_bytes(intact[:size])
        assert_same(load(segment), built)
    assert segment.with_suffix(".idx").read_bytes() == intact


def test_an_index_of_another_format_is_made_anew(segment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = build(segment)
    intact = segment.with_suffix(".idx").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(segment_index, "FORMAT", b"0")
        build(segment)
    assert segment.with_suffix(".idx").read_bytes() != intact
    assert_same(load(segment), built)
    assert segment.with_suffix(".idx").read_bytes() == intact


def test_an_index_of_another_size_is_made_anew(log: Log, segment: Path) -> None:
    other = log.segment([A, Insert(None, A.relation_id, (b"1", b"x"))]).path
    built = build(other)
    build(segment)
    segment.with_suffix(".idx").replace(other.with_suffix(".idx"))
    assert_same(load(other), built)


def test_an_index_is_for_its_user_alone(segment: Path) -> None:
    build(segment)
    assert segment.with_suffix(".idx").stat().st_mode & 0o777 == 0o600


def test_an_index_that_cannot_be_written_is_still_given(segment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> int:
        raise PermissionError

    monkeypatch.setattr(segment_index, "private_opener", refuse)
    assert load(segment).xid.tolist() == [700, 701]
    assert not segment.with_suffix(".idx").exists()


def test_a_record_larger_than_a_piece(segment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = build(segment)
    monkeypatch.setattr(segment_index, "_SCAN_BYTES", 8)
    assert_same(build(segment), whole)


def test_pieces_are_small_again_behind_a_large_record(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Insert(None, A.relation_id, (b"1", value)) for value in [b"x" * 10_000, *[b"y" * 100] * 200]]
    sizes: list[int] = []
    monkeypatch.setattr(segment_index, "_SCAN_BYTES", 1000)
    monkeypatch.setattr(segment_index, "scan", lambda piece: sizes.append(len(piece)) or scan(piece))
    build(log.segment([A, *rows]).path)
    after = sizes[sizes.index(max(sizes)) + 1 :]
    assert (max(sizes) > 10_000, len(after) > 1, max(after)) == (True, True, 1000)


def test_a_segment_without_records(log: Log, tmp_path: Path) -> None:
    path = tmp_path / "0000000000000001-0000000000000002.cdc"
    path.write_bytes(b"")
    index = build(path)
    assert index.offset.size == index.end_lsn.size == 0
    assert_same(load(path), index)


def message(flags: int, lsn: int) -> LogicalMessage:
    return LogicalMessage(None, flags, lsn, "p", b"x")


INSERT = Insert(None, A.relation_id, (b"1", b"x"))
GOOD = [A, INSERT]


@pytest.mark.parametrize(
    ("messages", "bad", "problem"),
    [
        ([StreamStop()], 0, "of an unknown kind"),
        ([b""], 0, "without bytes"),
        ([b"X"], 0, "of an unknown kind"),
        ([*transaction(0x1100, GOOD), A, INSERT], 5, "outside of any transaction"),
        (transaction(0x1100, GOOD)[:-1], 0, "has no Commit"),
        (transaction(0x1100, GOOD)[1:], 2, "do not alternate"),
        ([*transaction(0x1100, GOOD)[:-1], *transaction(0x1200, GOOD)], 3, "do not alternate"),
        ([*transaction(0x1200, GOOD), *transaction(0x1100, [INSERT])], 6, "not in commit order"),
        (transaction(0x1100, [INSERT]), 1, "not described before"),
        (transaction(0x1100, [INSERT, A]), 1, "not described before"),
        (transaction(0x1100, [A, Truncate(None, 0, (A.relation_id, B.relation_id))]), 2, "not described before"),
        (transaction(0x1100, [A, Truncate(None, 0, ())]), 2, "Truncate without relations"),
        (transaction(0x1100, [A, record(Truncate(None, 0, (1, 2)))[:-1]]), 2, "wrong length"),
        (transaction(0x1100, [A, record(Truncate(None, 0, (1, 2))) + b"x"]), 2, "wrong length"),
        (transaction(0x1100, [A, record(INSERT)[:5]]), 2, "too short"),
        ([Begin(1, 0, 1), Commit(0, 2, 3, 0)], 1, "differs from the one in Begin"),
        ([record(Begin(1, 0, 1))[:-1]], 0, "too short"),
        ([record(message(0, 1))[:14]], 0, "too short"),
        (transaction(0x1100, [*GOOD, message(0, 0x1010)]), 3, "wrong side"),
        ([*transaction(0x1100, GOOD), message(1, 0x1110)], 4, "wrong side"),
        ([message(0, 0x10D1), *transaction(0x1100, GOOD)], 0, "at another place"),
        ([*transaction(0x1100, GOOD), message(0, 0x1100)], 4, "at another place"),
        ([message(0, 0x1020), message(0, 0x1010), *transaction(0x1100, GOOD)], 1, "at another place"),
    ],
)
def test_corrupt_segments_are_refused_with_the_place(tmp_path: Path, messages, bad: int, problem: str) -> None:
    path = tmp_path / "s.cdc"
    data = encode(messages)
    path.write_bytes(data)
    byte = scan_records(data)[0][bad]
    with pytest.raises(StagingError, match=f"{path} is corrupt at byte {byte}: .*{problem}"):
        build(path)
    assert not path.with_suffix(".idx").exists()


@pytest.mark.parametrize("lsn", [0x1000, 0x1101])
def test_a_message_outside_of_the_segments_range_is_refused(log: Log, lsn: int) -> None:
    body = encode([*transaction(0x1100, GOOD), message(0, lsn)] if lsn > 0x1100 else [message(0, lsn), *transaction(0x1100, GOOD)])
    path = log.segment(GOOD).path
    path.write_bytes(body)
    with pytest.raises(StagingError, match="at another place"):
        build(path)


@pytest.mark.parametrize("cut_bytes", [1, 5, 40])
def test_a_cut_segment_is_refused(segment: Path, cut_bytes: int) -> None:
    data = segment.read_bytes()
    segment.write_bytes(data[:-cut_bytes])
    with pytest.raises(StagingError, match="corrupt at byte"):
        load(segment)


def test_a_bad_header_is_named_by_its_place(segment: Path) -> None:
    data = segment.read_bytes()
    _, ends, _ = scan_records(data)
    for place in ends[:-1]:
        segment.write_bytes(data[:place] + b"v" + data[place + 1 :])
        with pytest.raises(StagingError, match=f"corrupt at byte {place}: not a record header"):
            load(segment)


def test_a_missing_segment_is_named(tmp_path: Path) -> None:
    with pytest.raises(StagingError, match=r"gone\.cdc cannot be read") as caught:
        load(tmp_path / "gone.cdc")
    assert "a reader was behind the segments that were removed" in (caught.value.hint or "")


def test_a_limit_of_the_process_is_no_damage(segment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(segment_index, "open", refuse, raising=False)
    with pytest.raises(StagingError, match="cannot be read: Too many open files") as caught:
        segment_index.map_segment(segment)
    assert "ulimit -n" in (caught.value.hint or "")


def test_a_limit_of_memory_is_no_damage(segment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrow's error for a file that it cannot map has a text only."""

    def refuse(*_: object) -> None:
        raise OSError("Memory mapping file failed: Cannot allocate memory")

    monkeypatch.setattr(segment_index, "_MAP_BYTES", 1)
    monkeypatch.setattr(pa, "memory_map", refuse)
    with pytest.raises(StagingError, match="cannot be read: Memory mapping file failed: Cannot allocate memory") as caught:
        segment_index.map_segment(segment)
    assert "ulimit -v" in (caught.value.hint or "")


def test_open_segments_keep_no_files_open(tmp_path: Path) -> None:
    """A task has thousands of small segments open at a time. The system limits the files, and the maps, of a process."""
    log, described = Log(tmp_path), relation(1, "a", ("id", 25))
    segments = [log.segment([into(described, b"1")], before=[described]) for _ in range(50)]
    large = log.segment([into(described, b"x" * segment_index._MAP_BYTES)] * 20, before=[described])
    indexes = [load(segment.path) for segment in [*segments, large]]  # these are built
    before = len(os.listdir("/dev/fd"))
    mapped = [segment_index.map_segment(segment.path) for segment in [*segments, large]]
    loaded = [load(segment.path) for segment in [*segments, large]]
    assert len(os.listdir("/dev/fd")) == before
    assert [type(data.obj) for data in mapped] == [bytes] * len(segments) + [pa.Buffer]
    assert all(
        data.readonly and data == segment.path.read_bytes() for data, segment in zip(mapped, [*segments, large], strict=True)
    )
    for index, built in zip(loaded, indexes, strict=True):
        assert_same(index, built)
        # Arrow's objects do not stay with the index of a small segment.
        assert all(getattr(index, field.name).base is None for field in fields(index) if field.name != "size")


def test_boundaries_of_another_segment_are_refused(segment: Path) -> None:
    starts, ends, _ = scan_records(segment.read_bytes())
    with pytest.raises(StagingError, match="belong to another segment"):
        build(segment, starts[:-1], ends[:-1])


def test_a_transaction_that_is_too_large_has_a_way_on(tmp_path: Path) -> None:
    """A new slot was no way: the warehouse refuses it."""
    weight = np.array([0, np.iinfo(np.int32).max, 1, 1], np.int64)
    builder: Any = SimpleNamespace(_path=tmp_path / "000001" / "0000000000000100-0000000000000200.cdc")
    with pytest.raises(StagingError, match="has more than 2147483647 changes") as caught:
        _Builder._ordinals(builder, np.zeros(4, np.int64), np.array([0]), weight)
    assert f"move everything but masks.json out of {tmp_path}, and start run as before" in (caught.value.hint or "")

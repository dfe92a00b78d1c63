"""The staging log: positions, its layout, and damage."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from spark_sink.files.local import DamagedFileError
from spark_sink.staging.gap import Gap
from spark_sink.staging.log import Epoch, Position, StagingError, left_lsn, list_epochs, list_segments, log_end
from spark_sink.staging.log_view import LogView
from support.staged import make_epoch, ranges

FIRST = Epoch(1, "7", 1, "db", "s", ("p",), {}, 0x100, token="a")
GAP = Gap(0x1, "the slot was dropped", 0.0, 0.0)


@pytest.mark.parametrize(
    ("text", "position"),
    [("1:0/171F388", (1, 0x171F388)), ("0:0/0", (0, 0)), ("12:FFFFFFFF/FFFFFFFF", (12, 2**64 - 1)), ("7:a/0b", (7, 0xA0000000B))],
)
def test_position_text(text: str, position: tuple[int, int]):
    assert Position.parse(text) == position
    assert type(Position.parse(text).lsn) is int  # no LSN: Spark takes that for a text
    assert Position.parse(str(Position(*position))) == position


@pytest.mark.parametrize("text", ["", "1", "1:", "1:0", ":0/0", "-1:0/0", "1:0/0 ", "1:0/0\n", "1:123456789/0", "\uff11:0/0"])
def test_invalid_positions(text: str):
    with pytest.raises(ValueError, match="not a position"):
        Position.parse(text)


def test_the_log_is_a_chain_over_epochs(tmp_path: Path):
    assert list_epochs(tmp_path) == []
    assert list_segments(tmp_path) == []
    assert log_end(tmp_path) is None
    make_epoch(tmp_path, 1, 0x100, (0x100, 0x200), (0x200, 0x300))
    make_epoch(tmp_path, 2, 0x300)
    make_epoch(tmp_path, 4, 0x300, (0x300, 0x400))
    (tmp_path / "000005").mkdir()  # its launcher ended before it had described it
    assert ranges(tmp_path) == [(1, 0x100, 0x200), (1, 0x200, 0x300), (4, 0x300, 0x400)]
    assert log_end(tmp_path) == (4, 0x400)
    assert [epoch.number for epoch in list_epochs(tmp_path)] == [1, 2, 4]
    assert list_epochs(tmp_path)[0].publications == ("p",)
    segment = list_segments(tmp_path)[0]
    assert (segment.start, segment.end) == ((1, 0x100), (1, 0x200))
    assert segment.index_path.name == "0000000000000100-0000000000000200.idx"


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (None, [0x200, 0x300, 0x400]),
        (Position(0, 0), [0x200, 0x300, 0x400]),
        (Position(1, 0x100), [0x200, 0x300, 0x400]),
        (Position(1, 0x150), [0x200, 0x300, 0x400]),
        (Position(1, 0x200), [0x300, 0x400]),
        (Position(1, 0x300), [0x400]),
        (Position(2, 0x300), [0x400]),
        (Position(2, 0x400), []),
    ],
)
def test_segments_after_a_position(tmp_path: Path, after: Position | None, expected: list[int]):
    make_epoch(tmp_path, 1, 0x100, (0x100, 0x200), (0x200, 0x300))
    make_epoch(tmp_path, 2, 0x300, (0x300, 0x400))
    assert [end for _, _, end in ranges(tmp_path, after)] == expected


@pytest.mark.parametrize(
    "after",
    [Position(1, 0xFF), Position(1, 0x301), Position(2, 0x401), Position(3, 0x400)],
    ids=["before the beginning", "beyond the fence", "beyond the end", "in an epoch to come"],
)
def test_a_position_of_another_log(tmp_path: Path, after: Position):
    make_epoch(tmp_path, 1, 0x100, (0x100, 0x200), (0x200, 0x300))
    make_epoch(tmp_path, 2, 0x300, (0x300, 0x400))
    with pytest.raises(StagingError, match="not"):
        list_segments(tmp_path, after)


@pytest.mark.parametrize(("after", "expected"), [(0x7F, None), (0x80, [0x500]), (0xFF, [0x500]), (0x100, [0x200, 0x300, 0x500])])
def test_a_reader_before_the_beginning_goes_on_after_a_gap_that_has_what_it_lacks(
    tmp_path: Path, after: int, expected: list[int] | None
):
    make_epoch(tmp_path, 1, 0x100, (0x100, 0x200), (0x200, 0x300))
    path = make_epoch(tmp_path, 8, 0x400, (0x400, 0x500)) / "epoch.json"
    gap = Gap(0x80, "the log of the tables was lost", since=0.0, found=2.0)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"gap": gap.to_json()}))
    position = Position(1 if after == 0x100 else 7, after)
    if expected is not None:
        assert [end for _, _, end in ranges(tmp_path, position)] == expected
        return
    with pytest.raises(StagingError, match="do not exist any more"):
        list_segments(tmp_path, position)


def test_where_a_log_has_left_that_of_a_reader():
    def left(epochs: list[Epoch], position: Position, token: str = "") -> int | None:
        found = left_lsn(epochs, position, token)
        # A gap that passes the position heals it; one at an earlier position does not.
        assert left_lsn([*epochs, replace(FIRST, number=9, start_lsn=position.lsn, gap=GAP)], position, token) is None
        assert left_lsn([replace(FIRST, number=0, start_lsn=0x10, gap=GAP), *epochs], position, token) == found
        return found

    second = replace(FIRST, number=2, start_lsn=0x300, token="b")
    assert left([FIRST, second], Position(1, 0x300), "a") is None
    assert left([FIRST, second], Position(1, 0x301), "a") == 0x300
    assert left([FIRST, second], Position(1, 0x200), "other") == 0x100
    assert left([FIRST, second], Position(2, 0x400), "b") is None
    assert left([FIRST, second], Position(2, 0x400), "other") == 0x300
    assert left([FIRST, replace(second, token="")], Position(2, 0x400), "other") is None
    assert left([FIRST, second], Position(2, 0x400)) is None
    assert left([second], Position(1, 0x200), "removed since") is None


def test_a_position_in_a_log_that_has_not_begun(tmp_path: Path):
    with pytest.raises(StagingError, match="which is empty"):
        list_segments(tmp_path, Position(1, 0x100))


@pytest.mark.parametrize("after", [Position(1, 0x500), Position(1, 0x580), Position(1, 0x600), Position(2, 0x600)])
@pytest.mark.parametrize("removed", [None, "1:0/200", "1:0/300"])
def test_segments_behind_a_position_are_not_looked_at_one_by_one(tmp_path: Path, after: Position, removed: str | None):
    """There may be 600,000. Among them are those of a replaced launcher, and those that another process is deleting."""
    first = make_epoch(
        tmp_path, 1, 0x100, *((start, start + 0x100) for start in range(0x100, 0x600, 0x100)), (0x600, 0x700), (0x700, 0x710)
    )
    make_epoch(tmp_path, 2, 0x600, (0x600, 0x800), (0x800, 0x900))
    if removed is not None:
        (tmp_path / "removed.json").write_text(json.dumps({"position": removed}))
        next(first.glob("*100-*.cdc")).unlink()
    beyond = [(2, 0x600, 0x800), (2, 0x800, 0x900)]
    assert ranges(tmp_path, after) == [*([(1, 0x500, 0x600)] if after.lsn < 0x600 else []), *beyond]
    assert ranges(tmp_path, Position(2, 0x800)) == beyond[1:]
    assert ranges(tmp_path, Position(2, 0x900)) == []
    with pytest.raises(StagingError, match="not in this log"):
        list_segments(tmp_path, Position(2, 0x901))
    with pytest.raises(StagingError, match="not in this log"):
        list_segments(tmp_path, Position(1, 0x710))
    view = LogView(tmp_path)
    assert [segment.end_lsn for segment in view.segments(Position(2, 0x800))] == [0x900]
    assert view.segments(after) == list_segments(tmp_path, after)
    next(first.glob("*400-*.cdc")).unlink()  # no reader that is beyond it needs it
    assert ranges(tmp_path, Position(2, 0x800)) == beyond[1:]
    next(first.glob("*500-*.cdc")).unlink()
    with pytest.raises(StagingError, match="segments are missing") as caught:
        list_segments(tmp_path, Position(2, 0x800))
    assert caught.value.hint == (
        f"restore what is missing from a copy of the directory. Without a copy, move everything but masks.json out of"
        f" {tmp_path}, and start run as before: it says if its tables lack changes, and copies them anew with --on-gap resnapshot"
    )


def test_segments_of_a_replaced_launcher_are_not_in_the_log(tmp_path: Path):
    make_epoch(tmp_path, 1, 0x100, (0x100, 0x200), (0x200, 0x280), (0x280, 0x500))
    make_epoch(tmp_path, 2, 0x200, (0x200, 0x300))
    assert ranges(tmp_path) == [(1, 0x100, 0x200), (2, 0x200, 0x300)]
    with pytest.raises(StagingError, match="not in this log"):
        list_segments(tmp_path, Position(1, 0x280))


def _without_first(root: Path) -> None:
    next(root.glob("000001/*100-*.cdc")).unlink()


def _without_middle(root: Path) -> None:
    next(root.glob("000001/*200-*.cdc")).unlink()


def _without_last_of_epoch(root: Path) -> None:
    next(root.glob("000001/*300-*.cdc")).unlink()


def _overlap(root: Path) -> None:
    (root / "000001" / "0000000000000180-0000000000000200.cdc").write_bytes(b"")


def _over_the_fence(root: Path) -> None:
    next(root.glob("000001/*300-*.cdc")).rename(root / "000001" / "0000000000000300-0000000000000401.cdc")


def _bad_name(root: Path) -> None:
    (root / "000001" / "copy of 1.cdc").write_bytes(b"")


def _backward_name(root: Path) -> None:
    (root / "000001" / "0000000000000300-0000000000000300.cdc").write_bytes(b"")


def _no_description(root: Path) -> None:
    (root / "000001" / "epoch.json").unlink()


def _description(text: str) -> Callable[[Path], None]:
    return lambda root: (root / "000001" / "epoch.json").write_text(text) and None


def _changed(**fields: object) -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        path = root / "000001" / "epoch.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return damage


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_without_first, "missing"),
        (_without_middle, "missing"),
        (_without_last_of_epoch, "missing"),
        (_overlap, "overlaps"),
        (_over_the_fence, "overlaps"),
        (_bad_name, "not a segment's name"),
        (_backward_name, "not a segment's name"),
        (_no_description, "no epoch.json"),
        (_description("{"), "not JSON"),
        (_description("[]"), "not a JSON object"),
        (_description("\x80\x04K\x01."), "not JSON"),  # a pickle
        (_description("[" * 100_000), "not JSON"),
        (_changed(format=2), "format 2"),
        (_changed(start_lsn="x"), "not an LSN"),
        (_changed(start_lsn=7), "start_lsn"),
        (_changed(timeline="1"), "timeline"),
        (_changed(timeline=True), "timeline"),
        (_changed(publications="p"), "publications"),
        (_changed(slot="another"), "differ"),
        (_changed(system_id="8"), "differ"),
        (_changed(timeline=2), "differ"),
        (_changed(database="another"), "differ"),
        (_changed(start_lsn="0/500"), "before epoch"),
    ],
)
def test_damage_is_reported(tmp_path: Path, damage: Callable[[Path], None], words: str):
    make_epoch(tmp_path, 1, 0x100, (0x100, 0x200), (0x200, 0x300), (0x300, 0x400))
    make_epoch(tmp_path, 2, 0x400, (0x400, 0x500))
    damage(tmp_path)
    with pytest.raises(StagingError if "JSON" not in words else DamagedFileError, match=words):
        list_segments(tmp_path)


def test_not_a_staging_directory(tmp_path: Path):
    with pytest.raises(StagingError, match="no such directory"):
        list_segments(tmp_path / "nowhere")


def test_unsealed_files_are_not_in_the_log(tmp_path: Path):
    directory = make_epoch(tmp_path, 1, 0x100, (0x100, 0x200))
    for name in ("0000000000000200.open", "0000000000000100-0000000000000200.idx", ".tmp-x", "notes.txt"):
        (directory / name).write_bytes(b"x")
    assert ranges(tmp_path) == [(1, 0x100, 0x200)]


def test_a_listing_that_a_writer_overtook_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from spark_sink.staging import log as staging

    make_epoch(tmp_path, 1, 0x100, (0x100, 0x200), (0x200, 0x300))
    listing, turns = staging.epoch_segments, iter([1, 2])

    def miss_the_first(root: Path, number: int, *bounds: int | None):
        found = listing(root, number, *bounds)
        return found[1:] if next(turns, 3) < 3 else found

    monkeypatch.setattr(staging, "epoch_segments", miss_the_first)
    assert ranges(tmp_path) == [(1, 0x100, 0x200), (1, 0x200, 0x300)]

"""Which keys are named once the sums of some buckets differ, and how many rows are read for that."""

from hashlib import md5
from typing import Any

import pytest

from spark_sink.verify import differences
from spark_sink.verify.differences import Difference, Sides


class Side:
    """One side of a comparison, as `Canonical` answers. As a server it answers requests."""

    def __init__(self, rows: list[tuple[str, str]]) -> None:
        self.all = rows
        self.sent: list[int] = []
        """How many rows each request for rows has got."""

    def checksums(self, _rows: Any, _key: Any, within: Any = ()) -> dict[str, tuple[int, int]]:
        sums: dict[str, tuple[int, int]] = {}
        for key, value in self.all:
            bucket = bucket_of(key, 6 if within else 3)
            if not within or bucket[:3] in within:
                count, total = sums.get(bucket, (0, 0))
                sums[bucket] = count + 1, total + int(value, 16)
        return sums

    def rows(self, _rows: Any, _key: Any, buckets: list[str]) -> list[tuple[str, str]]:
        found = [row for row in self.all if bucket_of(row[0], len(buckets[0])) in buckets]
        self.sent.append(len(found))
        return found

    def send(self, request: dict[str, Any]) -> None:
        is_rows = "rows" in request
        assert request["rows" if is_rows else "buckets"] == ["public", "t"]
        self.answer = self.rows(None, None, request["buckets"]) if is_rows else self.checksums(None, None, request["within"])

    def receive(self) -> Any:
        return [list(row) for row in self.answer] if isinstance(self.answer, list) else self.answer


def bucket_of(key: str, digits: int) -> str:
    return md5(key.encode()).hexdigest()[:digits]


def compared(ours: list[tuple[str, str]], theirs: list[tuple[str, str]], most: int = 10) -> tuple[list[Difference], list[int]]:
    """Return the differences, and how many rows the server has sent."""
    replica: Any = Side(ours)
    server: Any = Side(theirs)
    no_frame: Any = None
    sides = Sides(server, ["public", "t"], replica, no_frame, ["id"])
    return sides.differences(replica.checksums(None, None), server.checksums(None, None), most), server.sent


@pytest.mark.parametrize("many", [0, 250_000])
def test_rows_that_differ_are_named(many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(differences, "_MANY_ROWS", many)
    same = [(str(number), "5") for number in range(100, 120)]
    ours = [*same, ("1", "a"), ("2", "b"), ("2", "b"), ("9", "c")]
    theirs = [*same, ("1", "b"), ("2", "b"), ("10", "c")]
    expected = [("changed", "1"), ("surplus", "2"), ("surplus", "9"), ("missing", "10")]
    assert [(each.kind, each.key["id"]) for each in compared(ours, theirs)[0]] == expected
    assert len(compared(ours, theirs, most=2)[0]) == 2
    assert compared(ours, theirs, most=0) == ([], [])
    assert compared(same, same[::-1]) == ([], [])


def test_of_a_large_table_only_parts_of_buckets_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 4,096 buckets has 2.4 million rows if the table has 10,000 million. All of them were in memory, several times."""
    monkeypatch.setattr(differences, "_MANY_ROWS", 10)
    keys = [key for key in map(str, range(100_000)) if bucket_of(key, 3) == bucket_of("0", 3)]
    assert len(keys) > 10
    server = [(key, "5") for key in keys]
    found, sent = compared([*server[:-1], (keys[-1], "6")], server)
    assert found == [Difference("changed", {"id": keys[-1]})]
    assert sent == [1]


def test_a_side_that_answers_otherwise_the_second_time_has_no_parts_to_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server got a query with an empty list then, and verify ended with an error of its syntax."""
    monkeypatch.setattr(differences, "_MANY_ROWS", 0)
    replica: Any = Side([("1", "a")])
    server: Any = Side([("1", "a")])
    no_frame: Any = None
    first = Side([("1", "b")]).checksums(None, None)
    assert Sides(server, ["public", "t"], replica, no_frame, ["id"]).differences(replica.checksums(None, None), first, 10) == []
    assert server.sent == []

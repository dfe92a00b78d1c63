"""Held transactions: their memory is limited, their files have no names, and the error for a full disk names the directory."""

import os
import resource
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdcpipe.errors import OutputError
from cdcpipe.pgoutput.held import PIECE_BYTES
from cdcpipe.pgoutput.messages import (
    BeginPrepare,
    CommitPrepared,
    Insert,
    Prepare,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamStart,
)
from cdcpipe.pgoutput.transactions import Transactions
from cdcpipe.pipe.framing import RecordReader
from cdcpipe.pipe.spill import MAX_FILES, Spill, Spills
from support.pgoutput_build import build
from support.whole_transactions import COMMIT, E, S, row, take_all, whole


def test_memory_is_bounded_and_the_files_have_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    transactions = Transactions(spill_threshold=100_000)
    fds = set(os.listdir("/proc/self/fd"))
    for xid in (7, 8):
        transactions.feed(1, build(StreamStart(xid, True)))
        for number in range(5_000):
            transactions.feed(number, build(Insert(xid, 16385, (b"x" * 200,))))
            assert transactions._held.free_bytes() >= 0
        transactions.feed(1, build(E))
    assert list(tmp_path.iterdir()) == []
    transactions.feed(1, build(StreamAbort(7, 7, None, None)))
    transactions.feed(1, build(StreamCommit(8, 0, 100, 200, 5)))
    lsns = []
    while piece := transactions.take(1000):
        assert len(piece) < 1000 + PIECE_BYTES + 300
        reader = RecordReader()
        reader.feed(piece)
        lsns += [lsn for lsn, data in reader if data[:1] == b"I"]
        assert not reader.has_partial
    assert lsns == list(range(5_000))
    assert set(os.listdir("/proc/self/fd")) == fds


def test_close_gives_everything_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    fds = set(os.listdir("/proc/self/fd"))
    transactions = Transactions(spill_threshold=0)
    for message in (S, row(7, 1), E, BeginPrepare(1, 2, 3, 8, "g"), row(None, 1), Prepare(0, 1, 2, 3, 8, "g"), COMMIT):
        transactions.feed(1, build(message))
    transactions.take(1)
    transactions.close()
    assert not transactions.has_pending
    assert set(os.listdir("/proc/self/fd")) == fds


def test_a_full_disk_is_an_error_that_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: bytes, pos: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OutputError, match=r"cannot keep .*: No space left on device"):
        whole(S, row(7, 1), spill_threshold=0, make_spill=Spills().open)


def test_as_many_held_transactions_as_the_server_allows_and_few_files() -> None:
    """1,500 prepared transactions on disk, some of them ended in between, with 256 descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fds = set(os.listdir("/proc/self/fd"))
    transactions = Transactions(spill_threshold=0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        for xid in range(1, 1501):
            prepare = (BeginPrepare(1, 2, 3, xid, f"g{xid}"), row(None, xid), Prepare(0, 1, 2, 3, xid, f"g{xid}"))
            for message in prepare:
                transactions.feed(xid, build(message))
            if xid % 3 == 0:
                transactions.feed(xid, build(RollbackPrepared(0, 1, 2, 3, 4, xid, f"g{xid}")))
        for xid in range(1, 1501):
            if xid % 3:
                transactions.feed(xid, build(CommitPrepared(0, 1, 2, 3, xid, f"g{xid}")))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    rows = [lsn for lsn, data in take_all(transactions) if data[:1] == b"I"]
    assert rows == [xid for xid in range(1, 1501) if xid % 3]
    assert set(os.listdir("/proc/self/fd")) == fds


@given(
    st.lists(
        st.tuples(st.integers(0, 39), st.sampled_from(["append", "append", "truncate", "close"]), st.integers(0, 200_000)),
        max_size=120,
    )
)
def test_spills_that_share_files_keep_their_bytes(steps: list[tuple[int, str, int]]) -> None:
    spills = Spills()
    held: dict[int, tuple[Spill, bytes]] = {}
    fds = len(os.listdir("/proc/self/fd"))
    for number, (which, step, size) in enumerate(steps):
        spill, data = held.get(which) or (spills.open(), b"")
        if step == "append":
            added = bytes([number + 1]) * size
            spill.append(added)
            data += added
        elif step == "truncate":
            data = data[: size % (len(data) + 1)]
            spill.truncate(len(data))
        held[which] = spill, data
        if step == "close":
            held.pop(which)[0].close()
        assert len(os.listdir("/proc/self/fd")) <= fds + MAX_FILES
        for other, expected in held.values():
            assert other.size == len(expected)
            assert other.read(0, other.size) == expected
    for spill, data in held.values():
        assert spill.read(len(data) // 2, len(data) - len(data) // 2) == data[len(data) // 2 :]
        spill.close()
    assert len(os.listdir("/proc/self/fd")) == fds

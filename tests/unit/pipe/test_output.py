"""The writing end of the pipe never blocks, reports what was written completely, and leaves descriptors as they were."""

import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdcpipe.errors import OutputError
from cdcpipe.pipe.framing import encode_header
from cdcpipe.pipe.output import READER_ENDED, EndOfRecord, Output, _Chunk


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read_fd, write_fd = os.pipe()
    yield read_fd, write_fd
    for fd in (read_fd, write_fd):
        try:
            os.close(fd)
        except OSError:
            continue


def test_ends_are_reported_once_their_chunk_is_out_whole(pipe: tuple[int, int]) -> None:
    read_fd, write_fd = pipe
    output = Output(write_fd)
    big = os.urandom(3 << 20)
    output.put(b"first", [1])
    output.put(big, [2, 3])
    assert output.write() == [1]
    assert 0 < output.pending_bytes < len(big)
    got = b""
    ends: list[int] = []
    while output.pending_bytes:
        got += os.read(read_fd, 1 << 20)
        ends += output.write()
    while len(got) < len(big) + 5:
        got += os.read(read_fd, 1 << 20)
    assert got == b"first" + big
    assert ends == [2, 3]
    output.close()


def _framed(*records: tuple[int, int]) -> bytes:
    return b"".join(encode_header(lsn, size) + b"x" * size for lsn, size in records)


def _put_beyond_the_pipe(output: Output, begin: bytes, ends: list[int], *, is_framed: bool = True) -> None:
    """Queue a chunk that begins with ``begin``, and of which the pipe takes less than half."""
    record = encode_header(999, 4 << 20) + b"y" * (4 << 20)
    output.put(begin + record, ends, is_framed=is_framed)


def test_ends_in_a_chunk_that_is_out_in_part(pipe: tuple[int, int]) -> None:
    """Each counts once the records in a row with its LSN are out: also the next Begin has this LSN."""
    read_fd, write_fd = pipe
    output = Output(write_fd)
    begin = _framed((10, 3), (20, 9), (30, 0), (30, 4), (25, 4), (40, 5), (40, 6))
    _put_beyond_the_pipe(output, begin, [30, 40, 999])
    assert output.write() == []
    assert output.take_written_ends() == [30, 40]
    assert output.take_written_ends() == []
    ends: list[int] = []
    while output.pending_bytes:
        os.read(read_fd, 1 << 20)
        ends += output.write()
    assert ends == [999]
    output.close()


def test_an_end_that_is_not_in_the_header_of_its_record(pipe: tuple[int, int]) -> None:
    output = Output(pipe[1])
    _put_beyond_the_pipe(
        output, _framed((65, 3), (64, 3)), [EndOfRecord.of(80, 65), EndOfRecord.of(90, 64), EndOfRecord.of(1200, 999)]
    )
    assert output.write() == []
    assert output.take_written_ends() == [80, 90]
    output.close()


def test_ends_of_records_that_are_not_written_do_not_count(pipe: tuple[int, int]) -> None:
    """LSNs need not rise: a later record has the position of the first one."""
    output = Output(pipe[1])
    _put_beyond_the_pipe(output, _framed((150, 3), (120, 3)), [150, 120, 150])
    assert output.write() == []
    assert output.take_written_ends() == [150, 120]
    output.close()


def test_ends_in_a_chunk_of_which_nothing_is_known(pipe: tuple[int, int]) -> None:
    output = Output(pipe[1])
    assert output.take_written_ends() == []
    _put_beyond_the_pipe(output, _framed((10, 3), (20, 3)), [10, 20], is_framed=False)
    assert output.write() == []
    assert output.take_written_ends() == []
    output.close()


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40), st.integers(1, 3)), min_size=1, max_size=20), st.data())
def test_no_end_counts_before_its_last_record(drawn: list[tuple[int, int, int]], data: st.DataObject) -> None:
    """Transactions have changes of any LSN before their end, and one to three records at it."""
    records, sizes, ends, lsn = b"", list[int](), list[int](), 100
    for changes, size, at_end in drawn:
        lsn += 10
        records += _framed(*((lsn - 1 - change, size) for change in range(changes)), *((lsn, size) for _ in range(at_end)))
        ends.append(lsn)
        sizes.append(len(records))
    chunk = _Chunk(records, ends, is_framed=True)
    taken: list[int] = []
    for written in sorted(data.draw(st.lists(st.integers(0, len(records) - 1), max_size=4))):
        chunk.written_bytes = written
        taken += chunk.take_written_ends()
        assert taken == [end for end, size in zip(ends, sizes, strict=True) if size <= written]
    assert taken + chunk.take_ends() == ends


def test_the_shared_description_stays_blocking(pipe: tuple[int, int]) -> None:
    _, write_fd = pipe
    output = Output(write_fd)
    assert not fcntl.fcntl(write_fd, fcntl.F_GETFL) & os.O_NONBLOCK
    output.close()
    assert not fcntl.fcntl(write_fd, fcntl.F_GETFL) & os.O_NONBLOCK


def test_flags_come_back_where_the_pipe_can_not_be_opened_anew(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_kwargs: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    output = Output(pipe[1])
    assert fcntl.fcntl(pipe[1], fcntl.F_GETFL) & os.O_NONBLOCK
    output.put(b"x" * (4 << 20), [1])
    assert output.write() == []
    output.close()
    assert not fcntl.fcntl(pipe[1], fcntl.F_GETFL) & os.O_NONBLOCK


def test_a_socket() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        output = Output(ours.fileno())
        output.put(b"x" * (8 << 20), [1])
        assert output.write() == []
        assert output.pending_bytes
        theirs.close()
        with pytest.raises(OutputError):
            output.write()
        output.close()


def test_a_file(tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as file:
        output = Output(file.fileno())
        output.put(b"abc", [1])
        output.put(b"", [2])
        assert output.write() == [1, 2]
        output.close()
    assert (tmp_path / "out").read_bytes() == b"abc"


def test_a_closed_reader_is_an_output_error(pipe: tuple[int, int]) -> None:
    read_fd, write_fd = pipe
    output = Output(write_fd)
    os.close(read_fd)
    output.put(b"abc", [1])
    with pytest.raises(OutputError, match="Broken pipe") as raised:
        output.write()
    output.close()
    assert raised.value.hint == READER_ENDED


def test_a_full_disk_has_a_hint_of_its_own() -> None:
    with Path("/dev/full").open("wb") as full:
        output = Output(full.fileno())
        output.put(b"abc", [1])
        with pytest.raises(OutputError, match="No space left") as raised:
            output.write()
        output.close()
    assert "make room where the output goes" in (raised.value.hint or "")


def test_a_closed_descriptor_is_an_output_error() -> None:
    with pytest.raises(OutputError):
        Output(9999)

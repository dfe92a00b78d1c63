"""The writing end of the pipe never blocks, reports what was written completely, and leaves descriptors as they were."""

import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from cdcpipe.errors import OutputError
from cdcpipe.pipe.output import Output


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
    with pytest.raises(OutputError, match="Broken pipe"):
        output.write()
    output.close()


def test_a_closed_descriptor_is_an_output_error() -> None:
    with pytest.raises(OutputError):
        Output(9999)

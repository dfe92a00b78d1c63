"""The reading end for commands never blocks."""

import os
import select
from typing import Any

import pytest

from cdcpipe.pipe.input import Input


class _Ready:
    """A poll that reports everything as readable: a terminal's input may be gone when it is read."""

    def register(self, fd: int, _events: int) -> None:
        self._fd = fd

    def poll(self, _timeout_ms: int) -> list[tuple[int, int]]:
        return [(self._fd, select.POLLIN)]


@pytest.mark.timeout(60)
def test_a_terminal_may_take_back_what_was_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    master_fd, terminal_fd = os.openpty()
    reader = Input(terminal_fd)
    os.write(master_fd, b"q\n")
    assert reader.read() == b"q\n"
    assert reader.read() is None
    monkeypatch.setattr("cdcpipe.pipe.input.select.poll", _Ready)
    assert reader.read() is None
    assert os.get_blocking(terminal_fd)  # it is the shell's, too
    reader.close()
    os.close(master_fd)
    os.close(terminal_fd)


def test_a_pipe_is_read_as_it_is() -> None:
    read_fd, write_fd = os.pipe()
    reader = Input(read_fd)
    assert reader.fd == read_fd
    seen: list[Any] = [reader.read()]
    os.write(write_fd, b"F 0/1\n")
    seen.append(reader.read())
    os.close(write_fd)
    seen.append(reader.read())
    assert seen == [None, b"F 0/1\n", b""]
    reader.close()
    os.close(read_fd)

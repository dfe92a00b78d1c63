"""What a service manager hears: READY, WATCHDOG, STOPPING, as datagrams."""

import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from spark_sink.commands.service_manager import ServiceManager


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "notify"))
        receiver.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.delenv("WATCHDOG_USEC", raising=False)
        monkeypatch.delenv("WATCHDOG_PID", raising=False)
        yield receiver


def heard(receiver: socket.socket) -> list[str]:
    found = []
    while True:
        try:
            found.append(receiver.recv(100).decode())
        except BlockingIOError:
            return found


def test_ready_is_said_once_the_stream_has_begun(manager: socket.socket) -> None:
    service = ServiceManager()
    service.tick(is_streaming=False)
    assert heard(manager) == []
    service.tick(is_streaming=True)
    service.tick(is_streaming=True)
    service.stopping()
    assert heard(manager) == ["READY=1", "STOPPING=1"]


@pytest.mark.parametrize("pid", [None, os.getpid()], ids=["any", "this"])  # all processes of pytest-xdist need equal names
def test_the_watchdog_hears_each_turn(manager: socket.socket, monkeypatch: pytest.MonkeyPatch, pid: int | None) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "60000000")
    if pid is not None:
        monkeypatch.setenv("WATCHDOG_PID", str(pid))
    service = ServiceManager()
    service.tick(is_streaming=False)
    service.tick(is_streaming=True)
    assert heard(manager) == ["WATCHDOG=1", "READY=1", "WATCHDOG=1"]


def test_the_watchdog_of_another_process_hears_nothing(manager: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "60000000")
    monkeypatch.setenv("WATCHDOG_PID", "1")
    ServiceManager().tick(is_streaming=False)
    assert heard(manager) == []


def test_an_abstract_address(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind("\0cdcpipe-test-notify")
        monkeypatch.setenv("NOTIFY_SOCKET", "@cdcpipe-test-notify")
        ServiceManager().stopping()
        assert receiver.recv(100) == b"STOPPING=1"


def test_a_manager_that_does_not_listen_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    ServiceManager().tick(is_streaming=True)
    monkeypatch.delenv("NOTIFY_SOCKET")
    ServiceManager().stopping()


def test_a_full_queue_does_not_hold_up_the_loop(manager: socket.socket) -> None:
    service = ServiceManager()
    for _ in range(10_000):
        service.stopping()
    assert set(heard(manager)) == {"STOPPING=1"}


def test_a_stop_that_cannot_be_told_is_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> NoReturn:
        raise OSError(errno.EMFILE, "Too many open files")

    stopped: list[bool] = []
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/notify")
    service = ServiceManager()
    monkeypatch.setattr(socket, "socket", fail)
    service.told_before(lambda: stopped.append(True))()
    assert stopped

"""What happens when this process can't take calls of Spark's JVM any more: the JVM's call ends, and the error names the cause."""

import contextlib
import errno
import gc
import os
import resource
import socket
import threading
import weakref
from collections.abc import Iterator

import pytest
from py4j.java_gateway import CallbackServer, CallbackServerParameters, server_connection_error, server_started

from spark_sink.pipeline.failures import own_error
from spark_sink.spark import callbacks

_BEYOND_SELECT = 1024


@pytest.fixture(autouse=True)
def _watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(callbacks, "_error", None)
    receivers = [*server_connection_error.receivers]
    with callbacks.taken(lambda: None):
        yield
    server_connection_error.receivers[:] = receivers


@contextlib.contextmanager
def _limit_of_files(limit: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextlib.contextmanager
def _server() -> Iterator[CallbackServer]:
    """The part of py4j that takes the JVM's calls."""
    parameters = CallbackServerParameters(port=0, daemonize=True, accept_timeout=None)
    server = CallbackServer({}, None, callback_server_parameters=parameters)
    listens = threading.Event()
    server_started.connect(lambda **_: listens.set(), sender=server, unique_id="test")
    server.start()
    thread = server.thread
    try:
        assert listens.wait(60)
        yield server
    finally:
        server.shutdown()
        thread.join()
        server_started.disconnect(None, sender=server, unique_id="test")


def _answer(caller: socket.socket, server: CallbackServer) -> bytes:
    """Call as the JVM does, and return the answer: nothing if the connection is refused, or ends without an answer."""
    with contextlib.suppress(ConnectionError):
        caller.connect((server.get_listening_address(), server.get_listening_port()))
        return caller.recv(1)
    return b""


def test_a_call_ends_where_no_descriptor_is_left_for_it() -> None:
    with socket.socket() as caller, _server() as server:
        with _limit_of_files(0):
            assert _answer(caller, server) == b""
            error = callbacks.failure()
        assert error is not None
        assert os.strerror(errno.EMFILE) in error.message
        assert "ulimit -n (now 0)" in (error.hint or "")
        assert str(own_error(RuntimeError("An exception was raised by the Python Proxy"))) == str(error)


def test_a_call_ends_in_a_process_with_a_thousand_open_files() -> None:
    """py4j waits with select, which knows descriptors below 1,024. The tables of such a process stood still without a word."""
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] <= _BEYOND_SELECT + 100:
        pytest.skip("this machine has no descriptors beyond 1,024")
    with _limit_of_files(_BEYOND_SELECT + 100), contextlib.ExitStack() as files, socket.socket() as caller:
        while files.enter_context(open(os.devnull)).fileno() < _BEYOND_SELECT:
            pass
        with _server() as server:
            assert _answer(caller, server) == b""
        error = callbacks.failure()
    assert error is not None
    assert "select" in error.message
    assert "more than 1,000 open files" in (error.hint or "")


def test_a_server_that_takes_calls_is_no_failure() -> None:
    with _server():
        assert callbacks.failure() is None


def test_what_the_jvm_could_call_is_let_go_at_the_end() -> None:
    """py4j keeps its half until Java has forgotten the query, and a function of the query's owner would keep the query."""

    class Owner:
        def call(self, batch_id: int) -> None:
            self.batch_id = batch_id

    owner = Owner()
    with callbacks.taken(owner.call) as kept_by_py4j:
        kept_by_py4j(7)
    assert owner.batch_id == 7
    found = weakref.ref(owner)
    del owner
    gc.collect()
    assert found() is None
    assert kept_by_py4j is not None

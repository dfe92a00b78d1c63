"""The protocol on a socket, with a server that the test plays on the other end."""

import socket
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdcpipe.errors import ProtocolError
from cdcpipe.libpq.direct_copy import CAPACITY_BYTES, DirectCopy, Fields, LostError, Message
from support.wire import copy_data, error_fields, message


@pytest.fixture
def ends() -> Iterator[tuple[DirectCopy, socket.socket, list[Fields]]]:
    ours, server = socket.socketpair()
    notices: list[Fields] = []
    with ours, server:
        copy = DirectCopy(ours.fileno(), notices.append)
        yield copy, server, notices
        copy.close()


CONTENTS = st.binary(max_size=60) | st.integers(60, 200_000).map(lambda size: b"x" * size)
MESSAGES = st.one_of(
    CONTENTS.map(lambda content: (b"d", content)),
    st.sampled_from([(b"N", error_fields("NOTICE", "00000", "told")), (b"S", b"a\0b\0"), (b"A", b"\0\0\0\1c\0\0")]),
)


@settings(deadline=None)
@given(st.lists(MESSAGES, max_size=12), st.data())
def test_messages_come_whole_however_the_stream_is_cut(sent: list[tuple[bytes, bytes]], data: st.DataObject) -> None:
    stream = b"".join(message(*each) for each in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20), "cuts"))
    ours, server = socket.socketpair()
    notices: list[bytes | None] = []
    received: list[bytes] = []
    with ours, server:
        copy = DirectCopy(ours.fileno(), lambda fields: notices.append(fields.error_field(ord("M"))))
        for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
            sender = threading.Thread(target=server.sendall, args=(stream[begin:end],))
            sender.start()
            missing = end - begin
            while missing:
                missing -= copy.fill()
            sender.join()
            while (taken := copy.receive())[0] > 0:
                received.append(bytes(taken[1]))
        copy.close()
    assert received == [content for kind, content in sent if kind == b"d" and content]
    assert notices == [b"told"] * sum(kind == b"N" for kind, _ in sent)


Ends = tuple[DirectCopy, socket.socket, list[Fields]]


def test_what_ends_the_copy_stays_for_next_message(ends: Ends) -> None:
    copy, server, _ = ends
    server.sendall(copy_data(b"one") + message(b"c") + message(b"N", error_fields("NOTICE", "0", "n")) + message(b"Z", b"I"))
    copy.consume_input()
    assert [copy.receive() for _ in range(3)] == [(3, b"one"), (-1, b""), (-1, b"")]
    assert [copy.next_message() for _ in range(3)] == [Message(b"c", b""), Message(b"Z", b"I"), None]


def test_the_reason_comes_before_the_end_of_the_connection(ends: Ends) -> None:
    copy, server, _ = ends
    server.sendall(copy_data(b"one") + message(b"E", error_fields("FATAL", "57P01", "terminating")))
    server.close()
    copy.consume_input()
    assert [copy.receive()[0] for _ in range(2)] == [3, -1]
    error = copy.next_message()
    assert error is not None
    assert Fields(error.body).error_field(ord("C")) == b"57P01"
    with pytest.raises(LostError):
        copy.consume_input()
    assert copy.failure == "server closed the connection unexpectedly"


def test_a_message_that_is_cut_off_is_a_lost_connection(ends: Ends) -> None:
    copy, server, _ = ends
    server.sendall(copy_data(b"one")[:-1])
    server.close()
    copy.consume_input()
    assert copy.receive() == (0, b"")
    with pytest.raises(LostError):
        copy.consume_input()


@pytest.mark.parametrize("garbage", [b"x\0\0\0\4", b"d\0\0\0\3", b"d\x7f\xff\xff\xff", b"S\0\1\0\0", b"\0" * 9])
def test_garbage_is_never_skipped(ends: Ends, garbage: bytes) -> None:
    copy, server, _ = ends
    server.sendall(copy_data(b"one") + garbage + copy_data(b"two"))
    copy.consume_input()
    assert copy.receive()[0] == 3
    for take in (copy.receive, copy.next_message, copy.receive):
        with pytest.raises(ProtocolError, match="has no place in a stream"):
            take()


def test_the_buffer_grows_for_a_large_message_and_shrinks_again(ends: Ends) -> None:
    copy, server, _ = ends
    content = bytes(range(256)) * (3 * CAPACITY_BYTES // 256)
    sender = threading.Thread(target=server.sendall, args=(copy_data(content) + copy_data(b"two"),))
    sender.start()
    while not (taken := copy.receive())[0]:
        copy.fill()
    sender.join()
    assert taken == (len(content), content)
    assert len(copy.buffer) > CAPACITY_BYTES
    while not (taken := copy.receive())[0]:
        copy.fill()
    copy.fill()
    assert (taken[1], len(copy.buffer)) == (b"two", CAPACITY_BYTES)


def test_what_has_not_left_is_sent_before_the_next_message(ends: Ends) -> None:
    copy, server, _ = ends
    sent = b""
    while copy.send(b"s" * 1000):
        copy.flush()
        sent += copy_data(b"s" * 1000)
    received = b""
    while len(received) < len(sent):
        received += server.recv(1 << 20)
        copy.flush()
    assert received == sent
    assert copy.send(b"more")
    copy.end_copy()
    assert copy.flush()
    assert server.recv(1 << 20) == copy_data(b"more") + message(b"c")


def test_sending_on_a_lost_connection_leaves_the_reason_to_the_reader(ends: Ends) -> None:
    copy, server, _ = ends
    server.sendall(message(b"E", error_fields("FATAL", "57P01", "terminating")))
    server.close()
    assert copy.send(b"status")
    assert copy.flush()
    copy.consume_input()
    assert copy.receive()[0] == -1


def test_a_message_sent_in_part_ends_the_connection(ends: Ends) -> None:
    """libpq's own last message must not become a part of it."""
    copy, server, _ = ends
    while copy.send(b"s" * 1000) and copy.flush():
        pass
    copy.close()
    while server.recv(1 << 20):
        pass

"""A TCP proxy in front of a real server. It makes network faults on request, and can send messages that no real server sends.

    with FaultyProxy(cluster.port) as proxy:
        reached = proxy.at("START_REPLICATION", proxy.silence)  # when a client sends this command
        run(proxy.dsn(database.tcp_dsn))

Faults for all connections, also later ones: `silence` (nothing passes, nothing is closed), `reset` (RST), `throttle`, `delay`, and
`reset_at_random`. Any thread may call them at any time. A `Link` has the first two for its own connection. `at` calls a fault when
a client sends a message, `after` when a connection has carried so many bytes. ``alter`` changes single messages of a stream.

TLS passes unchanged. The proxy can't see the messages of an encrypted connection. There, only `CONNECT`, `TLS` and `after` work.
"""

from __future__ import annotations

import contextlib
import queue
import random
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Self

import psycopg.conninfo

__all__ = ["AUTHENTICATION", "CANCEL", "CONNECT", "END_OF_COPY", "PIECE_BYTES", "TLS", "FaultyProxy", "Link", "wal_data"]

Alter = Callable[[bytes], bytes | None]
"""Gets the payload of a CopyData message; returns what goes on in its place, or nothing to leave it out."""

CONNECT = "connect"
TLS = "TLS handshake"
AUTHENTICATION = "authentication"
CANCEL = "cancel"
END_OF_COPY = "end of copy"
"""Phases that are no command: the first message of a connection, the client's first TLS record, its password or other proof, a
request to cancel, and CopyDone."""

PIECE_BYTES = 16 << 10
"""The usual unit of `FaultyProxy.reset_at_random`. The size of a read would depend on timing."""

_HELD_BYTES = 256 << 10
_IN_FLIGHT_BYTES = 8 << 20
"""If one direction holds more than this, nothing more is read, as in a network. The second number is for a delay."""
_READ_BYTES = 64 << 10
_TICK_S = 0.005
"""How exactly a delay or a rate is kept."""

_LENGTH = struct.Struct(">I")
_CANCEL_REQUEST = 80877102
_ENCRYPTION_REQUESTS = (80877103, 80877104)
"""With TLS, and with GSSAPI. The server answers with one byte; then the client starts anew."""
_TLS_HANDSHAKE = 0x16
"""The first byte of a TLS record with a ClientHello. (That of a startup message is 0.)"""


def wal_data(alter: Callable[[bytes], bytes | None]) -> Alter:
    """Return a function for ``alter`` that changes the record inside of WALData, and leaves keepalives alone."""

    def on_copy_data(payload: bytes) -> bytes | None:
        if payload[:1] != b"w":
            return payload
        record = alter(payload[25:])
        return None if record is None else payload[:25] + record

    return on_copy_data


class Link:
    """One connection through the proxy. Only the proxy's thread may call its methods. It also calls the faults of `at`."""

    def __init__(self, client: socket.socket, server: socket.socket, take_command: Callable[[Link, str], None]) -> None:
        self.is_silent = False
        self.is_closed = False
        self.sockets = (client, server)
        self.carried_bytes = 0
        """How many bytes have gone to the client."""
        self.reset_at: float | None = None
        """After how many of these bytes the connection breaks; None while it has not carried a piece."""
        self._take_command = take_command
        self._has_started = False
        self._is_encrypted = False
        for each in self.sockets:
            each.setblocking(False)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.to_server = _Flow(client, server, self._split_commands)
        self.to_client = _Flow(server, client)

    @property
    def flows(self) -> tuple[_Flow, _Flow]:
        return self.to_server, self.to_client

    def silence(self) -> None:
        """Let nothing pass from now on, in either direction. Both ends still believe that they are connected."""
        self.is_silent = True

    def reset(self) -> None:
        """Break the connection on both sides, with RST."""
        for each in self.sockets:
            with contextlib.suppress(OSError):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def close(self) -> None:
        self.is_closed = True
        for each in self.sockets:
            each.close()

    def _split_commands(self, held: bytearray) -> Iterator[bytes]:
        """Yield whole messages. Before each one, call the fault that waits for it."""
        while held:
            if not self._has_started and held[0] == _TLS_HANDSHAKE:
                size, phase = len(held), TLS
                self._is_encrypted = self._has_started = True
            elif self._is_encrypted:
                size, phase = len(held), ""
            else:
                head = int(self._has_started)  # the startup message has no kind
                if len(held) < head + 4 or len(held) < (size := head + _LENGTH.unpack_from(held, head)[0]):
                    return
                phase = self._phase(bytes(held[:size]))
            if phase:
                self._take_command(self, phase)
            if self.is_silent or self.is_closed:
                return  # the message stays held
            message = bytes(held[:size])
            self._has_started = self._has_started or _LENGTH.unpack_from(message, 4)[0] not in _ENCRYPTION_REQUESTS
            del held[:size]
            yield message

    def _phase(self, message: bytes) -> str:
        if self._has_started:
            command = message[5:-1].decode("utf-8", "replace")
            return {b"Q": command, b"c": END_OF_COPY, b"p": AUTHENTICATION}.get(message[:1], "")
        return CANCEL if _LENGTH.unpack_from(message, 4)[0] == _CANCEL_REQUEST else CONNECT


class _Flow:
    """One direction of a connection: data from ``source`` waits here until it may go to ``target``."""

    def __init__(self, source: socket.socket, target: socket.socket, split: Callable[[bytearray], Iterator[bytes]] | None = None):
        self.source = source
        self.target = target
        self.split = split
        self._held = bytearray()
        """What is not split yet."""
        self._waiting: deque[tuple[float, bytes]] = deque()
        self._waiting_bytes = 0
        self._allowed_bytes = 0.0
        self._at = time.monotonic()
        self._has_ended = False
        self.is_done = False

    def is_reading(self, delay_s: float) -> bool:
        return not self._has_ended and self._waiting_bytes < (_IN_FLIGHT_BYTES if delay_s else _HELD_BYTES)

    def is_due(self, now: float) -> bool:
        return bool(self._waiting) and self._waiting[0][0] <= now

    @property
    def is_waiting(self) -> bool:
        return bool(self._waiting)

    def read(self, delay_s: float) -> None:
        data = self.source.recv(_READ_BYTES)
        self._has_ended = not data
        self._held += data
        self.release(delay_s)

    def release(self, delay_s: float = 0.0) -> None:
        """Queue the whole messages."""
        if self.split is None:
            pieces = [bytes(self._held)] if self._held else []
            self._held.clear()
        else:
            pieces = list(self.split(self._held))
        due_at = time.monotonic() + delay_s
        for piece in pieces:
            self._waiting.append((due_at, piece))
            self._waiting_bytes += len(piece)

    def write(self, bytes_per_s: float | None, most: float) -> int:
        """Send what is due, and not more than ``most`` bytes. Return how many bytes have been sent."""
        now = time.monotonic()
        if bytes_per_s is not None:
            self._allowed_bytes = min(self._allowed_bytes + (now - self._at) * bytes_per_s, max(1.0, bytes_per_s / 20))
        self._at = now
        total = 0
        while self._waiting and self._waiting[0][0] <= now:
            due_at, piece = self._waiting[0]
            allowed = int(min(len(piece), most - total, len(piece) if bytes_per_s is None else self._allowed_bytes))
            if not allowed:
                return total
            try:
                sent = self.target.send(piece[:allowed])
            except BlockingIOError:
                return total
            total += sent
            self._waiting_bytes -= sent
            if bytes_per_s is not None:
                self._allowed_bytes -= sent
            if sent == len(piece):
                self._waiting.popleft()
            else:
                self._waiting[0] = due_at, piece[sent:]
        if self._has_ended and not self._waiting and not self.is_done:
            self.is_done = True
            self.target.shutdown(socket.SHUT_WR)
        return total


class FaultyProxy:
    """Listens on ``port``. ``damaged`` has the positions of the messages that ``alter`` has changed.

    ``random_resets`` has the number of bytes that a connection had carried, for each connection that `reset_at_random` broke.
    One thread does all the work. When a call from another thread returns, the work is done.
    """

    def __init__(self, server_port: int, alter: Alter | None = None, *, server_host: str = "127.0.0.1") -> None:
        self._server = server_host, server_port
        self._alter = alter
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.damaged: list[int] = []
        self.random_resets: list[int] = []
        self._links: list[Link] = []
        self._faults: list[tuple[str, Callable[[Link], None], threading.Event]] = []
        self._byte_faults: list[tuple[int, Callable[[Link], None], threading.Event]] = []
        self._draw_bytes_to_reset: Callable[[], float] = lambda: float("inf")
        self._is_silent = False
        self._bytes_per_s: float | None = None
        self._delay_s = 0.0
        self._calls: queue.SimpleQueue[tuple[Callable[[], object], threading.Event]] = queue.SimpleQueue()
        self._wake_in, self._wake_out = socket.socketpair()
        self._is_closed = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def dsn(self, tcp_dsn: str, **parameters: str) -> str:
        """Return the server's connection string, changed to lead through this proxy.

        Nothing is encrypted, so the proxy can read it, unless libpq's ``parameters`` say otherwise.
        """
        plain = {"sslmode": "disable", "gssencmode": "disable"}
        return psycopg.conninfo.make_conninfo(tcp_dsn, port=self.port, **(plain | parameters))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._call(self._close)
        self._thread.join()
        for each in (self._wake_in, self._wake_out):
            each.close()

    # Faults

    def silence(self, _link: Link | None = None) -> None:
        """Let nothing pass any more. A new connection reaches the proxy, but not the server."""
        self._call(lambda: self._set_silent(is_silent=True))

    def resume(self) -> None:
        """End the silence, also of single connections. The data that was held back continues."""
        self._call(lambda: self._set_silent(is_silent=False))

    def reset(self, _link: Link | None = None) -> None:
        """Break all connections."""
        self._call(self._reset_all)

    def throttle(self, bytes_per_s: float | None) -> None:
        """Let only ``bytes_per_s`` pass in each direction of each connection; None means no limit."""
        self._call(lambda: setattr(self, "_bytes_per_s", bytes_per_s))

    def delay(self, seconds: float) -> None:
        """Hold back data that arrives from now on for this time."""
        self._call(lambda: setattr(self, "_delay_s", seconds))

    def at(self, phase: str, fault: Callable[[Link], None]) -> threading.Event:
        """Call ``fault`` once, when a client reaches ``phase``. Return an event that is set then.

        A phase is `CONNECT`, `CANCEL`, `END_OF_COPY`, or a text in a command (``SET``, ``IDENTIFY_SYSTEM``). The message that
        reaches the phase passes only if the fault allows it. A fault is ``proxy.silence``, ``Link.silence``, and so on.
        """
        reached = threading.Event()
        self._call(lambda: self._faults.append((phase, fault, reached)))
        return reached

    def after(self, size: int, fault: Callable[[Link], None]) -> threading.Event:
        """When a connection has carried ``size`` bytes to its client, call ``fault``, once; the event is set then."""
        reached = threading.Event()
        self._call(lambda: self._byte_faults.append((size, fault, reached)))
        return reached

    def reset_at_random(self, share: float, seed: int, piece_bytes: int = PIECE_BYTES) -> None:
        """Break connections while they carry data to the client: each piece of this size with the probability ``share``.

        This concerns connections that have not carried `PIECE_BYTES` yet. Before that, none breaks. The n-th connection that
        comes so far breaks at a byte that depends only on the seed. A share of 0 ends this.
        """
        rng = random.Random(seed)

        def draw() -> float:
            return int(piece_bytes * rng.expovariate(share)) if share else float("inf")

        self._call(lambda: setattr(self, "_draw_bytes_to_reset", draw))

    def _reset_all(self) -> None:
        for link in self._links:
            link.reset()

    def _set_silent(self, *, is_silent: bool) -> None:
        self._is_silent = is_silent
        for link in self._links:
            link.is_silent = is_silent

    # The thread

    def _call(self, action: Callable[[], object]) -> None:
        if threading.current_thread() is self._thread:
            action()
            return
        done = threading.Event()
        self._calls.put((action, done))
        self._wake_out.send(b"x")
        while not done.wait(1.0):
            if not self._thread.is_alive():
                raise RuntimeError("the proxy's thread has died")

    def _close(self) -> None:
        self._is_closed = True
        for link in self._links:
            link.close()
        self._listener.close()

    def _serve(self) -> None:
        while not self._is_closed:
            poll = select.poll()
            poll.register(self._wake_in, select.POLLIN)
            poll.register(self._listener, select.POLLIN)
            now = time.monotonic()
            timeout_ms = None
            events: dict[int, int] = {}
            for flow in self._flowing():
                if flow.is_reading(self._delay_s):
                    events[flow.source.fileno()] = events.get(flow.source.fileno(), 0) | select.POLLIN
                if flow.is_waiting and self._bytes_per_s is None and flow.is_due(now):
                    events[flow.target.fileno()] = events.get(flow.target.fileno(), 0) | select.POLLOUT
                elif flow.is_waiting:
                    timeout_ms = _TICK_S * 1000
            for fd, wanted in events.items():
                poll.register(fd, wanted)
            ready = dict(poll.poll(timeout_ms))
            if self._wake_in.fileno() in ready:
                self._wake_in.recv(4096)
                while not self._calls.empty():
                    action, done = self._calls.get()
                    action()
                    done.set()
            if self._listener.fileno() in ready:
                self._accept()
            for link in self._links:
                self._move(link, ready)
            self._links = [link for link in self._links if not link.is_closed]

    def _flowing(self) -> Iterator[_Flow]:
        for link in self._links:
            if not link.is_silent and not link.is_closed:
                yield from link.flows

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        try:
            server = socket.create_connection(self._server)
        except OSError:  # there is no server, so the client gets none
            client.close()
            return
        link = Link(client, server, self._take_command)
        link.is_silent = self._is_silent
        if self._alter is not None:
            link.to_client.split = self._split_answers
        self._links.append(link)

    def _move(self, link: Link, ready: dict[int, int]) -> None:
        try:
            for flow in link.flows:
                if link.is_silent or link.is_closed:
                    return
                if flow.is_reading(self._delay_s) and ready.get(flow.source.fileno(), 0) & ~select.POLLOUT:
                    flow.read(self._delay_s)
                else:
                    flow.release(self._delay_s)  # data that was held during the silence
            if link.is_silent or link.is_closed:
                return
            link.to_server.write(self._bytes_per_s, float("inf"))
            if link.reset_at is None and link.carried_bytes >= PIECE_BYTES:
                link.reset_at = link.carried_bytes + self._draw_bytes_to_reset()
            limits = [size for size, _, _ in self._byte_faults if size > link.carried_bytes]
            limit = min([PIECE_BYTES if link.reset_at is None else link.reset_at, *limits])
            link.carried_bytes += link.to_client.write(self._bytes_per_s, limit - link.carried_bytes)
            self._take_bytes(link)
        except BlockingIOError:
            return
        except OSError:
            link.close()
            return
        if all(flow.is_done for flow in link.flows):
            link.close()

    def _take_command(self, link: Link, phase: str) -> None:
        for fault in self._faults:
            wanted, act, reached = fault
            if wanted in phase:
                self._faults.remove(fault)
                act(link)
                reached.set()
                return

    def _take_bytes(self, link: Link) -> None:
        if link.reset_at is not None and link.carried_bytes >= link.reset_at:
            self.random_resets.append(link.carried_bytes)
            link.reset()
            return
        for fault in self._byte_faults:
            size, act, reached = fault
            if link.carried_bytes >= size:
                self._byte_faults.remove(fault)
                act(link)
                reached.set()
                return

    def _split_answers(self, held: bytearray) -> Iterator[bytes]:
        """Yield whole messages of a server, changed by ``alter``."""
        while len(held) >= 5 and len(held) > (size := _LENGTH.unpack_from(held, 1)[0]):
            kind, payload = bytes(held[:1]), bytes(held[5 : size + 1])
            del held[: size + 1]
            if kind == b"d":
                assert self._alter is not None
                altered = self._alter(payload)
                if altered != payload:
                    self.damaged.append(int.from_bytes(payload[1:9], "big"))
                if altered is None:
                    continue
                payload = altered
            yield kind + _LENGTH.pack(len(payload) + 4) + payload

"""A TCP proxy before a real server that alters single messages of a stream: what a server never sends, on an otherwise true one."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from typing import Self

import psycopg.conninfo

__all__ = ["FaultyProxy", "wal_data"]

Alter = Callable[[bytes], bytes | None]
"""Gets the payload of a CopyData message; returns what goes on in its place, or nothing to leave it out."""

_LENGTH = struct.Struct(">I")


def wal_data(alter: Callable[[bytes], bytes | None]) -> Alter:
    """Return what alters the record inside of WALData, and leaves keepalives alone."""

    def on_copy_data(payload: bytes) -> bytes | None:
        if payload[:1] != b"w":
            return payload
        record = alter(payload[25:])
        return None if record is None else payload[:25] + record

    return on_copy_data


class FaultyProxy:
    """Listens on ``port``; ``damaged`` are the positions of the messages that were altered."""

    def __init__(self, server_port: int, alter: Alter) -> None:
        self._server_port = server_port
        self._alter = alter
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.damaged: list[int] = []
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def dsn(self, tcp_dsn: str) -> str:
        """Return the connection string of the server, by way of this proxy; nothing is encrypted, or it could not be read."""
        return psycopg.conninfo.make_conninfo(tcp_dsn, port=self.port, sslmode="disable", gssencmode="disable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for each in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._server_port))
                self._sockets += [client, server]
                for each in (client, server):
                    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._to_server, args=(client, server), daemon=True).start()
                threading.Thread(target=self._to_client, args=(server, client), daemon=True).start()

    def _to_server(self, client: socket.socket, server: socket.socket) -> None:
        with _end_of(server), client.makefile("rb") as stream:
            head = stream.read(4)  # the startup message has no kind
            server.sendall(head + stream.read(_LENGTH.unpack(head)[0] - 4))
            while message := _read_message(stream):
                server.sendall(_build_message(*message))

    def _to_client(self, server: socket.socket, client: socket.socket) -> None:
        with _end_of(client), server.makefile("rb") as stream:
            while message := _read_message(stream):
                kind, payload = message
                if kind == b"d":
                    altered = self._alter(payload)
                    if altered != payload:
                        self.damaged.append(int.from_bytes(payload[1:9], "big"))
                    if altered is None:
                        continue
                    payload = altered
                client.sendall(_build_message(kind, payload))


@contextlib.contextmanager
def _end_of(other: socket.socket):
    """Hang up on the other side, too, when one side has ended."""
    with contextlib.suppress(OSError, struct.error):
        yield
    with contextlib.suppress(OSError):
        other.shutdown(socket.SHUT_WR)


def _read_message(stream) -> tuple[bytes, bytes] | None:
    head = stream.read(5)
    if len(head) < 5:
        return None
    return head[:1], stream.read(_LENGTH.unpack_from(head, 1)[0] - 4)


def _build_message(kind: bytes, payload: bytes) -> bytes:
    return kind + _LENGTH.pack(len(payload) + 4) + payload

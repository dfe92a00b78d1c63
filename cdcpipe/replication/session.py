"""Opens sessions with the settings that this program needs. Errors before a stream starts become INIT_FAILED."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from cdcpipe.errors import (
    ConnectionClosedError,
    ConnectionParameterError,
    InitError,
    InvalidArgumentsError,
    ServerError,
    SharedSessionError,
)
from cdcpipe.libpq.connection import Connection
from cdcpipe.libpq.waiting import NO_LIMIT
from cdcpipe.libpq.walsender import Walsender
from cdcpipe.sql import LOGIN_ROLE, NO_SEARCH_PATH, SESSION_SETTINGS, patient

__all__ = ["connect", "connect_walsender", "connected", "connected_walsender", "initialising"]

_C = TypeVar("_C", bound=Connection)


@contextmanager
def initialising() -> Iterator[None]:
    """Turn errors into INIT_FAILED: errors of the server, a lost connection, and arguments that don't fit the server.

    INVALID_ARGS is for arguments that are wrong for every server. Those are found before a connection is opened, or by libpq when
    it reads its parameters (ConnectionParameterError).
    """
    try:
        yield
    except ConnectionParameterError:
        raise
    except (ServerError, ConnectionClosedError, InvalidArgumentsError) as ex:
        raise InitError(ex.message, hint=ex.hint) from ex


def connect(
    parameters: Mapping[str, str], *, within_s: float = NO_LIMIT, while_waiting: Callable[[], None] | None = None
) -> Connection:
    """Open a connection for SQL as `Connection` does.

    Pin the settings that decide how values look as text and whose functions are found, and lift the time limits.
    """
    with initialising():
        return _pinned(partial(Connection, parameters, within_s=within_s, while_waiting=while_waiting), NO_SEARCH_PATH)


def connect_walsender(
    parameters: Mapping[str, str],
    settings: Mapping[str, str] | None = None,
    *,
    while_waiting: Callable[[], None] | None = None,
) -> Walsender:
    """Open a walsender's connection, with the settings of `connect` except the search path, `LOGIN_ROLE`, and more ``settings``.

    A walsender runs no SQL. Its search path decides whether names in values (regclass, ...) have a schema.
    """
    with initialising():
        return _pinned(partial(Walsender, parameters, while_waiting=while_waiting), {**LOGIN_ROLE, **(settings or {})})


def _pinned(connection: Callable[..., _C], settings: Mapping[str, str]) -> _C:
    """Return the connection with ``settings``. If its session may be a pooler's, connect again with a mark, and look for it."""
    try:
        return _pin(connection(), settings)
    except SharedSessionError:
        return _pin(connection(mark=os.urandom(8).hex()), settings)


def _pin(connection: _C, settings: Mapping[str, str]) -> _C:
    try:
        connection.pin_session({**SESSION_SETTINGS, **patient(connection.server_version), **settings})
    except BaseException:
        connection.close()
        raise
    return connection


@contextmanager
def connected(parameters: Mapping[str, str], *, within_s: float = NO_LIMIT) -> Iterator[Connection]:
    """Open a connection as `connect` does, and close it at the end."""
    connection = connect(parameters, within_s=within_s)
    try:
        yield connection
    finally:
        connection.close()


@contextmanager
def connected_walsender(parameters: Mapping[str, str]) -> Iterator[Walsender]:
    """Open a walsender's connection, and close it at the end."""
    walsender = connect_walsender(parameters)
    try:
        yield walsender
    finally:
        walsender.close()

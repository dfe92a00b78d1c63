"""The ten exit codes of the pipe's protocol. They are the same as pg_logical_cdc's."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["ExitCode"]


class ExitCode(IntEnum):
    """How ``cdcpipe`` ended."""

    SUCCESS = 0
    """A stream ended after ``q``, the end position, SIGINT or SIGTERM. In poll mode: the slot is free."""
    INVALID_ARGS = 1
    """The command line, or a connection parameter, is wrong whatever the server is; nothing was connected."""
    INIT_FAILED = 2
    """Connecting to the server, identifying it or preparing the stream failed."""
    PG_CLOSED = 3
    """The server ended the stream, or the connection was lost."""
    CMD_CLOSED = 4
    """stdin reached its end."""
    PG_ERROR = 5
    """The server reported an error during the stream, or broke the protocol."""
    CMD_ERROR = 6
    """A command on stdin could not be parsed."""
    SYSTEM_ERROR = 7
    """stdout was closed or failed, or something unexpected happened."""
    SLOT_NOT_EXIST = 8
    """The replication slot does not exist."""
    SLOT_IN_USE = 9
    """The replication slot is used by another connection."""

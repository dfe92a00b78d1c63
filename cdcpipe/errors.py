"""One small tree of errors; each leaf knows its exit code, and each error can say what to do next.

    CdcpipeError                 7  SYSTEM_ERROR
    ├── InvalidArgumentsError    1  INVALID_ARGS
    ├── InitError                2  INIT_FAILED
    │   └── RewoundServerError                     the server's WAL ends before what was taken of it
    ├── ConnectionClosedError    3  PG_CLOSED
    ├── CommandClosedError       4  CMD_CLOSED
    ├── ServerError              5  PG_ERROR       carries the SQLSTATE
    ├── ProtocolError            5  PG_ERROR       malformed bytes, whatever they are
    ├── CommandError             6  CMD_ERROR
    ├── OutputError              7  SYSTEM_ERROR
    ├── SlotDoesNotExistError    8  SLOT_NOT_EXIST
    └── SlotInUseError           9  SLOT_IN_USE

Messages hold names, types, lengths and LSNs; never a row's value, never a password.
"""

from __future__ import annotations

from typing import ClassVar

from cdcpipe.lsn import format_lsn
from cdcpipe.pipe.exitcode import ExitCode

__all__ = [
    "CdcpipeError",
    "CommandClosedError",
    "CommandError",
    "ConnectionClosedError",
    "InitError",
    "InvalidArgumentsError",
    "OutputError",
    "ProtocolError",
    "RewoundServerError",
    "ServerError",
    "SlotDoesNotExistError",
    "SlotInUseError",
]


class CdcpipeError(Exception):
    """The base: ``message`` says what is wrong, ``hint`` what to do next (a sentence, or None)."""

    exit_code: ClassVar[ExitCode] = ExitCode.SYSTEM_ERROR

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class InvalidArgumentsError(CdcpipeError):
    """The command line or a configuration is wrong; nothing was connected to."""

    exit_code = ExitCode.INVALID_ARGS


class InitError(CdcpipeError):
    """Connecting, identifying or preparing the stream failed."""

    exit_code = ExitCode.INIT_FAILED


class RewoundServerError(InitError):
    """The server's WAL ends before a position that was taken of it: the server was restored from an older copy, or is another one.

    It writes positions that were used before, with other changes. Once it has passed the position nobody can tell any more,
    so a program that restarts by itself must not try again. Every message begins with ``BEGINNING``, by which it is known.
    """

    BEGINNING: ClassVar[str] = "the server has gone back: "


class ConnectionClosedError(CdcpipeError):
    """The server ended the stream, or the connection was lost."""

    exit_code = ExitCode.PG_CLOSED


class CommandClosedError(CdcpipeError):
    """The pipe on which commands come reached its end."""

    exit_code = ExitCode.CMD_CLOSED


class ServerError(CdcpipeError):
    """The server reported an error; ``sqlstate`` is its five-character code, or None."""

    exit_code = ExitCode.PG_ERROR

    def __init__(self, message: str, *, sqlstate: str | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.sqlstate = sqlstate


class ProtocolError(CdcpipeError):
    """Bytes that the protocol does not allow; raised for any malformed input, never skipped.

    Whoever found them knows what is wrong, whoever read them knows where they came from: ``locate`` brings the two together.
    """

    exit_code = ExitCode.PG_ERROR

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.lsn = 0
        """The position in the record's header, once it is known."""

    def locate(self, lsn: int) -> None:
        """Name the record's position; what is called first, closest to the record, counts."""
        if lsn and not self.lsn:
            self.lsn = lsn
            self.message = f"{self.message} (record at {format_lsn(lsn)})"
            self.args = (self.message,)


class CommandError(CdcpipeError):
    """A command on stdin could not be parsed."""

    exit_code = ExitCode.CMD_ERROR


class OutputError(CdcpipeError):
    """Records could not be written: stdout is closed, or the disk behind it is full."""

    exit_code = ExitCode.SYSTEM_ERROR


class SlotDoesNotExistError(CdcpipeError):
    """The replication slot does not exist."""

    exit_code = ExitCode.SLOT_NOT_EXIST


class SlotInUseError(CdcpipeError):
    """The replication slot is used by another connection."""

    exit_code = ExitCode.SLOT_IN_USE

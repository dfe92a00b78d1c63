"""The tree of errors. Each class has its exit code, and each error can say what to do next.

    CdcpipeError                 7  SYSTEM_ERROR
    ├── InvalidArgumentsError    1  INVALID_ARGS
    │   └── ConnectionParameterError               libpq refuses the value of a connection parameter, for every server
    ├── InitError                2  INIT_FAILED
    │   ├── UnreachableError                       no connection could be made; trying again may help
    │   ├── OtherServerError                       the server is not one of those that the consumer expects
    │   ├── RewoundServerError                     the server's WAL ends before a position that was streamed from it
    │   ├── ExcludedColumnError                    a column is published that is to stay on the server
    │   ├── UnpublishedTableError                  a table that is to be read is not published
    │   ├── LostSlotError                          the server has removed what the slot needs, and will never stream from it again
    │   └── GapError                               the slot is beyond the position up to which the consumer has the changes
    ├── ConnectionClosedError    3  PG_CLOSED
    ├── CommandClosedError       4  CMD_CLOSED
    ├── ServerError              5  PG_ERROR       carries the SQLSTATE
    ├── ProtocolError            5  PG_ERROR       malformed bytes
    ├── CommandError             6  CMD_ERROR
    ├── OutputError              7  SYSTEM_ERROR
    ├── SlotDoesNotExistError    8  SLOT_NOT_EXIST
    └── SlotInUseError           9  SLOT_IN_USE

Messages contain names, types, lengths and LSNs. They never contain a value of a row or a password.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from cdcpipe.lsn import format_lsn
from cdcpipe.pipe.exitcode import ExitCode

__all__ = [
    "CdcpipeError",
    "CommandClosedError",
    "CommandError",
    "ConnectionClosedError",
    "ConnectionParameterError",
    "ExcludedColumnError",
    "GapError",
    "InitError",
    "InvalidArgumentsError",
    "LostSlotError",
    "OtherServerError",
    "OutputError",
    "ProtocolError",
    "RewoundServerError",
    "ServerError",
    "SharedSessionError",
    "SlotDoesNotExistError",
    "SlotInUseError",
    "UnpublishedTableError",
    "UnreachableError",
    "beside_the_stream",
]


class CdcpipeError(Exception):
    """The base class. ``message`` says what is wrong, ``hint`` what to do next (a sentence, or None)."""

    exit_code: ClassVar[ExitCode] = ExitCode.SYSTEM_ERROR

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.is_beside_stream = False
        """Whether another connection than the stream's has failed. Then the server can still take the stream's last feedback."""


@contextmanager
def beside_the_stream() -> Iterator[None]:
    """Mark the errors of a connection that is not the stream's."""
    try:
        yield
    except CdcpipeError as ex:
        ex.is_beside_stream = True
        raise


class InvalidArgumentsError(CdcpipeError):
    """The command line or a configuration is wrong. No connection was made."""

    exit_code = ExitCode.INVALID_ARGS


class ConnectionParameterError(InvalidArgumentsError):
    """libpq refuses the value of a connection parameter, whatever the server is. Trying again does not help.

    The value may come from the environment or a service file, so only the attempt to connect finds the mistake.
    """


class InitError(CdcpipeError):
    """Connecting to the server, identifying it or preparing the stream failed."""

    exit_code = ExitCode.INIT_FAILED


class RewoundServerError(InitError):
    """The server's WAL ends before a position that was streamed from it.

    The server was restored from an older copy, or it is another server. It will use the old positions again, for other changes.
    Once its WAL has passed the position, this can't be detected any more. So a program that restarts a stream must not try again.
    Every message begins with ``BEGINNING``, so that the launcher recognizes it.
    """

    BEGINNING: ClassVar[str] = "the server has gone back: "


class OtherServerError(InitError):
    """The server is not one of those that the consumer expects. Every message is ``BEGINNING`` and the server's system identifier.

    Trying again does not help. The launcher recognizes the message, and names the log with which this server does not go.
    """

    BEGINNING: ClassVar[str] = "this is another server, with the system identifier "


class GapError(InitError):
    """The slot is beyond the position up to which the consumer has the changes, so the server will not send the changes in between.

    Trying again does not help. Every message begins with ``BEGINNING``, so that a parent process recognizes it.
    """

    BEGINNING: ClassVar[str] = "changes are missing: "


class ExcludedColumnError(InitError):
    """A publication has a column that ``--exclude-column`` names. Trying again does not help."""


class LostSlotError(InitError):
    """The server has invalidated the slot, and will never stream from it again.

    Trying again does not help. Every message begins with ``BEGINNING``, so that a parent process recognizes it.
    """

    BEGINNING: ClassVar[str] = "changes are missing for good: "


class UnpublishedTableError(InitError):
    """A table that is to be read is not published. Every message begins with ``BEGINNING``, for a parent process."""

    BEGINNING: ClassVar[str] = "not published: "


class UnreachableError(InitError):
    """No connection to a server could be made. Trying again may help. Every message begins with ``BEGINNING``."""

    BEGINNING: ClassVar[str] = "no connection to the server: "


class SharedSessionError(InitError):
    """The server's session belongs to a connection pooler, which gives it to other clients, too."""


class ConnectionClosedError(CdcpipeError):
    """The server ended the stream, or the connection was lost."""

    exit_code = ExitCode.PG_CLOSED


class CommandClosedError(CdcpipeError):
    """The pipe with the commands (stdin) reached its end."""

    exit_code = ExitCode.CMD_CLOSED


class ServerError(CdcpipeError):
    """The server reported an error. ``sqlstate`` is its five-character code, or None.

    The message contains ``NO_PUBLICATION`` if the server can't send a change because a publication did not exist when it was made,
    and ``UNSENDABLE`` if it can't send a change because of a value in it. Trying again does not help. It contains ``SHORTAGE`` if
    the server lacks something that has nothing to do with the data, such as room on its disk. This may pass.
    """

    NO_PUBLICATION: ClassVar[str] = "the next change was made while no publication had this name"
    UNSENDABLE: ClassVar[str] = "the server cannot send the next transaction"

    SHORTAGE: ClassVar[str] = "the server lacks room, memory or another resource: "

    LOOK: ClassVar[str] = (
        "in one psql session: SELECT pg_copy_logical_replication_slot('SLOT', 'look', true, 'test_decoding');"
        " SELECT * FROM pg_logical_slot_peek_changes('look', NULL, NULL)"
    )
    """For hints: how to read the changes that the stream can't have. The slot ends with the session, so it keeps no WAL later."""

    exit_code = ExitCode.PG_ERROR

    def __init__(self, message: str, *, sqlstate: str | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.sqlstate = sqlstate


class ProtocolError(CdcpipeError):
    """The protocol does not allow these bytes. It is raised for any malformed input; nothing is skipped.

    The code that raises it knows the problem. The code that has read the record knows its position, and adds it with ``locate``.
    """

    exit_code = ExitCode.PG_ERROR

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.lsn = 0
        """The LSN in the record's header; 0 until ``locate``."""

    def locate(self, lsn: int) -> None:
        """Add the record's position to the message. Only the first call counts, because it is closest to the record."""
        if lsn and not self.lsn:
            self.lsn = lsn
            self.message = f"{self.message} (record at {format_lsn(lsn)})"
            self.args = (self.message,)


class CommandError(CdcpipeError):
    """A command on stdin could not be parsed."""

    exit_code = ExitCode.CMD_ERROR


class OutputError(CdcpipeError):
    """Records could not be written: stdout is closed, or the disk is full."""

    exit_code = ExitCode.SYSTEM_ERROR


class SlotDoesNotExistError(CdcpipeError):
    """The replication slot does not exist."""

    exit_code = ExitCode.SLOT_NOT_EXIST


class SlotInUseError(CdcpipeError):
    """The replication slot is used by another connection."""

    exit_code = ExitCode.SLOT_IN_USE

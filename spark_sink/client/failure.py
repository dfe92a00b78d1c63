"""How a ``cdcpipe`` process ended, and the error that its caller raises for this."""

from __future__ import annotations

from dataclasses import dataclass

from cdcpipe.errors import (
    CdcpipeError,
    ConnectionClosedError,
    GapError,
    InitError,
    InvalidArgumentsError,
    LostSlotError,
    OtherServerError,
    RewoundServerError,
    ServerError,
    SlotDoesNotExistError,
    SlotInUseError,
    UnpublishedTableError,
    UnreachableError,
)
from cdcpipe.pipe.exitcode import ExitCode
from spark_sink.client.own_words import in_own_words

__all__ = ["Failure", "error_of"]


@dataclass(frozen=True, slots=True)
class Failure:
    """How a ``cdcpipe`` process ended: its exit code (negative for a signal), and its last words on stderr.

    Message and hint name no option that the commands of ``cdcpipe-spark`` do not have (client/own_words.py).
    """

    code: int
    message: str
    hint: str | None = None

    def __post_init__(self) -> None:
        message, hint = in_own_words(self.message, self.hint)
        object.__setattr__(self, "message", message)
        object.__setattr__(self, "hint", hint)

    @property
    def is_rewound(self) -> bool:
        """Whether the server's WAL ended before the staging log (`RewoundServerError`).

        The launcher has to record this at once: once the server's WAL has passed the end of the log, it does not show any more.
        """
        return self.code == ExitCode.INIT_FAILED and self.message.startswith(RewoundServerError.BEGINNING)

    @property
    def other_system_id(self) -> str | None:
        """The system identifier of a server that is not the expected one (`OtherServerError`), else None."""
        is_other = self.code == ExitCode.INIT_FAILED and self.message.startswith(OtherServerError.BEGINNING)
        return self.message.removeprefix(OtherServerError.BEGINNING) if is_other else None

    @property
    def is_gap(self) -> bool:
        """Whether the slot was beyond the account of the staging log (`GapError`). Then the slot has to be looked at anew."""
        return self.code == ExitCode.INIT_FAILED and self.message.startswith(GapError.BEGINNING)

    @property
    def is_lost_slot(self) -> bool:
        """Whether the server has invalidated the slot (`LostSlotError`). Trying again does not help."""
        return self.code == ExitCode.INIT_FAILED and self.message.startswith(LostSlotError.BEGINNING)

    @property
    def is_unreachable(self) -> bool:
        """Whether there was no connection to a server (`UnreachableError`). A promotion or a restart takes its time."""
        return self.code == ExitCode.INIT_FAILED and self.message.startswith(UnreachableError.BEGINNING)

    @property
    def is_unpublished(self) -> bool:
        """Whether a table to copy is not published (`UnpublishedTableError`)."""
        return self.code == ExitCode.INIT_FAILED and self.message.startswith(UnpublishedTableError.BEGINNING)

    @property
    def is_shortage(self) -> bool:
        """Whether the server lacked something that has nothing to do with the data (`ServerError.SHORTAGE`), such as room."""
        return self.code in (ExitCode.PG_ERROR, ExitCode.INIT_FAILED) and ServerError.SHORTAGE in self.message


_ERRORS: dict[int, type[CdcpipeError]] = {
    error.exit_code: error
    for error in (InvalidArgumentsError, InitError, ConnectionClosedError, ServerError, SlotDoesNotExistError, SlotInUseError)
}


def error_of(failure: Failure) -> CdcpipeError:
    """Return the error to raise for ``failure``. It has the exit code of the ``cdcpipe`` process, or 7 if that code is unknown.

    A table that is not published is a wrong option of the user's command, which has the exit code 1.
    """
    said = failure.message or "it said nothing"
    for is_kind, kind in (
        (failure.is_rewound, RewoundServerError),
        (failure.is_gap, GapError),
        (failure.is_lost_slot, LostSlotError),
        (failure.is_unreachable, UnreachableError),
        (failure.is_unpublished, InvalidArgumentsError),  # the option --table named it
    ):
        if is_kind:
            return kind(said, hint=failure.hint)
    advice = failure.hint or "start again; nothing is lost. If it happens again, please report it"
    if failure.code == ExitCode.SYSTEM_ERROR and failure.message:
        return CdcpipeError(failure.message, hint=advice)
    error = _ERRORS.get(failure.code)
    if error is not None:
        return error(said, hint=failure.hint)
    try:
        name = ExitCode(failure.code).name
    except ValueError:
        name = "no exit code of its own"
    return CdcpipeError(f"cdcpipe ended with {failure.code} ({name}), which is unexpected: {said}", hint=advice)

"""Handles the server's messages other than records: warnings, and the end of the stream."""

from __future__ import annotations

import logging
from typing import NoReturn

from cdcpipe import sqlstate
from cdcpipe.errors import ConnectionClosedError, ServerError
from cdcpipe.libpq.walsender import Walsender
from cdcpipe.lsn import format_lsn
from cdcpipe.sqlstate import NOT_IN_PREREQUISITE_STATE, SERIALIZATION_FAILURE, UNDEFINED_OBJECT

__all__ = ["END_STEP_S", "check_notices", "raise_end"]

log = logging.getLogger(__name__)

_STANDBYS = "synchronized_standby_slots"

END_STEP_S = 3.0
"""How long the server has for each step of a stream's end: take the last status update, end the copy, report how it ended."""


def check_notices(walsender: Walsender) -> None:
    """Log the server's notices. Raise ServerError for the warning that means that the server skips changes.

    The server looks for the publication in the catalog as of each change. If the publication is missing there, a server of version
    18 or later only warns, and goes on without the change.

    Another warning with the same SQLSTATE is logged: changes wait for the standbys of ``synchronized_standby_slots``. Only the name
    of this setting tells the two apart, because the server translates its messages.
    """
    for notice in walsender.notices:
        if _STANDBYS in notice.message:
            if notice.message not in walsender.told_notices:
                walsender.told_notices.add(notice.message)
                log.warning("changes wait for a standby: %s", notice.message)
            continue
        if notice.severity == "WARNING" and notice.sqlstate == NOT_IN_PREREQUISITE_STATE:
            raise _publication_gap(f"the server skips changes: {notice.message}", notice.sqlstate)
        log.info("%s from the server: %s", notice.severity.lower(), notice.message)
    walsender.notices.clear()


def raise_end(walsender: Walsender, commit_lsn: int) -> NoReturn:
    """Raise the error with which the server ended the stream. If the server reported none, raise ConnectionClosedError.

    ``commit_lsn`` is where the open transaction commits; 0: not known.
    """
    check_notices(walsender)
    try:
        walsender.copy_result(END_STEP_S)
    except ServerError as ex:
        if ex.sqlstate == UNDEFINED_OBJECT:
            raise _publication_gap(ex.message, ex.sqlstate) from ex
        if ex.sqlstate == SERIALIZATION_FAILURE:  # a standby ends what conflicts with the WAL that it replays
            hint = "the standby may have had to give up the slot: start again, and the message says whether it is lost, and why"
            raise ServerError(ex.message, sqlstate=ex.sqlstate, hint=ex.hint or hint) from ex
        cause, help_first = _unsendable_value(ex)
        if cause:
            raise _unsendable(ex, cause, help_first, commit_lsn) from ex
        raise
    raise ConnectionClosedError("the server has ended the stream", hint="it is shutting down, or was told to; connect again later")


def _unsendable_value(error: ServerError) -> tuple[str, str]:
    """Return which value of a change the server cannot send, and what may help. Empty: the error has another cause.

    The server does not translate the message about the memory, and gives it no SQLSTATE of its own.
    """
    if error.sqlstate in (sqlstate.CHARACTER_NOT_IN_REPERTOIRE, sqlstate.UNTRANSLATABLE_CHARACTER):
        return "a text in it cannot be converted to UTF-8", ""
    is_too_long = error.sqlstate == sqlstate.INTERNAL_ERROR and "invalid memory alloc request size" in error.message
    if is_too_long or error.sqlstate == sqlstate.PROGRAM_LIMIT_EXCEEDED:
        return "a row in it is longer than the 1 GB that the server can send", "try --binary, with which a bytea takes half; "
    if error.sqlstate and sqlstate.withheld(error.sqlstate):
        return "the server can do nothing with a value in it, perhaps in a row filter", ""
    return "", ""


def _unsendable(error: ServerError, cause: str, help_first: str, commit_lsn: int) -> ServerError:
    """Return the error for a transaction with a value that the server can't send, however often it tries.

    A stream that starts behind the commit's first byte leaves out this transaction, and none that commits later.
    """
    where = f", which commits at {format_lsn(commit_lsn)}," if commit_lsn else ""
    start = f"--startpos {format_lsn(commit_lsn + 1)}" if commit_lsn else "a --startpos behind its commit"
    return ServerError(
        f"{error.message}: {ServerError.UNSENDABLE}{where} because {cause}",
        sqlstate=error.sqlstate,
        hint=f"{help_first}nothing is lost meanwhile: the slot keeps the transaction. To go on without it, change the row in the"
        f" table, start with {start}, and copy the tables that it changed anew. With"
        " --whole-transactions on a two-phase slot, move the slot behind the commit instead (pg_replication_slot_advance)",
    )


def _publication_gap(message: str, sqlstate: str) -> ServerError:
    """Return the error for changes that were made while a publication did not exist, with the server's message.

    Servers up to 17 report this as an error, later ones as a warning. The server looks for the publication in the catalog as of
    the change, so creating it now does not help.
    """
    return ServerError(
        f"{message}: {ServerError.NO_PUBLICATION}, because it was dropped, renamed, or made later",
        sqlstate=sqlstate,
        hint="if a publication of another name held the tables then, nothing is lost: go on from the last transaction's end"
        " (--startpos) with --publication THAT_NAME until this error comes again, then with this name (where there is none of that"
        " name now, make an empty one). Otherwise pg_replication_slot_advance() past these changes loses them: then copy the tables"
        f" anew. To read them first, {ServerError.LOOK}",
    )

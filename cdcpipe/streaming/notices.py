"""Handles the server's messages other than records: warnings, and the end of the stream."""

from __future__ import annotations

import logging
from typing import NoReturn

from cdcpipe.errors import ConnectionClosedError, ServerError
from cdcpipe.libpq.walsender import Walsender
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


def raise_end(walsender: Walsender) -> NoReturn:
    """Raise the error with which the server ended the stream. If the server reported none, raise ConnectionClosedError."""
    check_notices(walsender)
    try:
        walsender.copy_result(END_STEP_S)
    except ServerError as ex:
        if ex.sqlstate == UNDEFINED_OBJECT:
            raise _publication_gap(ex.message, ex.sqlstate) from ex
        if ex.sqlstate == SERIALIZATION_FAILURE:  # a standby ends what conflicts with the WAL that it replays
            hint = "the standby may have had to give up the slot: start again, and the message says whether it is lost, and why"
            raise ServerError(ex.message, sqlstate=ex.sqlstate, hint=ex.hint or hint) from ex
        raise
    raise ConnectionClosedError("the server has ended the stream", hint="it is shutting down, or was told to; connect again later")


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
        " name now, make an empty one). Otherwise read these changes beside the stream: pg_copy_logical_replication_slot(SLOT,"
        " 'gap', false, 'test_decoding'), pg_logical_slot_peek_changes('gap', NULL, NULL). pg_replication_slot_advance() past them"
        " loses them: then copy the tables anew",
    )

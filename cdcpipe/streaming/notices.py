"""Handles what the server sends beside records: its warnings, and the end of the stream."""

from __future__ import annotations

import logging
from typing import NoReturn

from cdcpipe.errors import ConnectionClosedError, ServerError
from cdcpipe.libpq.walsender import Walsender
from cdcpipe.sqlstate import NOT_IN_PREREQUISITE_STATE, UNDEFINED_OBJECT

__all__ = ["END_STEP_S", "check_notices", "raise_end"]

log = logging.getLogger(__name__)

END_STEP_S = 3.0
"""How long the server has for each step of a stream's end: to take the last status update, to end the copy, to say how it ended."""


def check_notices(walsender: Walsender) -> None:
    """Log the server's notices; raise ServerError for the one with which it skips changes.

    From version 18 on a server only warns, and goes on, where its catalog, as it was at the next change, lacks a publication.
    """
    for notice in walsender.notices:
        if notice.severity == "WARNING" and notice.sqlstate == NOT_IN_PREREQUISITE_STATE:
            raise _publication_gap(f"the server skips changes: {notice.message}", notice.sqlstate)
        log.info("%s from the server: %s", notice.severity.lower(), notice.message)
    walsender.notices.clear()


def raise_end(walsender: Walsender) -> NoReturn:
    """Raise the error with which the server has ended the stream; ConnectionClosedError if it ended it in order."""
    check_notices(walsender)
    try:
        walsender.copy_result(END_STEP_S)
    except ServerError as ex:
        if ex.sqlstate == UNDEFINED_OBJECT:
            raise _publication_gap(ex.message, ex.sqlstate) from ex
        raise
    raise ConnectionClosedError("the server has ended the stream", hint="it is shutting down, or was told to; connect again later")


def _publication_gap(message: str, sqlstate: str) -> ServerError:
    """Return the error for changes that were made while a publication did not exist, as the server, up to 17 or later, tells it.

    The server looks for the publication in the catalog as it was then, so making it now does not help.
    """
    return ServerError(
        f"{message}: the next change was made while no publication had this name, because it was dropped, renamed, or made later",
        sqlstate=sqlstate,
        hint="if a publication of another name held the tables then, nothing is lost: go on from the last transaction's end"
        " (--startpos) with --publication THAT_NAME until this error comes again, then with this name (where there is none of that"
        " name now, make an empty one). Otherwise read these changes beside the stream: pg_copy_logical_replication_slot(SLOT,"
        " 'gap', false, 'test_decoding'), pg_logical_slot_peek_changes('gap', NULL, NULL). pg_replication_slot_advance() past them"
        " loses them: then copy the tables anew",
    )

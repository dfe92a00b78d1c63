"""Slots of which a primary's standbys keep a copy, so that the slot survives the promotion of a standby (PostgreSQL 17 or newer).

Source: the manual, "Logical Replication Failover" and "Replication Slot Synchronization". A slot has the property ``failover``; the
standbys then copy it if they are set up to do so.
"""

from __future__ import annotations

import logging

from cdcpipe import sqlstate
from cdcpipe.errors import InitError, ServerError, SlotInUseError
from cdcpipe.libpq.connection import Connection
from cdcpipe.replication.commands import enable_failover
from cdcpipe.replication.server import is_standby
from cdcpipe.replication.session import connected_walsender
from cdcpipe.replication.slots import FAILOVER_SINCE, Slot, slot_in_use_message

__all__ = ["failover_of_existing_slot", "failover_of_new_slot", "loses_prepared"]

log = logging.getLogger(__name__)

_POSITION_COPIED_SINCE = 180000


def failover_of_new_slot(connection: Connection, plugin: str, asked: bool | None) -> bool:
    """Return whether to create a slot with ``failover``. ``asked`` is what the user says, None for the default.

    The default is yes for pgoutput on a primary that knows the property. If the user asks for what the server lacks, InitError is
    raised.
    """
    if asked is False or (asked is None and plugin != "pgoutput"):
        return False
    missing = _missing(connection)
    if missing is not None and asked:
        raise missing
    return missing is None


def failover_of_existing_slot(connection: Connection, slot: Slot, asked: bool | None) -> bool:
    """Turn on ``failover`` if the user asks for it, and return whether it was turned on. Without an answer say how to get it.

    A slot that is in use stays as it is, with a warning. So does a slot that has the property, if the user says no. Raises
    InitError if the server lacks the property.
    """
    if slot.failover and asked is False:
        log.warning("replication slot %r exists with the property failover: --failover no has no effect", slot.name)
    if slot.failover or asked is False:
        return False
    missing = _missing(connection)
    if missing is not None and asked:
        raise missing
    if asked is None:
        if missing is None and slot.plugin == "pgoutput" and not slot.temporary:
            log.info("no standby keeps a copy of replication slot %r for a failover; --failover yes lets them", slot.name)
        return False
    if slot.active:
        log.warning("%s: --failover yes can change it only while it is free", slot_in_use_message(slot))
        return False
    with connected_walsender(connection.parameters_here) as walsender:
        try:
            walsender.execute(enable_failover(slot.name))
        except ServerError as ex:
            if ex.sqlstate == sqlstate.OBJECT_IN_USE:
                raise SlotInUseError(ex.message, hint="--failover yes changes a slot that is free") from ex
            raise InitError(f"replication slot {slot.name!r} can't get the property failover: {ex.message}", hint=ex.hint) from ex
    log.info("standbys may keep a copy of replication slot %r from now on", slot.name)
    return True


def loses_prepared(server_version: int, slot: Slot) -> bool:
    """Tell whether a failover loses what is prepared by now, if a stream makes the slot send prepared transactions from now on.

    The server sends what was prepared before this when it is committed. The standbys of PostgreSQL 17 copy ``two_phase`` without
    the position from which on it holds. So after a promotion, such a transaction counts as one that was sent before. When a slot
    is made, no transaction is prepared: the server waits for the end of those that are.
    """
    return bool(slot.failover) and not slot.is_new and FAILOVER_SINCE <= server_version < _POSITION_COPIED_SINCE


def _missing(connection: Connection) -> InitError | None:
    """Return the error for a server that can't give a slot the property, or None."""
    if connection.server_version < FAILOVER_SINCE:
        major = connection.server_version // 10000
        return InitError(
            f"the server is PostgreSQL {major}: its slots have no property failover (--failover yes)",
            hint="PostgreSQL 17 and newer have it; leave the option out",
        )
    if is_standby(connection):
        return InitError(
            "the server is a standby: only a slot of a primary can have the property failover (--failover yes)",
            hint="connect to the primary; or leave the option out",
        )
    return None

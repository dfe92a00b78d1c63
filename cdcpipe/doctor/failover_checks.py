"""Checks of a primary and its standbys: whether a promoted standby has the slot, and whether a stream from a standby can work.

If the connection names a primary and a standby (``host=a,b``), both are judged. No I/O.
Source: the manual, "Logical Replication Failover" and "Replication Slot Synchronization".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from cdcpipe.doctor.facts import Facts, Server, Unreachable
from cdcpipe.doctor.findings import Verdict, error, ok, warning
from cdcpipe.doctor.words import lost, names_in, set_globally
from cdcpipe.replication.slots import FAILOVER_SINCE, STANDBYS_DECODE_SINCE, what_frees
from cdcpipe.sql import quote_literal

__all__ = ["CHECKS"]

_NOT_AFTER_PROMOTION = "after its promotion the slot is not there, and all tables have to be copied anew"


def _standbys(facts: Facts) -> list[Server]:
    """Return the standbys that could be asked."""
    return [each for each in (facts.server, *facts.others) if isinstance(each, Server) and each.is_standby]


def servers(facts: Facts) -> Iterator[Verdict]:
    """Say which servers the connection names, and which of them can't be asked."""
    for each in facts.others:
        if isinstance(each, Unreachable):
            yield warning(
                f"no answer: {each.problem}", "it can't be judged, and nobody can go on there", "start it", subject=each.address
            )
        else:
            yield ok(f"{'a standby' if each.is_standby else 'a primary'}", subject=each.address)


def slot(facts: Facts) -> Iterator[Verdict]:
    """Judge whether standbys copy the primary's slot (since 17)."""
    primary = facts.primary
    if primary is None:
        return
    if not (primary.physical_slots or _standbys(facts)):
        yield ok("no standby is known")
        return
    found = primary.slot(facts.asked.slot)
    if primary.version < FAILOVER_SINCE:
        why = "the server is older than 17, where a standby does not get the slot"
        fix = "upgrade to 17 or newer; or the extension pg_failover_slots"
        if primary.version >= STANDBYS_DECODE_SINCE:  # such a standby would stream from the copy before its promotion
            fix += ", and connections with target_session_attrs=read-write that name both servers"
        yield warning("there is a standby", f"{why}: {_NOT_AFTER_PROMOTION}", fix)
    elif found is None:
        yield ok(f"slot {facts.asked.slot!r} is not there yet")
    elif found.failover:
        yield ok(f"slot {found.name!r} is one that standbys copy")
    else:
        yield warning(
            f"slot {found.name!r} has not the property failover",
            f"standbys do not copy it: {_NOT_AFTER_PROMOTION}",
            "stop its consumer, and start it with --failover yes, which cdcpipe, cdcpipe-spark land and cdcpipe-spark run have",
        )


def standby_slots(facts: Facts) -> Iterator[Verdict]:
    """Judge whether the primary holds changes back until its standbys have them (since 17)."""
    primary = facts.primary
    found = None if primary is None else primary.slot(facts.asked.slot)
    if primary is None or found is None or not found.failover:
        return
    named = names_in(primary.settings.get("synchronized_standby_slots", ""))
    by_name = {each.name: each for each in primary.physical_slots}
    if not named:
        if not (primary.physical_slots or _standbys(facts)):
            return  # nobody to wait for; `slot` says so
        yield warning(
            "synchronized_standby_slots is empty",
            "changes may come that a promoted standby never had",
            set_globally("synchronized_standby_slots", *(by_name or ["…"])),
        )
        return
    for name in named:
        why = "as long as that is so, the server sends nothing of the slot"
        without = set_globally("synchronized_standby_slots", *([each for each in named if each != name] or [""]))
        if name not in by_name:
            yield error(f"synchronized_standby_slots names {name!r}, which is no slot of a standby", why, without)
        elif by_name[name].active_pid is None:
            yield error(
                f"no standby uses {name!r}, which synchronized_standby_slots names", why, f"start the standby, or {without}"
            )
        else:
            yield ok(f"changes wait until the standby of slot {name!r} has them")


def standbys(facts: Facts) -> Iterator[Verdict]:
    """Judge whether each standby copies slots, and has a copy of this slot (since 17)."""
    primary = facts.primary
    on_primary = None if primary is None else primary.slot(facts.asked.slot)
    for server in _standbys(facts):
        if server.version < FAILOVER_SINCE or (server is facts.server and not _is_copy(facts)):
            continue
        wrong = list(_not_copying(server))
        yield from wrong
        found = server.slot(facts.asked.slot)
        if wrong or (primary is not None and (on_primary is None or not on_primary.failover)):
            continue
        if found is None:
            fix = "wait for the next copy, or SELECT pg_sync_replication_slots() there"
            yield warning(f"slot {facts.asked.slot!r} is not there", _NOT_AFTER_PROMOTION, fix, subject=server.address)
        elif not found.synced:
            why = f"as long as it is there, nothing is copied: {_NOT_AFTER_PROMOTION}"
            fix = f"SELECT pg_drop_replication_slot({quote_literal(found.name)}) there, if the server was the primary before"
            yield warning(f"slot {found.name!r} is one of its own, and no copy", why, fix, subject=server.address)
        elif found.temporary or found.is_lost_copy:
            what = lost(found) if found.is_lost_copy else "is not yet a lasting copy"
            yield warning(f"slot {found.name!r} {what}", _NOT_AFTER_PROMOTION, what_frees(found), subject=server.address)
        else:
            yield ok(f"it has a copy of slot {found.name!r}", subject=server.address)


def _is_copy(facts: Facts) -> bool:
    """Tell whether the user examines a standby for its copy of the primary's slot, and not to stream from the standby itself."""
    return not facts.asked.create and (facts.slot is None or bool(facts.slot.synced))


def _not_copying(server: Server) -> Iterator[Verdict]:
    """Yield a verdict for each setting that keeps a standby from copying slots."""
    address = server.address
    if not server.copies_slots:
        fix = f"{set_globally('sync_replication_slots', 'on')}, on the standby"
        yield warning("sync_replication_slots is off", f"it copies no slot: {_NOT_AFTER_PROMOTION}", fix, subject=address)
    if server.settings.get("hot_standby_feedback") != "on":
        fix = f"{set_globally('hot_standby_feedback', 'on')}, on the standby"
        yield warning("hot_standby_feedback is off", f"it copies no slot: {_NOT_AFTER_PROMOTION}", fix, subject=address)
    if not server.settings.get("primary_slot_name"):
        fix = (
            "SELECT pg_create_physical_replication_slot('standby') on the primary, then"
            f" {set_globally('primary_slot_name', 'standby')}, on the standby"
        )
        yield warning("primary_slot_name is empty", f"it copies no slot: {_NOT_AFTER_PROMOTION}", fix, subject=address)
    if server.has_dbname is False:
        fix = "add dbname=postgres to its primary_conninfo, then SELECT pg_reload_conf() there"
        yield warning("primary_conninfo names no database", f"it copies no slot: {_NOT_AFTER_PROMOTION}", fix, subject=address)
    if server.has_dbname is None and server.copies_slots:
        fix = "GRANT pg_read_all_settings to this user, on the primary"
        yield warning("primary_conninfo is not shown", "it must name a database for slots to be copied", fix, subject=address)


def source(facts: Facts) -> Iterator[Verdict]:
    """If the connected server is a standby, judge whether it can serve a stream (since 16)."""
    server = facts.server
    if not server.is_standby:
        return
    if server.version < STANDBYS_DECODE_SINCE:
        yield error(
            "the connection leads to a standby",
            "standbys older than 16 do not decode",
            "connect to the primary: -m target_session_attrs=read-write",
        )
        return
    why = "VACUUM on the primary removes what the slot here needs, which invalidates it"
    if server.settings.get("hot_standby_feedback") != "on":
        fix = f"{set_globally('hot_standby_feedback', 'on')}, on the standby"
        yield warning("the connection leads to a standby, where hot_standby_feedback is off", why, fix)
    elif not server.settings.get("primary_slot_name"):
        yield warning(
            "the connection leads to a standby without primary_slot_name",
            f"while the standby is away, {why}",
            "SELECT pg_create_physical_replication_slot('standby') on the primary, then"
            f" {set_globally('primary_slot_name', 'standby')}, on the standby",
        )
    elif facts.asked.create and facts.slot is None:
        yield ok(
            "the connection leads to a standby; on an idle primary run SELECT pg_log_standby_snapshot() while the slot is made"
        )
    else:
        yield ok("the connection leads to a standby")


CHECKS: Mapping[str, Callable[[Facts], Iterator[Verdict]]] = MappingProxyType(
    {
        "failover.servers": servers,
        "failover.source": source,
        "failover.slot": slot,
        "failover.standby_slots": standby_slots,
        "failover.standbys": standbys,
    }
)
"""The checks by the names that their findings have, in the order in which the findings are shown."""

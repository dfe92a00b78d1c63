"""Checks of a server and of the slot on it: settings, capacity, privileges, clocks, transactions. No I/O."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Final

from cdcpipe.config import CREATE_TIMEOUT_S
from cdcpipe.ddl import script
from cdcpipe.doctor.facts import Facts, Server, Transaction
from cdcpipe.doctor.findings import Verdict, error, ok, warning
from cdcpipe.doctor.words import EVENT_TRIGGERS_ON, lost, names_in, set_globally
from cdcpipe.libpq.connection_hints import GENERAL_HINT
from cdcpipe.libpq.server_errors import NO_REPLICATION
from cdcpipe.replication.server import allows_decoding
from cdcpipe.replication.slots import Slot
from cdcpipe.sql import quote_identifier, quote_literal
from cdcpipe.units import counted, format_duration, format_size

__all__ = ["CHECKS"]

_OLDEST, _NEWEST = 14, 18
"""The major versions that cdcpipe is tested with."""

_LEAST_MINORS: Final = {14: 18, 15: 13, 16: 9, 17: 5}
"""Release notes of 2025-05-08: "Avoid data loss when DDL operations that don't take a strong lock affect tables that are being
logically replicated"."""

_CLOCK_S = 2.0
_FORGOTTEN_TRANSACTION_S = 3600.0
_LEAST_WALSENDER_TIMEOUT_MS = 10_000
_DAY_S = 86400.0
_KEPT_DAYS = 3
_LEAST_LIMIT_BYTES = 10 << 30
"""The doctor proposes the WAL of three days for max_slot_wal_keep_size, and never less than this."""
_LARGE_BYTES = 1 << 30
_MEGABYTE = 1 << 20


def version(facts: Facts) -> Iterator[Verdict]:
    """Judge whether cdcpipe was tested with this server version, and whether the version has a bug that loses changes."""
    major, minor = divmod(facts.server.version, 10000)
    name = f"PostgreSQL {facts.server.version_text}"
    least = _LEAST_MINORS.get(major, 0)
    if major < _OLDEST:
        yield error(name, f"cdcpipe needs PostgreSQL {_OLDEST} or newer", f"upgrade it to one of {_OLDEST} to {_NEWEST}")
    elif major > _NEWEST:
        yield warning(name, "cdcpipe is not tested with it", "see whether there is a newer cdcpipe")
    elif minor < least:
        why = (
            f"before {major}.{least} the server may send wrong data after ALTER PUBLICATION or ALTER TYPE beside open transactions"
        )
        yield warning(name, why, f"update it to {major}.{least} or newer; tables and slots stay as they are")
    else:
        yield ok(name)


def encoding(facts: Facts) -> Iterator[Verdict]:
    """Judge whether the server can send every text of the database as UTF-8."""
    if facts.server.encoding == "SQL_ASCII":
        yield warning(
            "the database's encoding is SQL_ASCII",
            "a text that is not valid UTF-8 stops the stream for good",
            f"copy it into a database that has an encoding: CREATE DATABASE {quote_identifier(facts.server.database + '_utf8')}"
            " TEMPLATE template0 ENCODING 'UTF8'",
        )
    else:
        yield ok(f"the database's encoding is {facts.server.encoding}")


def wal_level(facts: Facts) -> Iterator[Verdict]:
    """Judge whether the WAL contains what logical decoding needs."""
    here, primary = facts.server, facts.primary
    effective = here.settings.get("effective_wal_level")
    if here.is_standby and effective is not None:
        yield from _level_of_primary(effective, primary)
        return
    server = here if primary is None or _lacks_level(here) else primary  # the standby copies its WAL
    found = server.settings.get("wal_level")
    subject = None if server is here else server.address
    if _lacks_level(server):
        yield error(
            f"wal_level is {found}",
            "the WAL lacks what logical decoding needs",
            "ALTER SYSTEM SET wal_level = 'logical'; then restart the server (a managed service has its own parameter)",
            subject=subject,
        )
    elif found != "logical":
        yield ok(f"wal_level is {found}, which the first logical slot raises")
    elif primary is None:
        yield ok("wal_level is logical on this standby; the primary needs it, too, and was not asked")
    else:
        yield ok("wal_level is logical")


def _level_of_primary(effective: str, primary: Server | None) -> Iterator[Verdict]:
    """Judge a standby of PostgreSQL 19 or newer, which knows the level of the WAL that it copies."""
    fix = "on the primary: ALTER SYSTEM SET wal_level = 'logical'; then restart it"
    if effective != "logical":
        yield error(f"effective_wal_level is {effective}", "the primary's WAL lacks what logical decoding needs", fix)
    elif primary is not None and primary.settings.get("wal_level") != "logical":
        why = "this standby loses its logical slots when the primary's last one is dropped"
        yield warning("only the primary's logical slots make its WAL what logical decoding needs", why, fix)
    else:
        yield ok("effective_wal_level is logical")


def _lacks_level(server: Server) -> bool:
    level, effective = map(server.settings.get, ("wal_level", "effective_wal_level"))
    return not allows_decoding(level, effective, is_standby=server.is_standby)


def clock(facts: Facts) -> Iterator[Verdict]:
    """Judge whether the server's clock and ours agree."""
    ahead = facts.server.clock_ahead_s
    if abs(ahead) > _CLOCK_S:
        yield warning(
            f"the server's clock is {format_duration(abs(ahead))} {'ahead of' if ahead > 0 else 'behind'} this machine's",
            "every lag in seconds is wrong by that",
            "timedatectl set-ntp true, on the machine whose clock is wrong",
        )
    else:
        yield ok("the server's clock and this machine's agree")


def replication(facts: Facts) -> Iterator[Verdict]:
    """Judge whether the user may stream."""
    role = facts.role
    name = quote_identifier(role.name)
    # A server elsewhere may have RDS's roles from a dump. There a member is refused all the same, and needs the attribute.
    is_on_rds = "rds_superuser" in facts.service_roles and not role.can_replicate
    if facts.replication_problem is None:
        yield ok(f"user {role.name} may stream; so it may read every row of every published table")
    elif _lacks_replication(facts):
        yield error(
            f"user {role.name} may not stream: {facts.replication_problem}",
            f"only a {'member of rds_replication' if is_on_rds else 'role with the REPLICATION attribute'} may",
            f"GRANT rds_replication TO {name}" if is_on_rds else f"ALTER ROLE {name} REPLICATION",
        )
    else:
        yield error(
            f"no connection for replication: {facts.replication_problem}",
            "the stream needs one",
            facts.replication_hint,
        )


def _lacks_replication(facts: Facts) -> bool:
    """Tell whether the server refuses the walsender because of the user. A translated message has only the general hint."""
    role = facts.role
    is_translated = facts.replication_hint == GENERAL_HINT
    return facts.replication_hint == NO_REPLICATION or (is_translated and not (role.can_replicate or role.is_superuser))


def slots_left(facts: Facts) -> Iterator[Verdict]:
    """Judge whether enough replication slots are free: one for the stream, and a temporary one for copying tables."""
    limit = int(facts.server.settings.get("max_replication_slots", "0"))
    left = limit - len(facts.server.slots)
    needed = 0 if facts.slot else 1
    said = f"{left} of {limit} replication slots are left"
    fix = f"{set_globally('max_replication_slots', limit + 5, restart=True)}, or drop one: SELECT * FROM pg_replication_slots"
    if left < needed:
        yield error(said, f"slot {facts.asked.slot!r} can't be made", fix)
    elif left <= needed:
        yield warning(said, "copying tables later takes a temporary slot beside this one", fix)
    else:
        yield ok(said)


def walsenders_left(facts: Facts) -> Iterator[Verdict]:
    """Judge whether enough walsenders are free: one for the stream, and one for a snapshot."""
    limit = int(facts.server.settings.get("max_wal_senders", "0"))
    left = limit - facts.server.walsenders
    needed = 0 if facts.slot and facts.slot.active_pid else 1
    said = f"{left} of {limit} walsenders are left"
    fix = set_globally("max_wal_senders", limit + 5, restart=True)
    if left < needed:
        yield error(said, "the stream takes one", fix)
    elif left <= needed:
        yield warning(said, "copying tables takes one beside the stream's", fix)
    else:
        yield ok(said)


def wal_limit(facts: Facts) -> Iterator[Verdict]:
    """Judge how much WAL the server keeps for a slot that does not advance, and after what time the limit is reached."""
    megabytes = int(facts.server.settings.get("max_slot_wal_keep_size", "-1"))
    rate = facts.wal_rate
    enough = _LEAST_LIMIT_BYTES if rate is None else max(_LEAST_LIMIT_BYTES, math.ceil(rate.highest * _DAY_S * _KEPT_DAYS))
    fix = set_globally("max_slot_wal_keep_size", f"{math.ceil(enough / (1 << 30))}GB")
    if megabytes < 0:
        yield warning("max_slot_wal_keep_size is unlimited", "a slot that nobody reads fills the server's disk", fix)
        return
    said = f"max_slot_wal_keep_size is {format_size(megabytes * _MEGABYTE)}"
    if rate is None or rate.highest <= 0:
        yield ok(said if rate is None else f"{said}, and no WAL is being written")
        return
    lasts_s = megabytes * _MEGABYTE / rate.highest
    average = "" if rate.average is None else f"; on average {format_size(rate.average)}/s"
    said += f", which lasts {format_duration(lasts_s)} (the server writes {format_size(rate.bytes_per_s)}/s of WAL now{average})"
    if lasts_s < _DAY_S:
        yield warning(said, "a slot that nobody reads for so long is lost, and all tables have to be copied anew", fix)
    else:
        yield ok(said)


def idle_slots(facts: Facts) -> Iterator[Verdict]:
    """Judge whether the server invalidates a slot that is not used for a while (since 18)."""
    found = facts.server.settings.get("idle_replication_slot_timeout")
    if found is None:
        yield ok("the server has no idle_replication_slot_timeout")
    elif found == "0":
        yield ok("idle_replication_slot_timeout is off")
    else:
        yield warning(
            f"idle_replication_slot_timeout is {format_duration(float(found))}",
            "a slot that nobody reads for so long is lost, and all tables have to be copied anew",
            set_globally("idle_replication_slot_timeout", 0),
        )


def walsender_timeout(facts: Facts) -> Iterator[Verdict]:
    """Judge after what time the server disconnects a silent client."""
    found = int(facts.server.settings.get("wal_sender_timeout", "60000"))
    fix = f"ALTER ROLE {quote_identifier(facts.role.name)} SET wal_sender_timeout = '60s'"
    if found == 0:
        why = "a client that vanished holds the slot until TCP gives up, which may take hours"
        yield warning("wal_sender_timeout is off", why, fix)
    elif found < _LEAST_WALSENDER_TIMEOUT_MS:
        yield warning(
            f"wal_sender_timeout is {format_duration(found / 1000)}", "each short silence of the network ends the stream", fix
        )
    else:
        yield ok(f"wal_sender_timeout is {format_duration(found / 1000)}")


def output_plugins(facts: Facts) -> Iterator[Verdict]:
    """Judge whether the server allows the slot's plugin. Since its releases of August 2026, it runs only listed plugins."""
    plugin = (facts.slot.plugin if facts.slot else None) or facts.asked.plugin
    found = facts.server.settings.get("output_plugin_libraries")
    if found is None:
        yield ok("the server has no list of output plugins")
        return
    listed = names_in(found)
    if plugin in listed:
        yield ok(f"output_plugin_libraries has {plugin}")
    else:
        yield error(
            f"output_plugin_libraries has {found or 'nothing'}, and not {plugin}",
            "the server refuses to make the slot, and to stream from it",
            set_globally("output_plugin_libraries", *listed, plugin),
        )


def transactions(facts: Facts) -> Iterator[Verdict]:
    """Judge the running transactions. A new slot waits for them, and an existing slot keeps WAL for them."""
    waits = facts.asked.create and facts.slot is None
    if facts.transactions is None:
        if waits:
            said = "the transactions that are open on the primary are not known here"
            yield warning(said, "the new slot waits for their end", "run cdcpipe doctor against the primary (-h)")
        return
    limit_s = CREATE_TIMEOUT_S if waits else _FORGOTTEN_TRANSACTION_S
    why = "the new slot waits for its end" if waits else "the slot keeps all WAL from its beginning on"
    found = 0
    for each in facts.transactions:
        is_old = each.age_s is not None and each.age_s >= limit_s
        if each.gid is not None and (waits or is_old):
            found += 1
            yield (error if waits else warning)(_transaction(each), why, _end_prepared(each))
        elif each.pid is not None and is_old:
            found += 1
            yield warning(_transaction(each), why, f"SELECT pg_terminate_backend({each.pid})")
    hidden = sum(each.age_s is None and each.gid is None for each in facts.transactions)
    if hidden and not facts.role.sees_others:
        yield warning(
            f"{counted(hidden, 'transaction')} of other users {'is' if hidden == 1 else 'are'} open, for an unknown time",
            why.replace("its", "their"),
            f"to see it: GRANT pg_read_all_stats TO {quote_identifier(facts.role.name)}",
        )
    elif not found:
        yield ok(f"no transaction has been open for {format_duration(limit_s)}")


def _transaction(found: Transaction) -> str:
    what = f"prepared transaction {found.gid!r}" if found.gid is not None else f"a transaction of server process {found.pid}"
    where = f" in database {found.database}" if found.database else ""
    return f"{what}{where} is open{'' if found.age_s is None else f' for {format_duration(found.age_s)}'}"


def _end_prepared(found: Transaction) -> str:
    gid = quote_literal(found.gid or "")
    return f"COMMIT PREPARED {gid}, or ROLLBACK PREPARED {gid}, in database {found.database}"


def slot_state(facts: Facts) -> Iterator[Verdict]:
    """Judge whether the slot can be streamed from."""
    name, slot = facts.asked.slot, facts.slot
    if slot is None:
        yield _missing(facts)
        return
    problem = _problem(facts, slot)
    if problem is not None:
        yield problem
    elif slot.confirmed_flush_lsn is None:
        yield warning(f"slot {name!r} is still being made", "it waits for open transactions", "wait, and look again")
    elif slot.active_pid is not None:
        yield ok(f"slot {name!r} is in use by server process {slot.active_pid}")
    else:
        yield ok(f"slot {name!r} is there, and free")


def _missing(facts: Facts) -> Verdict:
    """Judge that the slot is not there. In the place of a copy, -c makes none (`find_or_create_slot`), unless asked to."""
    what, making = f"slot {facts.asked.slot!r} is not there", _making(facts)
    nothing = "there is nothing to stream from"
    if not facts.server.copies_slots:
        return ok(f"{what}: -c makes it") if facts.asked.create else error(what, nothing, making)
    fix = (
        "make it on the primary with --failover yes, and wait for this standby's copy; or make a slot of this standby alone, with a"
        f" name that no slot of the primary has: {making}"
    )
    if facts.asked.create:
        return warning(what, "on a standby that copies its primary's slots, -c makes a slot only with --failover no", fix)
    return error(what, nothing, fix)


def _problem(facts: Facts, slot: Slot) -> Verdict | None:
    """Return why a slot can't be used, now or ever; None if it can."""
    anew = f"SELECT pg_drop_replication_slot({quote_literal(slot.name)}); then {_making(facts)}, and copy the tables anew"
    what = f"slot {slot.name!r}"
    if slot.slot_type != "logical":
        return error(f"{what} is a physical slot", "only a logical one has changes", "name another slot: -S")
    if slot.database != facts.server.database:
        why = f"the connection is to {facts.server.database!r}"
        return error(f"{what} belongs to database {slot.database!r}", why, f"connect to it: -d {shlex.quote(slot.database or '')}")
    why = "nobody can stream from it before this standby is promoted"
    if slot.is_copy:
        return error(
            f"{what} is a copy of the primary's", why, "connect to the primary, or make another slot here: -S NAME -c --failover no"
        )
    if slot.is_lost:
        return error(f"{what} {lost(slot)}", "changes are missing for good", anew)
    if not slot.decodes:
        return error(f"{what} is on a standby that does not decode", why, "connect to the primary, or wait for the promotion")
    if slot.wal_status == "unreserved":
        return error(
            f"{what} is beyond max_slot_wal_keep_size", "the next checkpoint may remove WAL that it needs", "stream from it now"
        )
    if facts.asked.publications and slot.plugin != "pgoutput":
        return error(f"{what} has the plugin {slot.plugin}", "publications are for pgoutput", "name another slot: -S")
    return None


def _making(facts: Facts) -> str:
    asked = facts.asked
    if asked.plugin == "pgoutput":
        named = [word for name in asked.publications for word in ("--publication", name)]
        words = ["prepare", "-S", asked.slot, *named, *asked.new.arguments, "-c"]
    else:  # prepare is for pgoutput
        words = ["-L", "-S", asked.slot, "-P", asked.plugin, "-c"]
    words += ["--failover", "no"] if facts.server.copies_slots else []
    return f"{shlex.join(['cdcpipe', *words])}, with the options of this connection"


def slot_wal(facts: Facts) -> Iterator[Verdict]:
    """Judge how much WAL the slot keeps, and for what reason."""
    slot = facts.slot
    if slot is None or slot.restart_lsn is None or slot.confirmed_flush_lsn is None:
        return
    kept, unconfirmed = (max(facts.server.wal_lsn - lsn, 0) for lsn in (slot.restart_lsn, slot.confirmed_flush_lsn))
    said = f"slot {slot.name!r} keeps {format_size(kept)} of WAL, of which {format_size(unconfirmed)} are not confirmed"
    if slot.safe_wal_bytes is not None and (rate := facts.wal_rate) is not None and rate.highest > 0:
        left = max(slot.safe_wal_bytes, 0)
        said += f"; it may be lost after {format_size(left)} more, in {format_duration(left / rate.highest)}"
    if kept < _LARGE_BYTES:
        yield ok(said)
    elif slot.active_pid is None:
        yield warning(
            said,
            "nobody reads it",
            f"start its consumer, or if it has none: SELECT pg_drop_replication_slot({quote_literal(slot.name)})",
        )
    elif kept > 2 * unconfirmed:
        yield warning(
            said,
            "a transaction that is still open began so long ago",
            "SELECT pid, xact_start FROM pg_stat_activity WHERE backend_xid IS NOT NULL ORDER BY xact_start",
        )
    else:
        yield warning(said, "its consumer is behind", "see where it is: cdcpipe-spark status, or cdcpipe slot")


def ddl_capture(facts: Facts) -> Iterator[Verdict]:
    """Judge whether DDL capture works as a whole, and is not an old one, if it is installed. No other check needs it."""
    states, installed = facts.ddl_triggers, facts.ddl_settings
    if not states:
        return
    silent = [name for name in script.TRIGGERS if states.get(name) != "A"]
    if silent:
        yield warning(
            f"of DDL capture, {', '.join(silent)} {'is' if len(silent) == 1 else 'are'} missing, or not enabled always",
            "the stream tells of some DDL and not of all",
            "cdcpipe ddl install",
        )
    elif facts.server.settings.get("event_triggers") == "off":
        yield warning("event_triggers is off", "no event trigger fires, so the stream tells of no DDL", EVENT_TRIGGERS_ON)
    elif installed is None:
        yield warning("the version of DDL capture can't be read", "DDL may fail, or be missing in the stream", "cdcpipe ddl status")
    elif installed.version < script.VERSION:
        yield warning(
            f"version {installed.version} of DDL capture is installed, and this program has version {script.VERSION}",
            "rows can be wrong after DDL that the later version describes better",
            "cdcpipe ddl install",
        )
    else:
        yield ok("DDL is captured")


CHECKS: Mapping[str, Callable[[Facts], Iterator[Verdict]]] = MappingProxyType(
    {
        "server.version": version,
        "server.encoding": encoding,
        "server.clock": clock,
        "server.wal_level": wal_level,
        "server.replication": replication,
        "server.output_plugins": output_plugins,
        "server.slots_left": slots_left,
        "server.walsenders_left": walsenders_left,
        "server.walsender_timeout": walsender_timeout,
        "server.wal_limit": wal_limit,
        "server.idle_slots": idle_slots,
        "server.transactions": transactions,
        "server.ddl_capture": ddl_capture,
        "slot.state": slot_state,
        "slot.wal": slot_wal,
    }
)
"""The checks by the names that their findings have, in the order in which the findings are shown."""

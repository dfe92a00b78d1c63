"""Asks servers for the facts that the checks judge. It changes nothing, and opens or locks no table.

`look` asks one server for its description. `survey` asks the connected server for all facts, and looks at the other servers that
the connection parameters name. A quick survey leaves out the tables, and the rate at which WAL is written.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Mapping

from cdcpipe.ddl import script
from cdcpipe.doctor import table_survey
from cdcpipe.doctor.facts import Asked, Facts, Role, Server, Transaction, Unreachable, WALRate
from cdcpipe.errors import CdcpipeError
from cdcpipe.libpq.connection import Connection
from cdcpipe.lsn import LSN
from cdcpipe.replication.server import WAL_END, System, existing_roles, identify_system
from cdcpipe.replication.session import connect, connect_walsender
from cdcpipe.replication.slots import find_slots
from cdcpipe.sql import SERVICE_ROLES

__all__ = ["survey"]

_SETTINGS = (
    "effective_wal_level",
    "event_triggers",
    "hot_standby_feedback",
    "idle_replication_slot_timeout",
    "max_replication_slots",
    "max_slot_wal_keep_size",
    "max_wal_senders",
    "output_plugin_libraries",
    "primary_slot_name",
    "sync_replication_slots",
    "synchronized_standby_slots",
    "wal_level",
    "wal_sender_timeout",
)

_AVERAGE_AFTER_S = 600.0
"""Younger statistics are ignored. They do not show a usual rate, because a new server has just written its own catalogs."""

_WATCHED_S = 1.0
"""How long the survey watches the WAL to measure its growth."""

_SERVER = f"""
SELECT extract(epoch FROM pg_catalog.clock_timestamp()), pg_catalog.pg_is_in_recovery(), {WAL_END},
    (SELECT count(*) FROM pg_catalog.pg_stat_get_wal_senders()),
    (SELECT s.setting ~ '(^|\\s)dbname\\s*=' OR s.setting ~ '^postgres(ql)?://[^/]*/[^?]'
     FROM pg_catalog.pg_settings s WHERE s.name = 'primary_conninfo' AND s.setting <> ''),
    pg_catalog.current_setting('server_version'), pg_catalog.current_setting('server_encoding')
"""
"""primary_conninfo may contain a password. So the query returns only whether it names a database."""

_ROLE = """
SELECT r.rolname, r.rolsuper, r.rolreplication OR EXISTS (
        SELECT FROM pg_catalog.pg_roles s WHERE s.rolname = 'rds_replication' AND pg_catalog.pg_has_role(s.oid, 'MEMBER')
    ),
    pg_catalog.pg_has_role('pg_read_all_stats', 'USAGE'),
    pg_catalog.has_database_privilege(pg_catalog.current_database(), 'CREATE')
FROM pg_catalog.pg_roles r WHERE r.rolname = current_user
"""

_TRANSACTIONS = """
SELECT DISTINCT ON (coalesce(l.pid::text, x.gid)) l.pid, x.gid, coalesce(x.database, a.datname),
    extract(epoch FROM pg_catalog.clock_timestamp() - coalesce(x.prepared, a.xact_start))
FROM pg_catalog.pg_locks l
LEFT JOIN pg_catalog.pg_stat_activity a ON a.pid = l.pid
LEFT JOIN pg_catalog.pg_prepared_xacts x ON x.transaction = l.transactionid
WHERE l.locktype = 'transactionid' AND l.mode = 'ExclusiveLock' AND l.granted AND (l.pid IS NOT NULL OR x.gid IS NOT NULL)
ORDER BY coalesce(l.pid::text, x.gid), 4 DESC NULLS LAST
"""
"""A transaction with an id holds a lock on that id. Every user may see who holds the lock, but not since when."""


def survey(connection: Connection, asked: Asked, *, quick: bool = False) -> Facts:
    """Return the facts about the server of ``connection``, and about the other servers that its parameters name."""
    server = look(connection)
    role = _role(connection)
    begun_at = time.monotonic()
    others = tuple(_look_there(each) for each in connection.parameters_elsewhere)
    tables = table_survey.Tables() if quick else table_survey.survey(connection, asked)
    system = _ask_walsender(connection)
    problem = system if isinstance(system, CdcpipeError) else None
    ddl = connection.execute(script.FIND)
    return Facts(
        asked=asked,
        server=server,
        role=role,
        others=others,
        service_roles=existing_roles(connection, SERVICE_ROLES),
        replication_problem=None if problem is None else _short(problem.message),
        replication_hint="" if problem is None else problem.hint or "",
        timeline=system.timeline if isinstance(system, System) else None,
        wal_rate=None if quick else _watch(connection, server, begun_at),
        transactions=None if server.is_standby else _transactions(connection),
        ddl_triggers={name or "": state or "" for name, state, *_ in ddl},
        ddl_settings=script.Settings.parse(ddl[0][-1]) if ddl else None,
        publications=tables.publications,
        tables=tables.tables,
        restrictions=tables.restrictions,
        left_out=tables.left_out,
        without_binary=tables.without_binary,
        selection=tables.selection,
        selection_problem=tables.selection_problem,
    )


def look(connection: Connection) -> Server:
    """Return the description that a server gives of itself."""
    before = time.time()
    (server_time, is_standby, wal_end, walsenders, has_dbname, version_text, encoding), *_ = connection.execute(_SERVER)
    after = time.time()
    ahead = float(server_time or 0) - (before + after) / 2
    settings = connection.execute(
        "SELECT name, setting FROM pg_catalog.pg_settings WHERE name IN (" + ", ".join(f"'{name}'" for name in _SETTINGS) + ")"
    )
    address = connection.address
    return Server(
        address=f"{address.get('host', 'local')}:{address.get('port', '')}",
        version=connection.server_version,
        version_text=(version_text or "").partition(" ")[0],
        database=connection.database,
        encoding=encoding or "",
        is_standby=is_standby == "t",
        settings={name or "": value or "" for name, value in settings},
        wal_lsn=LSN.parse(wal_end or "0/0"),
        slots=tuple(find_slots(connection)),
        walsenders=int(walsenders or 0),
        has_dbname=None if has_dbname is None else has_dbname == "t",
        clock_ahead_s=0.0 if abs(ahead) <= (after - before) / 2 else ahead,
    )


def _role(connection: Connection) -> Role:
    (name, is_superuser, can_replicate, sees_others, can_create), *_ = connection.execute(_ROLE)
    return Role(
        name or "",
        is_superuser=is_superuser == "t",
        can_replicate=can_replicate == "t",
        sees_others=sees_others == "t",
        can_create=can_create == "t",
    )


def _look_there(parameters: Mapping[str, str]) -> Server | Unreachable:
    """Look at another server that the connection parameters name, whether it is a primary or a standby."""
    try:
        connection = connect({**parameters, "target_session_attrs": "any"})
        try:
            return look(connection)
        finally:
            connection.close()
    except CdcpipeError as ex:
        place = parameters.get("host") or parameters.get("hostaddr") or "local"
        return Unreachable(f"{place}:{parameters.get('port', '')}", _short(ex.message))


def _ask_walsender(connection: Connection) -> System | CdcpipeError:
    """Return what a walsender of this server says of it, or the error if the server gives us none."""
    try:
        with contextlib.closing(connect_walsender(connection.parameters_here)) as walsender:
            return identify_system(walsender)
    except CdcpipeError as ex:
        return ex


def _short(message: str) -> str:
    """Return the last part of libpq's message, which is the server's own. The parts before say where libpq tried to connect."""
    return re.split(r"\b(?:failed|FATAL): +", " ".join(message.split()))[-1]


def _transactions(connection: Connection) -> tuple[Transaction, ...]:
    return tuple(
        Transaction(int(pid) if pid else None, gid, database, None if age is None else float(age))
        for pid, gid, database, age in connection.execute(_TRANSACTIONS)
    )


def _watch(connection: Connection, server: Server, begun_at: float) -> WALRate:
    """Return how fast the server has written WAL since the look that gave ``server``. Wait until enough time has passed."""
    time.sleep(max(0.0, begun_at + _WATCHED_S - time.monotonic()))
    wal_end, written, seconds = connection.execute(
        f"SELECT {WAL_END}, wal_bytes, extract(epoch FROM pg_catalog.clock_timestamp() - stats_reset) FROM pg_catalog.pg_stat_wal"
    )[0]
    watched_s = time.monotonic() - begun_at
    # Only a primary counts the WAL; a standby does not count the WAL that it replays.
    average = (
        float(written or 0) / float(seconds) if seconds and float(seconds) >= _AVERAGE_AFTER_S and not server.is_standby else None
    )
    return WALRate(max(LSN.parse(wal_end or "0/0") - server.wal_lsn, 0) / watched_s, watched_s, average)

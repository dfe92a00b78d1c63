"""Leads from a configuration to a stream: connects, checks, creates publications and slot, starts and runs the stream.

This module checks before the first record everything that can be known by then. The server would report such problems late, in
mid-stream, or not at all.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from cdcpipe.config import PollConfig, SlotConfig, StreamConfig
from cdcpipe.errors import CdcpipeError, ConnectionClosedError, InitError
from cdcpipe.libpq.connection import Connection, Rows
from cdcpipe.libpq.parameters import effective_parameters, network_defaults
from cdcpipe.libpq.waiting import NO_LIMIT
from cdcpipe.libpq.walsender import Walsender
from cdcpipe.lsn import LSN, format_lsn
from cdcpipe.pgoutput import options as pgoutput_options
from cdcpipe.pgoutput.transactions import Transactions
from cdcpipe.pipe.exitcode import ExitCode
from cdcpipe.plugins import load, names
from cdcpipe.plugins.base import OutputPlugin
from cdcpipe.plugins.renderer import Renderer
from cdcpipe.replication.boundaries import tracker_for
from cdcpipe.replication.commands import parse_publication_names, publication_names
from cdcpipe.replication.failover import failover_of_existing_slot, failover_of_new_slot
from cdcpipe.replication.opening import OpeningWalsender
from cdcpipe.replication.progress import Progress
from cdcpipe.replication.publications import check_publications, create_publication, missing_publications
from cdcpipe.replication.server import System, check_start, check_wal_level, current_lsn, expect_system, is_standby
from cdcpipe.replication.session import connect, connected, initialising
from cdcpipe.replication.slot_creation import ExportedSnapshot, NewSlot, create_slot, export_snapshot
from cdcpipe.replication.slots import (
    Slot,
    check_free,
    check_no_gap,
    check_usable,
    find_slot,
    missing_slot_error,
    start_stream,
)
from cdcpipe.replication.strict_progress import StrictProgress
from cdcpipe.replication.table_parts import TableParts, table_parts
from cdcpipe.replication.tables import PublishedTable, check_binary_forms, check_readable, published_tables
from cdcpipe.replication.timeline_guard import guard_timeline
from cdcpipe.replication.timelines import TimelineEnd, timeline_history
from cdcpipe.streaming.receiver import Feeder
from cdcpipe.streaming.streamer import Streamer
from cdcpipe.subcommands.poll import LOOK_S, wait_until_free

__all__ = ["Export", "Preparation", "exporting", "poll_until_free", "prepare", "stream"]

log = logging.getLogger(__name__)

CATALOG_TIMEOUT_S = 10.0
"""How long a stream waits for the catalog. Two tries take much less than the default wal_sender_timeout of a server."""

_READ_BYTES = 4096
_LINGER_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Preparation:
    """The slot, found or just created, and the other facts found before streaming.

    ``end_lsn`` lies after every transaction that had committed by then.
    """

    server_version: int
    system: System
    timeline_history: list[TimelineEnd]
    database: str
    end_lsn: LSN
    slot: Slot
    publications: list[str]
    tables: list[PublishedTable]
    parts: Mapping[int, TableParts] | None = None
    """By the tables' OIDs, if they were asked for."""


@dataclass(frozen=True, slots=True)
class Export:
    """A snapshot that other sessions can read. ``connection`` has libpq's parameters for the one server that has it, no password.

    With ``is_slot_new`` the snapshot is that of the slot's beginning. Otherwise it is current, somewhere in the slot's stream.
    """

    snapshot: ExportedSnapshot
    is_slot_new: bool
    connection: Mapping[str, str]
    walsender: Walsender

    def hold(self, fd: int, linger_s: float = 0.0) -> None:
        """Keep the snapshot until a line ``q`` arrives on ``fd``, or until ``fd`` has been at its end for ``linger_s`` seconds.

        A named pipe is at its end while no process has it open for writing. So if a process dies, another one can open the pipe,
        and keep the snapshot. Raises ConnectionClosedError if the server ends the snapshot first.
        """
        server, ended_at, said = self.walsender.socket, None, b""
        while True:
            # A pipe at its end is always ready, so polling it would not wait.
            watched = [server, fd] if ended_at is None else [server]
            ready, _, _ = select.select(watched, [], [], None if ended_at is None else _LINGER_POLL_S)
            if server in ready:
                try:
                    self.walsender.consume_input()  # the server reports a changed setting, or ends the connection
                except Walsender.Lost as ex:
                    raise self.walsender.closed_error() from ex
            if not select.select([fd], [], [], 0)[0]:
                ended_at = None
                continue
            data = os.read(fd, _READ_BYTES)
            if data:
                *lines, rest = (said + data).split(b"\n")
                if b"q" in lines:
                    return
                ended_at, said = None, rest[-2:]
            else:
                now = time.monotonic()
                ended_at = now if ended_at is None else ended_at
                if now - ended_at >= linger_s:
                    return


def find_or_create_slot(
    connection: Connection, config: SlotConfig, publications: list[str], make: Callable[[NewSlot], None] | None = None
) -> Slot:
    """Return the slot's state. If the slot does not exist and the configuration asks for it, create publications and slot first.

    The publications are created before the slot. For changes older than a publication, the publication does not exist.
    ``make`` replaces the SQL function that creates the slot.
    """
    slot = find_slot(connection, config.slot)
    if slot is None:
        check_wal_level(connection)  # where there is a logical slot, the server has this level
        if not config.create:
            raise missing_slot_error(config.slot)
        failover = failover_of_new_slot(connection, config.plugin, config.failover)
        new = NewSlot(config.slot, config.plugin, failover, is_standby(connection), config.create_timeout_s)
        if config.plugin == "pgoutput":
            for name in missing_publications(connection, publications):
                log.info("creating publication %r", name)
                create_publication(connection, name, config.tables)
        log.info("creating replication slot %r with plugin %s", config.slot, config.plugin)
        if make is None:
            is_new = create_slot(connection, new)
        else:
            make(new)
            is_new = True
        slot = find_slot(connection, config.slot)
        if slot is None:
            raise missing_slot_error(config.slot)
        slot = replace(slot, is_new=is_new)
    check_usable(connection, slot)
    if not slot.is_new and failover_of_existing_slot(connection, config.parameters, slot, config.failover):
        slot = replace(slot, failover=True)
    return slot


def check_published(connection: Connection, publications: list[str], *, is_told: bool = False) -> list[PublishedTable]:
    """Check the publications, and return their tables.

    Unless ``is_told``, warn of tables on which the server refuses UPDATE or DELETE.
    """
    check_publications(connection, publications)
    tables = published_tables(connection, publications)
    for table in tables:
        if table.refused and not is_told:
            log.warning(
                "table %s.%s has no usable replica identity: the server refuses %s on it while that is published;"
                " give it a primary key (one that is not deferrable), or ALTER TABLE … REPLICA IDENTITY FULL",
                table.schema,
                table.name,
                " and ".join(table.refused),
            )
    return tables


def prepare(config: SlotConfig, *, in_use: bool = False, quiet: bool = False, with_parts: bool = False) -> Preparation:
    """Do everything that precedes streaming from a pgoutput slot, and return the facts found.

    With ``in_use``, another connection may be streaming from the slot. With ``quiet``, it does not warn of tables on which the
    server refuses commands. (`PublishedTable.refused` has these commands.) ``with_parts`` asks for the tables' parts, too.
    """
    with OpeningWalsender(config.parameters) as opening, connected(config.parameters) as connection, initialising():
        slot = find_or_create_slot(connection, config, list(config.publications))
        walsender, system = opening.wait()
        server = system, timeline_history(walsender, system.timeline)
        found = _preparation(connection, config, slot, server, is_shared=in_use, quiet=quiet)
        if with_parts:
            parts = table_parts(connection, config.publications)
            found = replace(found, parts=parts, end_lsn=current_lsn(connection))  # what the parts show lies before end_lsn, too
        return found


def _preparation(
    connection: Connection,
    config: SlotConfig,
    slot: Slot,
    server: tuple[System, list[TimelineEnd]],
    *,
    is_shared: bool = False,
    quiet: bool = False,
) -> Preparation:
    """Check everything that a stream from the slot needs, and return the facts. ``is_shared``: another connection may use it."""
    if slot.plugin != "pgoutput":
        msg = f"replication slot {slot.name!r} has the plugin {slot.plugin}; this needs one with pgoutput"
        raise InitError(msg, hint="name another slot, or create one with -c")
    if not is_shared:
        check_free(slot)
    tables = check_published(connection, list(config.publications), is_told=quiet)
    return Preparation(
        server_version=connection.server_version,
        system=server[0],
        timeline_history=server[1],
        database=connection.database,
        end_lsn=current_lsn(connection),
        slot=slot,
        publications=list(config.publications),
        tables=tables,
    )


@contextmanager
def exporting(
    config: SlotConfig, readable: Sequence[str] | None = None, *, quiet: bool = False
) -> Iterator[tuple[Preparation, Export]]:
    """Prepare as ``prepare`` does, and export a snapshot that other sessions can read while the context is open.

    ``readable`` names tables ("schema.name"; empty: all published tables). If this user may not read all of them, InitError is
    raised before a slot is created.

    If the slot is created now, the snapshot is that of its beginning. If the slot exists, a temporary slot is created beside it, to
    find the snapshot's position in the WAL.
    """
    with OpeningWalsender(config.parameters) as opening, connected(config.parameters) as connection:
        made: list[ExportedSnapshot] = []

        def export(new: NewSlot, *, is_temporary: bool = False) -> None:
            if readable is not None:
                tables = published_tables(connection, list(config.publications))
                wanted = [table for table in tables if not readable or f"{table.schema}.{table.name}" in readable]
                check_readable(connection, wanted)
            made.append(export_snapshot(walsender, replace(new, plugin="pgoutput"), is_temporary=is_temporary))

        with initialising():
            walsender, system = opening.wait()
            # Any later command on this connection would end the exported snapshot.
            server = system, timeline_history(walsender, system.timeline)
            slot = find_or_create_slot(connection, config, list(config.publications), make=export)
            if not slot.is_new:
                name = f"cdcpipe_snapshot_{secrets.token_hex(6)}"
                export(NewSlot(name, "pgoutput", False, is_standby(connection), config.create_timeout_s), is_temporary=True)
            given = {name: value for name, value in config.parameters.items() if name != "hostaddr"}
            parameters = network_defaults(effective_parameters(given)) | given
            # It does not matter whether another connection uses the slot, because the snapshot comes from a temporary one.
            preparation = _preparation(connection, config, slot, server, is_shared=True, quiet=quiet)
        yield preparation, Export(made[0], slot.is_new, parameters | connection.address, walsender)


def stream(config: StreamConfig) -> ExitCode:
    """Connect, check, start the stream and run it until it ends. If an error ends it, raise this error."""
    catalog = _Catalog(config.slot)
    publications = _publications(config)
    # Find a mistake in the output plugin's name or options before a slot is created. (Without a publication, the name may be that
    # of the server's plugin, which has its own options.)
    if config.output is not None and (publications or config.output not in names()):
        _output_plugin(config, catalog)
    # With this setting, names of tables, types etc. in values (regclass, …) are always qualified. (With publications, the slot has
    # to be one of pgoutput.)
    settings = {"search_path": ""} if publications and config.output is None else {}
    opening = OpeningWalsender(config.slot.parameters, settings, config.silence_limit_s or NO_LIMIT)
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.closing(catalog))
        stack.enter_context(opening)
        with initialising():
            slot = find_or_create_slot(catalog.connection, config.slot, publications)
            server_options, make_feeder = _plugin(config, catalog, slot, publications)
            if slot.plugin == "pgoutput" and pgoutput_options.setting(server_options, "binary") == "on":
                check_binary_forms(catalog.connection, publications)
            transactions = _transactions(config, slot, server_options)
            if slot.plugin == "pgoutput":
                _check_two_phase(config, slot, server_options)
            walsender, system = opening.wait()
            log.info("server %s, system %s, timeline %d", walsender.server_version, system.system_id, system.timeline)
            if config.expected_system is not None:
                expect_system(system, config.expected_system)
            if config.start_lsn:
                check_start(catalog.connection, config.start_lsn)
            _start(walsender, catalog, config, slot, server_options)
            if config.expected_lsn is not None:
                check_no_gap(catalog.connection, config.slot.slot, config.expected_lsn)
            guard = None
            if config.expected_system is not None:
                guard = guard_timeline(catalog.connection, system, config.expected_system)
        if make_feeder is None:
            catalog.close()
        progress = (StrictProgress if config.idle_positions else Progress)(
            time.monotonic(),
            feedback_interval_s=config.feedback_interval_s,
            status_interval_s=config.status_interval_s,
            silence_limit_s=config.silence_limit_s,
        )
        streamer = Streamer(
            walsender,
            progress,
            tracker_for(slot.plugin or "", server_options, progress, config.end_lsn, transactions),
            config.stream,
            confirmed_on_server=catalog.confirmed_flush_lsn,
            make_feeder=make_feeder,
            transactions=transactions,
            check=None if guard is None else guard.check,
        )
        timeout_s = min(CATALOG_TIMEOUT_S, config.silence_limit_s or NO_LIMIT)
        catalog.limit_waits(streamer.keep_serving, timeout_s)
        if guard is not None:
            stack.callback(guard.close)
            guard.serve_meanwhile(streamer.stay_alive, timeout_s)
        return streamer.run()


def _start(walsender: Walsender, catalog: _Catalog, config: StreamConfig, slot: Slot, options: Mapping[str, str | None]) -> None:
    """Start the stream. A standby first waits until the slot is free, and waits again if another process takes it first."""
    while True:
        if config.standby is not None:
            slot = wait_until_free(catalog.connection, config.slot.slot, config.standby)
        check_free(slot)
        try:
            start_stream(walsender, config.slot.slot, config.start_lsn, options)
        except CdcpipeError as ex:
            if config.standby is None or ex.exit_code != ExitCode.SLOT_IN_USE:
                raise
        else:
            log.info("streaming from slot %r (%s), start %s", slot.name, slot.plugin, format_lsn(config.start_lsn))
            return


def _publications(config: StreamConfig) -> list[str]:
    value = config.options.get("publication_names")
    return parse_publication_names(value) if value else list(config.slot.publications)


def _plugin(
    config: StreamConfig, catalog: _Catalog, slot: Slot, publications: list[str]
) -> tuple[dict[str, str | None], Callable[[Callable[[int, bytes], None]], Feeder] | None]:
    """Return the options for the server's plugin, and the function that makes the feeder (None: nothing is rendered here)."""
    options = dict(config.options)
    if slot.plugin != "pgoutput":
        if config.slot.publications:
            msg = f"replication slot {slot.name!r} has the plugin {slot.plugin}, which knows no publications"
            raise InitError(msg, hint="leave --publication out, or name a slot with pgoutput")
        if config.output not in (None, slot.plugin):
            msg = f"replication slot {slot.name!r} has the plugin {slot.plugin}: only pgoutput's can be rendered as {config.output}"
            raise InitError(msg, hint="name a slot with pgoutput, or create one: -c -P pgoutput")
        return {**config.output_options, **options}, None

    # A caller that passes the expected system has run `cdcpipe prepare`, which has reported the tables already.
    check_published(catalog.connection, publications, is_told=config.expected_system is not None)
    version = catalog.connection.server_version
    defaults: dict[str, str | None] = {"publication_names": publication_names(publications)}
    if config.output is None:
        return pgoutput_options.complete(defaults | options, version), None

    given = {name: value for name, value in options.items() if name in pgoutput_options.NAMES}
    plugin = _output_plugin(config, catalog)
    asked = defaults | dict(plugin.pgoutput_options) | given
    is_parallel = pgoutput_options.setting(asked, "streaming") == "parallel"
    completed = pgoutput_options.complete(asked, version)
    return completed, lambda write: Renderer(plugin, write, streaming_parallel=is_parallel)


def _output_plugin(config: StreamConfig, catalog: _Catalog) -> OutputPlugin:
    """Make the output plugin that runs in this process. Raises InvalidArgumentsError for options that it does not support."""
    assert config.output is not None
    options = {name: value for name, value in config.options.items() if name not in pgoutput_options.NAMES}
    plugin = load(config.output, {**config.output_options, **options}, catalog.query)
    if not config.whole_transactions:
        asked = {**plugin.pgoutput_options, **config.options}
        plugin.check_callbacks(option for option in ("two_phase", "streaming") if pgoutput_options.setting(asked, option) != "off")
    return plugin


def _transactions(config: StreamConfig, slot: Slot, options: Mapping[str, str | None]) -> Transactions | None:
    """Return the object that assembles whole transactions, or None if the configuration does not ask for it."""
    if not config.whole_transactions:
        return None
    if slot.plugin != "pgoutput":
        msg = f"replication slot {slot.name!r} has the plugin {slot.plugin}: only pgoutput's transactions can be put together"
        raise InitError(msg, hint="leave --whole-transactions out, or name a slot with pgoutput")
    return Transactions(
        streaming_parallel=pgoutput_options.setting(options, "streaming") == "parallel",
        spill_threshold=config.spill_threshold,
    )


def _check_two_phase(config: StreamConfig, slot: Slot, options: Mapping[str, str | None]) -> None:
    """Refuse a slot that sends prepared transactions without being asked. Warn if this stream switches a slot to them for good."""
    is_asked = pgoutput_options.setting(options, "two_phase") == "on"
    if slot.two_phase and not is_asked and not config.whole_transactions:
        msg = f"replication slot {slot.name!r} sends prepared transactions when they are prepared, which was not asked for"
        raise InitError(
            msg, hint="--two-phase takes them as they come, --whole-transactions when they are committed; or make a new slot"
        )
    if is_asked and not slot.two_phase:
        log.warning("replication slot %r sends prepared transactions when they are prepared from now on, for good", slot.name)


class _Catalog:
    """An ordinary connection for SQL, open while it is needed.

    The walsender's connection can't serve: it must run no SQL before it streams, and then it is busy streaming.
    """

    def __init__(self, config: SlotConfig) -> None:
        self._config = config
        self._connection: Connection | None = None
        self._within_s = NO_LIMIT
        self._while_waiting: Callable[[], None] | None = None

    @property
    def connection(self) -> Connection:
        """The connection. It is opened if it is not open."""
        if self._connection is None:
            self._connection = self._connect(self._within_s)
        return self._connection

    def _connect(self, within_s: float) -> Connection:
        return connect(self._config.parameters, within_s=within_s, while_waiting=self._while_waiting)

    def limit_waits(self, while_waiting: Callable[[], None], within_s: float) -> None:
        """From now on, limit each answer to ``within_s``, and call ``while_waiting`` repeatedly during each wait."""
        self._while_waiting, self._within_s = while_waiting, within_s
        if self._connection is not None:
            self._connection.serve_meanwhile(while_waiting, within_s)

    def close(self) -> None:
        """Close the connection. The next query opens it again."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def query(self, sql: str) -> Rows:
        """Run one query for an output plugin and return its rows. The connection stays open for the next query.

        A server or a network may drop an idle connection. If the connection is lost, the query is tried once more on a new one.
        """
        try:
            return self.connection.execute(sql)
        except ConnectionClosedError as ex:
            log.info("the catalog is asked on a new connection: %s", ex)
            self.close()
        try:
            return self.connection.execute(sql)
        except InitError as ex:
            raise ConnectionClosedError(f"the server's catalog can't be asked: {ex.message}", hint=ex.hint) from ex

    def confirmed_flush_lsn(self, within_s: float) -> int:
        """Return the slot's confirmed position on the server. Return 0 if there is none, or if the answer takes too long.

        ``within_s`` limits everything together: the connection, its settings and the query. A late query is not cancelled, because
        that would take longer, and because this connection is used no more.
        """
        deadline = time.monotonic() + within_s

        def raise_if_late() -> None:
            if time.monotonic() >= deadline:
                raise ConnectionClosedError(f"the server has not answered within {within_s:g} s", hint="check the network")

        self.limit_waits(raise_if_late, max(within_s, 0.0))
        try:
            slot = find_slot(self.connection, self._config.slot)
        except CdcpipeError as ex:
            log.info("the slot's position can't be asked for: %s", ex)
            self.close()
            return 0
        return int(slot.confirmed_flush_lsn or 0) if slot else 0


def poll_until_free(config: SlotConfig, poll: PollConfig) -> ExitCode:
    """Run poll mode. It uses no walsender, and needs no special role unless it creates a slot.

    If it creates a slot, the duration also limits the wait for running transactions.
    """
    within_s = NO_LIMIT if poll.duration_s is None else max(poll.duration_s, LOOK_S)
    with connected(config.parameters, within_s=within_s) as connection, initialising():
        if config.create:
            if poll.duration_s is not None:
                config = replace(config, create_timeout_s=max(poll.duration_s, 0.1))
            find_or_create_slot(connection, config, list(config.publications))
        wait_until_free(connection, config.slot, poll)
    return ExitCode.SUCCESS

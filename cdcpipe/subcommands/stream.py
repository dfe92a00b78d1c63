"""Leads from a configuration to a stream: connects, checks, creates what is missing, starts the stream and runs it.

This module checks before the first record everything that can be known by then. The server would report such problems late, in
mid-stream, or not at all.
"""

from __future__ import annotations

import contextlib
import logging
import select
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import TypeAlias

from cdcpipe.config import PollConfig, SlotConfig, StreamConfig, StreamOptions
from cdcpipe.errors import CdcpipeError, ConnectionClosedError, InitError, beside_the_stream
from cdcpipe.libpq.connection import Connection, Rows
from cdcpipe.libpq.waiting import NO_LIMIT, wait
from cdcpipe.libpq.walsender import Walsender
from cdcpipe.lsn import format_lsn
from cdcpipe.pgoutput import options as pgoutput_options
from cdcpipe.pgoutput.transactions import Transactions
from cdcpipe.pipe.exitcode import ExitCode
from cdcpipe.plugins import load, names
from cdcpipe.plugins.base import OutputPlugin, lacks_origins
from cdcpipe.plugins.renderer import Renderer
from cdcpipe.replication.boundaries import tracker_for
from cdcpipe.replication.commands import publication_names
from cdcpipe.replication.failover import loses_prepared
from cdcpipe.replication.opening import OpeningWalsender
from cdcpipe.replication.progress import Progress
from cdcpipe.replication.server import System, check_reaches, expect_system, is_standby
from cdcpipe.replication.session import connect, initialising
from cdcpipe.replication.slots import Slot, check_free, check_no_gap, check_no_gap_before, find_slot, start_stream
from cdcpipe.replication.strict_progress import StrictProgress
from cdcpipe.replication.tables import PublishedTable, check_binary_forms
from cdcpipe.replication.timeline_guard import TimelineGuard, guard_timeline
from cdcpipe.streaming.consumer import CommandsIn
from cdcpipe.streaming.metrics import StreamMetrics
from cdcpipe.streaming.receiver import Feeder
from cdcpipe.streaming.streamer import Streamer, closed_stdin_error, closed_stdout_error
from cdcpipe.subcommands.creation import (
    asked_publications,
    check_new_slot,
    check_plugin,
    check_published,
    find_or_create_slot,
    telling_of_new_slot,
)
from cdcpipe.subcommands.poll import wait_for_copy, wait_until_free

__all__ = ["CATALOG_TIMEOUT_S", "stream"]

log = logging.getLogger(__name__)

MakeFeeder: TypeAlias = Callable[[Callable[[int, bytes], None]], Feeder]

CATALOG_TIMEOUT_S = 10.0
"""How long a stream waits for the catalog. Two tries take much less than the default wal_sender_timeout of a server."""


def stream(config: StreamConfig, metrics: StreamMetrics | None = None) -> ExitCode:
    """Connect, check, start the stream and run it until it ends. If an error ends it, raise this error.

    ``metrics`` follow the stream.
    """
    catalog = _Catalog(config.slot)
    publications = asked_publications(config)
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
        commands = stack.enter_context(contextlib.closing(CommandsIn(config.stream.command_fd)))
        try:
            with initialising():
                started = _prepare_until_started(config, catalog, opening, commands, publications)
        except _Quit:
            return ExitCode.SUCCESS
        walsender, slot, guard = started.walsender, started.slot, started.guard
        if started.make_feeder is None:
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
            tracker_for(slot.plugin or "", started.options, progress, config.end_lsn, started.transactions),
            config.stream,
            commands,
            confirmed_on_server=catalog.confirmed_flush_lsn,
            make_feeder=started.make_feeder,
            transactions=started.transactions,
            check=None if guard is None else guard.check,
        )
        if metrics is not None:
            metrics.follow(streamer)
        timeout_s = min(CATALOG_TIMEOUT_S, config.silence_limit_s or NO_LIMIT)
        catalog.limit_waits(streamer.keep_serving, timeout_s)
        if guard is not None:
            stack.callback(guard.close)
            guard.serve_meanwhile(streamer.stay_alive, timeout_s)
        return streamer.run()


@dataclass(frozen=True, slots=True)
class _Started:
    """A stream that the server has started, and what it needs here."""

    walsender: Walsender
    slot: Slot
    options: Mapping[str, str | None]
    make_feeder: MakeFeeder | None
    transactions: Transactions | None
    guard: TimelineGuard | None


class _SlotChangedError(Exception):
    """While a standby waited, the slot changed: its checks and the stream's options have to be decided again."""


@dataclass(frozen=True, slots=True)
class _Standby:
    """How a standby waits: for its slot's copy, until the slot is free, and again. The duration limits all of this together."""

    poll: PollConfig
    started_at: float
    sleep: Callable[[float], None]

    def wait_for_copy(self, connection: Connection, name: str) -> None:
        """Do as `poll.wait_for_copy`."""
        wait_for_copy(connection, name, self.poll, started_at=self.started_at, sleep=self.sleep)

    def wait_until_free(self, connection: Connection, name: str) -> Slot:
        """Do as `poll.wait_until_free`."""
        return wait_until_free(connection, name, self.poll, started_at=self.started_at, sleep=self.sleep)


def _prepare_until_started(
    config: StreamConfig, catalog: _Catalog, opening: OpeningWalsender, commands: CommandsIn, publications: list[str]
) -> _Started:
    """Do as `_prepare_and_start`, with the slot as it is when the stream starts."""
    standby = None
    if config.standby is not None:
        standby = _Standby(config.standby, time.monotonic(), partial(_serve_consumer, commands, config.stream))
    while True:
        try:
            return _prepare_and_start(config, catalog, opening, standby, publications)
        except _SlotChangedError:
            log.info("replication slot %r has changed meanwhile; checking it again", config.slot.slot)


def _prepare_and_start(
    config: StreamConfig, catalog: _Catalog, opening: OpeningWalsender, standby: _Standby | None, publications: list[str]
) -> _Started:
    """Check everything, create what is missing, and start the stream."""
    connection = catalog.connection
    slot = find_or_create_slot(
        connection,
        config.slot,
        publications,
        check=lambda tables: _check_before_creation(config, catalog, opening, publications, tables),
        await_copy=None if standby is None else lambda: _await_copy(config, connection, opening, standby),
    )
    with telling_of_new_slot(slot):
        check_plugin(config, slot.plugin)
        tables: Sequence[PublishedTable] = ()
        if slot.plugin == "pgoutput":
            # A caller that passes the expected system has run `cdcpipe prepare`, which has reported the tables already.
            tables = check_published(connection, publications, quiet=config.expected_system is not None)
        options, make_feeder = _plugin(config, catalog, slot.plugin, publications, tables)
        if slot.plugin == "pgoutput":
            _check_two_phase(config, slot, options, connection.server_version)
        transactions = _transactions(config, slot, options)
        start_lsn = 0 if transactions is not None and _sends_prepared(slot, options) else config.start_lsn
        # The records can be taken many at once (cdcpipe/streaming/wal_data.py).
        has_runs = slot.plugin == "pgoutput" and make_feeder is None and config.stream.is_plain and find_spec("numpy") is not None
        walsender, system = _start(config, connection, opening, standby, start_lsn, slot, options, may_be_direct=has_runs)
        if config.expected_lsn is not None:
            check_no_gap(connection, config.slot.slot, config.expected_lsn)
        guard = None
        if config.expected_system is not None:
            guard = guard_timeline(connection, system, config.expected_system)
        return _Started(walsender, slot, options, make_feeder, transactions, guard)


def _await_copy(config: StreamConfig, connection: Connection, opening: OpeningWalsender, standby: _Standby) -> None:
    """Wait until the standby has a copy of the slot, or is promoted. Reads commands meanwhile, as `_start` does."""
    _checked_server(config, connection, opening)
    standby.wait_for_copy(connection, config.slot.slot)
    if not is_standby(connection):
        opening.reopen()  # as in `_start`


def _check_before_creation(
    config: StreamConfig, catalog: _Catalog, opening: OpeningWalsender, publications: list[str], tables: Sequence[PublishedTable]
) -> None:
    """Check for a slot that is to be created what `_prepare_and_start` checks for one that exists."""
    plugin = config.slot.plugin
    check_new_slot(config, publications)
    _plugin(config, catalog, plugin, publications, tables)
    _checked_server(config, catalog.connection, opening)
    if config.expected_lsn is not None:
        check_no_gap_before(catalog.connection, config.slot.slot, config.expected_lsn)


def _checked_server(config: StreamConfig, connection: Connection, opening: OpeningWalsender) -> tuple[Walsender, System]:
    """Wait for the walsender, and check that the server is the expected one, and that its WAL has what the consumer has.

    A consumer that names both positions goes on at ``start_lsn``. Its ``expected_lsn`` may lie further on, with no changes between.
    """
    walsender, system = opening.wait(connection)
    if config.expected_system is not None:
        expect_system(system, config.expected_system)
    if config.start_lsn:
        check_reaches(connection, config.start_lsn, "--startpos")
    elif config.expected_lsn is not None:
        check_reaches(connection, config.expected_lsn, "--expect-lsn")
    return walsender, system


def _logged_server(config: StreamConfig, connection: Connection, opening: OpeningWalsender) -> tuple[Walsender, System]:
    """Do as `_checked_server`, and log which server it is."""
    walsender, system = _checked_server(config, connection, opening)
    log.info("server %s, system %s, timeline %d", walsender.server_version, system.system_id, system.timeline)
    return walsender, system


def _start(
    config: StreamConfig,
    connection: Connection,
    opening: OpeningWalsender,
    standby: _Standby | None,
    start_lsn: int,
    slot: Slot,
    options: Mapping[str, str | None],
    *,
    may_be_direct: bool,
) -> tuple[Walsender, System]:
    """Start the stream; at the slot's position if ``start_lsn`` is 0.

    A standby first waits until the slot is free, and waits again if another process takes it first. It reads its commands
    meanwhile. One without stdin would end as soon as it has the slot, so it ends at once.

    Raises _SlotChangedError if the slot is not the one that was checked any more. Its last consumer may have made it send prepared
    transactions when they are prepared, for good; or somebody dropped it and made it anew.
    """
    walsender, system = _logged_server(config, connection, opening)
    form = slot.plugin, slot.two_phase
    while True:
        if standby is not None:
            was_in_recovery = slot.in_recovery
            slot = standby.wait_until_free(connection, config.slot.slot)
            if was_in_recovery and not slot.in_recovery:
                # The server ends a walsender from before its promotion when a stream starts on it.
                opening.reopen()
                walsender, system = _logged_server(config, connection, opening)
            if (slot.plugin, slot.two_phase) != form:
                raise _SlotChangedError
        check_free(slot)
        try:
            try:
                start_stream(walsender, config.slot.slot, start_lsn, options, may_be_direct=may_be_direct)
            except ConnectionClosedError as ex:
                if standby is None:
                    raise
                # The walsender was idle during the wait. A proxy, a firewall or an administrator may have ended it unnoticed.
                log.info("the connection for the stream was lost during the wait: %s; starting the stream on a new one", ex)
                opening.reopen()
                walsender, system = _logged_server(config, connection, opening)
                start_stream(walsender, config.slot.slot, start_lsn, options, may_be_direct=may_be_direct)
        except CdcpipeError as ex:
            if standby is None or ex.exit_code != ExitCode.SLOT_IN_USE:
                raise
        else:
            log.info("streaming from slot %r (%s), start %s", slot.name, slot.plugin, format_lsn(config.start_lsn))
            return walsender, system


class _Quit(BaseException):
    """Ends a standby for the command ``q``."""


def _serve_consumer(commands: CommandsIn, options: StreamOptions, pause_s: float) -> None:
    """Pause, and read commands meanwhile.

    Raises _Quit for ``q``, CommandError for what is no command, and CommandClosedError if the stream needs commands, and none can
    come. Raises OutputError if nobody reads the records any more: this process could not stream after it took over.
    """

    def check_reader() -> None:
        if wait(options.out_fd, 0, deadline=0.0):  # without events to wait for, only errors are reported
            raise closed_stdout_error()

    deadline = time.monotonic() + pause_s
    is_open = not commands.is_closed
    while is_open and wait(commands.fd, select.POLLIN, deadline, check_reader):
        commands.read(None)
        if commands.is_quit:
            raise _Quit
        is_open = not commands.is_closed
        if not is_open and options.needs_commands:
            raise closed_stdin_error()
    # No commands can come any more, or the pause is over.
    if wait(options.out_fd, 0, deadline):
        raise closed_stdout_error()


def _plugin(
    config: StreamConfig, catalog: _Catalog, slot_plugin: str | None, publications: list[str], tables: Sequence[PublishedTable]
) -> tuple[dict[str, str | None], MakeFeeder | None]:
    """Return the options for the server's plugin, and the function that makes the feeder (None: nothing is rendered here).

    Raises InitError for options that pgoutput does not take, and if ``tables`` can't be sent with them.
    """
    options = dict(config.options)
    if slot_plugin != "pgoutput":
        return {**config.output_options, **options}, None
    asked: dict[str, str | None] = {"publication_names": publication_names(publications)}
    plugin = None
    if config.output is not None:
        plugin = _output_plugin(config, catalog)
        asked |= plugin.pgoutput_options
        options = {name: value for name, value in options.items() if name in pgoutput_options.NAMES}
    completed = pgoutput_options.complete(asked | options, catalog.connection.server_version)
    if pgoutput_options.setting(completed, "binary") == "on":
        check_binary_forms(catalog.connection, tables)
    if plugin is None:
        return completed, None
    is_parallel = pgoutput_options.setting(completed, "streaming") == "parallel"
    return completed, lambda write: Renderer(plugin, write, streaming_parallel=is_parallel)


def _output_plugin(config: StreamConfig, catalog: _Catalog) -> OutputPlugin:
    """Make the output plugin that runs in this process. Raises InvalidArgumentsError for options that it does not support."""
    assert config.output is not None
    options = {name: value for name, value in config.options.items() if name not in pgoutput_options.NAMES}
    plugin = load(config.output, {**config.output_options, **options}, catalog.query)
    asked = {**plugin.pgoutput_options, **config.options}
    has_streaming = pgoutput_options.setting(asked, "streaming") != "off"
    if plugin.needs_origin is not None and has_streaming and pgoutput_options.setting(asked, "origin") != "none":
        hint = "leave out --streaming (or -o streaming), or let the server leave out other origins: --origin none (PostgreSQL 16)"
        raise lacks_origins(plugin, hint)
    if not config.whole_transactions:
        plugin.check_callbacks(option for option in ("two_phase", "streaming") if pgoutput_options.setting(asked, option) != "off")
    return plugin


def _sends_prepared(slot: Slot, options: Mapping[str, str | None]) -> bool:
    """Return whether the server sends prepared transactions when they are prepared."""
    return slot.two_phase or pgoutput_options.setting(options, "two_phase") == "on"


def _transactions(config: StreamConfig, slot: Slot, options: Mapping[str, str | None]) -> Transactions | None:
    """Return the object that assembles whole transactions, or None if the configuration does not ask for it."""
    if not config.whole_transactions:
        return None
    return Transactions(
        streaming_parallel=pgoutput_options.setting(options, "streaming") == "parallel",
        spill_threshold=config.spill_threshold,
        start_lsn=config.start_lsn if _sends_prepared(slot, options) else 0,
    )


def _check_two_phase(config: StreamConfig, slot: Slot, options: Mapping[str, str | None], server_version: int) -> None:
    """Refuse a slot that sends prepared transactions without being asked. Warn if this stream switches a slot to them for good."""
    is_asked = pgoutput_options.setting(options, "two_phase") == "on"
    if slot.two_phase and not is_asked and not config.whole_transactions:
        msg = f"replication slot {slot.name!r} sends prepared transactions when they are prepared, which was not asked for"
        raise InitError(
            msg, hint="--two-phase takes them as they come, --whole-transactions when they are committed; or make a new slot"
        )
    if is_asked and not slot.two_phase:
        log.warning("replication slot %r sends prepared transactions when they are prepared from now on, for good", slot.name)
        if loses_prepared(server_version, slot):
            log.warning(
                "standbys of PostgreSQL 17 do not know from which position on it does: a standby that is promoted sends no rows of"
                " a transaction that is prepared now (SELECT gid FROM pg_prepared_xacts) and committed after the promotion; end"
                " such transactions before a failover"
            )


class _Catalog:
    """An ordinary connection for SQL, open while it is needed.

    The walsender's connection can't serve: it must run no SQL before it streams, and then it is busy streaming.
    """

    def __init__(self, config: SlotConfig) -> None:
        self._slot, self._parameters = config.slot, config.parameters
        self._connection: Connection | None = None
        self._within_s = NO_LIMIT
        self._while_waiting: Callable[[], None] | None = None

    @property
    def connection(self) -> Connection:
        """The connection. It is opened if it is not open."""
        if self._connection is None:
            self._connection = self._connect(self._within_s)
            # The next connection goes to the same one of several servers: another one may lag, and has its own slots.
            self._parameters = self._connection.parameters_here
        return self._connection

    def _connect(self, within_s: float) -> Connection:
        return connect(self._parameters, within_s=within_s, while_waiting=self._while_waiting)

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

    @beside_the_stream()
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
            slot = find_slot(self.connection, self._slot)
        except CdcpipeError as ex:
            log.info("the slot's position can't be asked for: %s", ex)
            self.close()
            return 0
        return int(slot.confirmed_flush_lsn or 0) if slot else 0

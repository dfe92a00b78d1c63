"""Does everything that precedes a stream, and reports the facts; exports a snapshot of the database whose position is known."""

from __future__ import annotations

import json
import secrets
import select
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from cdcpipe.config import SlotConfig
from cdcpipe.errors import CommandClosedError, CommandError, InitError, UnpublishedTableError
from cdcpipe.libpq.connection import Connection
from cdcpipe.libpq.parameters import effective_parameters, network_defaults
from cdcpipe.libpq.walsender import Walsender
from cdcpipe.lsn import LSN
from cdcpipe.pipe.input import read_up_to
from cdcpipe.replication.opening import OpeningWalsender
from cdcpipe.replication.publications import check_named, check_publications
from cdcpipe.replication.server import System, current_lsn, current_time, expect_system_id, is_standby
from cdcpipe.replication.session import connected, initialising
from cdcpipe.replication.slot_creation import ExportedSnapshot, NewSlot, export_snapshot
from cdcpipe.replication.slots import Slot, check_free
from cdcpipe.replication.table_parts import TableParts, table_parts
from cdcpipe.replication.tables import PublishedTable, check_readable, published_tables
from cdcpipe.replication.timelines import TimelineEnd, timeline_history
from cdcpipe.subcommands.creation import check_published, find_or_create_slot, telling_of_new_slot
from cdcpipe.units import few

__all__ = ["Export", "Preparation", "exporting", "prepare", "read_stream_arguments"]

_READ_BYTES = 4096
_LINGER_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Preparation:
    """The slot, found or just created, and the other facts found before streaming.

    ``end_lsn`` lies after every transaction that had committed by then. ``connection`` has libpq's parameters, without a password,
    with which other processes connect to the one server that was asked.
    """

    server_version: int
    system: System
    timeline_history: list[TimelineEnd]
    database: str
    connection: Mapping[str, str]
    end_lsn: LSN
    slot: Slot
    publications: list[str]
    tables: list[PublishedTable]
    parts: Mapping[int, TableParts] | None = None
    """By the tables' OIDs, if they were asked for. Each of ``tables`` has some."""


@dataclass(frozen=True, slots=True)
class Export:
    """A snapshot that other sessions on the server can read.

    With ``is_slot_new`` the snapshot is that of the slot's beginning. Otherwise it is current, somewhere in the slot's stream.
    ``snapshot_time`` is the server's time just after the snapshot was exported: its transactions committed before this time.
    """

    snapshot: ExportedSnapshot
    snapshot_time: str
    is_slot_new: bool
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
            data = read_up_to(fd, _READ_BYTES)
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


def prepare(config: SlotConfig, *, in_use: bool = False, quiet: bool = False, with_parts: bool = False) -> Preparation:
    """Do everything that precedes streaming from a pgoutput slot, and return the facts found.

    With ``in_use``, another connection may be streaming from the slot. With ``quiet``, it does not warn of tables on which the
    server refuses commands. (`PublishedTable.refused` has these commands.) ``with_parts`` asks for the tables' parts, too.
    """
    with OpeningWalsender(config.parameters) as opening, connected(config.parameters) as connection, initialising():

        def check(_: list[PublishedTable]) -> None:
            _check_before_creation(config)
            opening.wait(connection)

        if config.system_ids:
            _, system = opening.wait(connection)
            expect_system_id(system, config.system_ids)
        slot = find_or_create_slot(connection, config, list(config.publications), check=check)
        with telling_of_new_slot(slot):
            walsender, system = opening.wait(connection)
            server = system, timeline_history(walsender, system.timeline)
            found = _preparation(connection, config, slot, server, in_use=in_use, quiet=quiet)
            if with_parts:
                parts = table_parts(connection, config.publications)
                tables = [each for each in found.tables if each.relation_id in parts]  # the others were unpublished meanwhile
                # What the parts show lies before end_lsn, too.
                found = replace(found, tables=tables, parts=parts, end_lsn=current_lsn(connection))
            return found


def _check_before_creation(config: SlotConfig) -> None:
    """Check for a slot that is to be created what `_preparation` checks for one that exists."""
    _require_pgoutput(config.slot, config.plugin, "would get")
    check_named(config.publications)


def _require_pgoutput(slot: str, plugin: str | None, verb: str = "has") -> None:
    if plugin != "pgoutput":
        msg = f"replication slot {slot!r} {verb} the plugin {plugin}; this needs one with pgoutput"
        raise InitError(msg, hint="name another slot, or create one with -c -P pgoutput")


def _preparation(
    connection: Connection,
    config: SlotConfig,
    slot: Slot,
    server: tuple[System, list[TimelineEnd]],
    *,
    in_use: bool,
    quiet: bool,
) -> Preparation:
    """Check everything that a stream from the slot needs, and return the facts. ``in_use``: another connection may use it."""
    _require_pgoutput(slot.name, slot.plugin)
    if not in_use:
        check_free(slot)
    tables = check_published(connection, list(config.publications), quiet=quiet)
    return Preparation(
        server_version=connection.server_version,
        system=server[0],
        timeline_history=server[1],
        database=connection.database,
        connection=_for_other_processes(config.parameters, connection),
        end_lsn=current_lsn(connection),
        slot=slot,
        publications=list(config.publications),
        tables=tables,
    )


@contextmanager
def exporting(config: SlotConfig, readable: Sequence[str] = (), *, quiet: bool = False) -> Iterator[tuple[Preparation, Export]]:
    """Prepare as ``prepare`` does, and export a snapshot that other sessions can read while the context is open.

    ``readable`` names published tables ("schema.name"; "*": all). If one is not published, or if this user may not read one,
    InitError is raised before a slot is created.

    If the slot is created now, the snapshot is that of its beginning. If the slot exists, a temporary slot is created beside it, to
    find the snapshot's position in the WAL.
    """
    with OpeningWalsender(config.parameters) as opening, connected(config.parameters) as connection:
        made: list[ExportedSnapshot] = []

        def check_before_creation(tables: list[PublishedTable]) -> None:
            _check_before_creation(config)
            check(tables)

        def check(tables: list[PublishedTable]) -> None:
            if readable:
                check_readable(connection, _named(tables, readable))

        def export(new: NewSlot, *, is_temporary: bool = False) -> None:
            made.append(export_snapshot(walsender, new, is_temporary=is_temporary))

        with initialising():
            walsender, system = opening.wait(connection)
            # Any later command on this connection would end the exported snapshot.
            server = system, timeline_history(walsender, system.timeline)
            slot = find_or_create_slot(connection, config, list(config.publications), make=export, check=check_before_creation)
            if not slot.is_new:
                check_publications(connection, config.publications)
                check(published_tables(connection, config.publications))
                name = f"cdcpipe_snapshot_{secrets.token_hex(6)}"
                export(NewSlot(name, "pgoutput", False, is_standby(connection), config.create_timeout_s), is_temporary=True)
            with telling_of_new_slot(slot):
                # Not earlier: the snapshot has the transactions that ended while the server waited for them.
                snapshot_time = current_time(connection)
                # It does not matter whether another connection uses the slot, because the snapshot comes from a temporary one.
                preparation = _preparation(connection, config, slot, server, in_use=True, quiet=quiet)
        yield preparation, Export(made[0], snapshot_time, slot.is_new, walsender)


def _named(tables: Sequence[PublishedTable], names: Sequence[str]) -> list[PublishedTable]:
    """Return those of the published tables that ``names`` has ("schema.name"; "*": all). Raises UnpublishedTableError."""
    published = [f"{table.schema}.{table.name}" for table in tables]
    missing = [name for name in names if name not in published and name != "*"]
    if missing:
        raise UnpublishedTableError(
            f"{UnpublishedTableError.BEGINNING}{few(missing)}; the published tables are: {few(published) or 'none'}",
            hint="ALTER PUBLICATION … ADD TABLE; of a partitioned table, either the root or the leaves are published",
        )
    return [table for table, name in zip(tables, published, strict=True) if "*" in names or name in names]


def _for_other_processes(given: Mapping[str, str], connection: Connection) -> dict[str, str]:
    """Return libpq's parameters with which other processes connect to the same server, no less protected; no password.

    These processes may be on machines with another environment, and without the service file. They may set more ``options``: libpq
    takes the options of the environment or of a service file only if none are given with a connection.
    """
    effective = effective_parameters(given)
    options = {name: value for name, value in effective.items() if name == "options"}
    without_address = network_defaults(effective) | {name: value for name, value in given.items() if name != "hostaddr"}
    return without_address | options | connection.protection | connection.address


def read_stream_arguments(fd: int) -> list[str]:
    r"""Read a line from ``fd`` with the command line of a stream, as a JSON array. Nothing after the line is read.

    The next bytes on ``fd`` are the stream's commands. Raises CommandClosedError at the end of ``fd``, and CommandError for another
    line. Example: ``["-S", "shop_cdc", "--publication", "shop", "-H"]\n``.
    """
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = read_up_to(fd, 1)
        if not byte:
            raise CommandClosedError("stdin was closed before it had the arguments of a stream")
        line += byte
    try:
        arguments: Any = json.loads(line)
    except ValueError:
        arguments = None
    given = arguments if isinstance(arguments, list) else []
    words = [each for each in given if isinstance(each, str)]
    if not words or words != given or not words[0].startswith("-"):  # a subcommand would not begin with -
        raise CommandError(
            "the line on stdin has no arguments of a stream", hint='write a JSON array of options, like ["-S", "shop_cdc", "-H"]'
        )
    return words

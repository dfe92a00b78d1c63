"""``cdcpipe prepare``: does everything that precedes streaming, and prints the facts found as JSON."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import click
import cloup

from cdcpipe.lsn import format_lsn
from cdcpipe.pipe.exitcode import ExitCode
from cdcpipe.printable import json_text
from cdcpipe.subcommands.creation import telling_of_new_slot
from cdcpipe.subcommands.prepare import Preparation, exporting, prepare, read_stream_arguments
from cdcpipe.units import parse_seconds
from cli.options import CONTEXT_SETTINGS, connection_options, slot_config, slot_options

__all__ = ["command"]


_EXAMPLE = """\b
Example:
  cdcpipe prepare -d shop -S shop_cdc --publication shop -c
"""


@cloup.command(
    "prepare",
    context_settings=CONTEXT_SETTINGS,
    short_help="Make slot and publication, check them, and print what is there.",
    epilog=_EXAMPLE,
)
@connection_options
@slot_options(is_required=True)
@cloup.option("--replace-lost", is_flag=True, help="With -c, drop a slot that is lost (wal_status), and make it anew.")
@cloup.option(
    "--expect-system-id",
    "system_ids",
    multiple=True,
    metavar="ID",
    help="Refuse a server with another system identifier, before anything is made; repeatable.",
)
@cloup.option("--in-use", is_flag=True, help="Accept a slot that another process streams from.")
@cloup.option("--parts", "with_parts", is_flag=True, help="Print what publishes each table, and which relations hold its rows.")
@cloup.option("-q", "--quiet", is_flag=True, help="Do not warn of tables on which the server refuses commands.")
@cloup.option_group(
    "Snapshot",
    cloup.option(
        "--export-snapshot",
        is_flag=True,
        help="Export a snapshot of the database for other sessions, print its name, and hold it until stdin ends or has a line q.",
    ),
    cloup.option(
        "--linger",
        type=parse_seconds,
        metavar="SECS",
        default="0",
        show_default=True,
        help="Hold the snapshot this much longer after the end of stdin, when a named pipe may be opened again.",
    ),
    cloup.option(
        "--check-select",
        "readable",
        multiple=True,
        metavar="SCHEMA.NAME|*",
        help="Refuse, before a slot is made, if the table is not published, or this user may not read it (*: all); repeatable.",
    ),
)
@cloup.option_group(
    "Stream",
    cloup.option(
        "--then-stream",
        is_flag=True,
        help="Print the object on one line, read the arguments of a stream from stdin, as a JSON array on one line, and run it.",
    ),
)
@click.pass_context
def command(
    ctx: click.Context,
    /,
    *,
    export_snapshot: bool,
    linger: float,
    readable: tuple[str, ...],
    replace_lost: bool,
    system_ids: tuple[str, ...],
    in_use: bool,
    with_parts: bool,
    quiet: bool,
    then_stream: bool,
    **options: Any,
) -> ExitCode | None:
    """Check everything that a stream from a pgoutput slot needs, and print what was found as one JSON object.

    With -c, make the publications and the slot first. The exit codes are those of streaming.
    """
    if export_snapshot and in_use:
        raise click.UsageError("--export-snapshot and --in-use can't be used together")
    if linger and not export_snapshot:
        raise click.UsageError("--linger is for --export-snapshot")
    if readable and not export_snapshot:
        raise click.UsageError("--check-select is for --export-snapshot")
    if with_parts and export_snapshot:
        raise click.UsageError("--export-snapshot and --parts can't be used together")
    if system_ids and export_snapshot:
        raise click.UsageError("--export-snapshot and --expect-system-id can't be used together")
    if then_stream and (export_snapshot or in_use):
        raise click.UsageError("--then-stream goes with neither --export-snapshot nor --in-use")
    config = replace(slot_config(**options), replace_lost=replace_lost, system_ids=system_ids)
    if replace_lost and not config.create:
        raise click.UsageError("--replace-lost is for -c")
    if not export_snapshot:
        found = prepare(config, in_use=in_use, quiet=quiet, with_parts=with_parts)
        _print(found, indent=None if then_stream else 2)
        if not then_stream:
            return None
        result = ctx.find_root().command.main(read_stream_arguments(0), prog_name="cdcpipe", standalone_mode=False)
        return result if isinstance(result, ExitCode) else None
    with exporting(config, readable, quiet=quiet) as (found, export):
        exported = {
            "snapshot": export.snapshot.name,
            "consistent_point": format_lsn(export.snapshot.consistent_point),
            "snapshot_time": export.snapshot_time,
            "slot_created": export.is_slot_new,
        }
        _print(found, exported)
        export.hold(0, linger)
    return None


def _print(found: Preparation, more: Mapping[str, Any] | None = None, indent: int | None = 2) -> None:
    with telling_of_new_slot(found.slot):
        click.echo(json_text(_report(found) | dict(more or {}), indent))
        sys.stdout.flush()


def _report(found: Preparation) -> dict[str, Any]:
    slot = found.slot
    return {
        "server_version": found.server_version,
        "system_id": found.system.system_id,
        "timeline": found.system.timeline,
        "timeline_history": [{"timeline": end.timeline, "end_lsn": str(end.end_lsn)} for end in found.timeline_history],
        "database": found.database,
        "connection": dict(found.connection),
        "wal_lsn": str(found.end_lsn),
        "is_standby": slot.in_recovery,
        "slot": {
            "name": slot.name,
            "plugin": slot.plugin,
            "active": slot.active,
            "confirmed_flush_lsn": format_lsn(slot.confirmed_flush_lsn or 0),
            "restart_lsn": format_lsn(slot.restart_lsn or 0),
            "wal_status": slot.wal_status,
            "created": slot.is_new,
            "two_phase": slot.two_phase,
            "failover": slot.failover,
            "synced": slot.synced,
            "temporary": slot.temporary,
        },
        "publications": found.publications,
        "tables": [
            {
                "schema": table.schema,
                "name": table.name,
                "relation_id": table.relation_id,
                "replica_identity": table.replica_identity,
                "primary_key": list(table.primary_key),
                "has_deferrable_key": table.has_deferrable_key,
                "identity": list(table.identity),
                "unpublished_key": list(table.unpublished_key),
                "refused": list(table.refused),
                "unpublished_generated": list(table.unpublished_generated),
                "columns": [asdict(column) for column in table.columns],
                "parents": [{"schema": schema, "name": name} for schema, name in table.parents],
                **({} if found.parts is None else asdict(found.parts[table.relation_id])),
            }
            for table in found.tables
        ],
    }

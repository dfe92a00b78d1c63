"""``cdcpipe slot``: prints the positions of a slot and of its server as JSON lines, once or repeatedly."""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import cloup

from cdcpipe.lsn import LSN
from cdcpipe.replication.session import connected
from cdcpipe.subcommands.slot import SlotPosition, find_position, find_system_id
from cdcpipe.units import seconds_from
from cli.interrupt import Interrupted
from cli.options import CONTEXT_SETTINGS, connection_options, connection_parameters_of, slot_option

if TYPE_CHECKING:
    from cdcpipe.libpq.connection import Connection

__all__ = ["command"]


_EXAMPLE = """\b
Example:
  cdcpipe slot -d shop -S shop_cdc
"""


@cloup.command(
    "slot",
    context_settings=CONTEXT_SETTINGS,
    short_help="Print the positions of a slot and its server, once or repeatedly.",
    epilog=_EXAMPLE,
)
@connection_options
@cloup.option_group(
    "Slot",
    slot_option,
    cloup.option(
        "--watch",
        type=seconds_from(0.1),
        metavar="SECS",
        help="Print a line again and again, this long after the last one: at least 0.1.",
    ),
)
def command(*, slot: str, watch: float | None, **options: Any) -> None:
    """Print the positions of a slot and its server, as one JSON object in one line.

    The user does not need the REPLICATION attribute.
    """
    with connected(connection_parameters_of(**options)) as connection:
        system_id = find_system_id(connection)
        _print(connection, slot, system_id)
        if watch is None:
            return
        with suppress(Interrupted):  # a signal ends --watch normally
            while True:
                time.sleep(watch)
                _print(connection, slot, system_id)


def _print(connection: Connection, slot: str, system_id: str | None) -> None:
    sys.stdout.write(json.dumps(_report(system_id, find_position(connection, slot))) + "\n")
    sys.stdout.flush()


def _report(system_id: str | None, found: SlotPosition) -> dict[str, Any]:
    slot = found.slot
    return {
        "system_id": system_id,
        "slot": slot.name,
        "plugin": slot.plugin,
        "database": slot.database,
        "active": slot.active,
        "active_pid": slot.active_pid,
        "wal_lsn": str(found.wal_lsn),
        "sent_lsn": _text(found.sent_lsn),
        "confirmed_flush_lsn": _text(slot.confirmed_flush_lsn),
        "restart_lsn": _text(slot.restart_lsn),
        "wal_status": slot.wal_status,
        "safe_wal_bytes": slot.safe_wal_bytes,
        "failover": slot.failover,
        "synced": slot.synced,
    }


def _text(lsn: LSN | None) -> str | None:
    return None if lsn is None else str(lsn)

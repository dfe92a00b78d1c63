"""``cdcpipe doctor``: asks the server for facts, and judges them. It changes nothing, and opens or locks no table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from cdcpipe.doctor import failover_checks, server_checks, table_checks
from cdcpipe.doctor.facts import Asked, Facts
from cdcpipe.doctor.findings import Finding, Level, examine
from cdcpipe.doctor.survey import survey
from cdcpipe.errors import CdcpipeError
from cdcpipe.lsn import format_lsn
from cdcpipe.replication.session import connected, initialising
from cdcpipe.subcommands.slot import find_system_id

__all__ = ["CHECKS", "CONNECTION", "Diagnosis", "doctor"]

CONNECTION = "server.connection"
"""The name of the first check: whether the server can be asked at all."""

_QUICK_CHECKS = MappingProxyType({**server_checks.CHECKS, **failover_checks.CHECKS})
CHECKS = MappingProxyType({**_QUICK_CHECKS, **table_checks.CHECKS})
"""All checks by name, in the order in which their findings are shown."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The findings, and some facts for programs. The facts are None if no server could be asked."""

    findings: list[Finding]
    server: Mapping[str, Any] | None = field(default=None)


def doctor(parameters: Mapping[str, str], asked: Asked, *, quick: bool = False) -> Diagnosis:
    """Examine the server and return the findings. With ``quick`` it leaves out publications, tables and the rate of WAL.

    A server that can't be asked is a finding, not an error.
    """
    try:
        with connected(parameters) as connection, initialising():
            facts = survey(connection, asked, quick=quick)
            system_id = find_system_id(connection)
    except CdcpipeError as ex:
        return Diagnosis([Finding(Level.ERROR, CONNECTION, None, ex.message, "nothing can be asked or streamed", ex.hint)])
    address = Finding(Level.OK, CONNECTION, None, f"connected to {facts.server.address} as {facts.role.name}", None, None)
    return Diagnosis([address, *examine(_QUICK_CHECKS if quick else CHECKS, facts)], _summary(facts, system_id, quick=quick))


def _summary(facts: Facts, system_id: str | None, *, quick: bool) -> dict[str, Any]:
    """Return the facts that a calling program may need. What nobody looked at is None."""
    rate, confirmed_lsn = facts.wal_rate, None if facts.slot is None else facts.slot.confirmed_flush_lsn
    tables = facts.tables if facts.asked.publications and not quick else None
    return {
        "version": facts.server.version,
        "system_id": system_id,
        "timeline": facts.timeline,
        "is_standby": facts.server.is_standby,
        "slot_exists": facts.slot is not None,
        "confirmed_flush_lsn": None if confirmed_lsn is None else format_lsn(confirmed_lsn),
        "wal_bytes_per_second": None if rate is None else round(rate.highest),
        "tables": None if tables is None else len(tables),
        "table_bytes": None if tables is None else sum(table.size_bytes for table in tables),
    }

"""A slot as a server shows it, for tests that need no server."""

from cdcpipe.lsn import LSN
from cdcpipe.replication.slots import Slot

SLOT = Slot(
    name="shop",
    plugin="pgoutput",
    slot_type="logical",
    database="shop",
    active_pid=None,
    restart_lsn=LSN(1),
    confirmed_flush_lsn=LSN(2),
    wal_status="reserved",
    safe_wal_bytes=None,
    two_phase=False,
    temporary=False,
    failover=False,
    synced=False,
    invalidation_reason=None,
    in_recovery=False,
    decodes=True,
)

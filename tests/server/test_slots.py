"""The state of a slot, as the columns of an older server show it."""

import postgres
import pytest

from cdcpipe.errors import LostSlotError
from cdcpipe.libpq.parameters import connection_parameters
from cdcpipe.replication.session import connected
from cdcpipe.replication.slots import Slot, check_usable, slot_columns


@pytest.mark.parametrize(
    ("conflicting", "restart_lsn", "wal_status", "expected"),
    [
        ("true", "'0/1'", "lost", "rows of the catalog that it needed, or its wal_level was no longer logical"),
        ("true", "NULL", "lost", "the server has removed WAL that it needed"),  # 16 calls such a slot conflicting, too
        ("false", "'0/1'", "reserved", None),
        ("NULL", "'0/1'", "reserved", None),
    ],
)
def test_a_conflict_of_version_16(
    database: postgres.Database, conflicting: str, restart_lsn: str, wal_status: str, expected: str | None
) -> None:
    """A row of its view stands for a standby whose primary has removed rows of the catalog."""
    with connected(connection_parameters([("dbname", database.dsn)])) as connection:
        (row,) = connection.execute(
            f"SELECT {slot_columns(160000)} FROM (SELECT 's' AS slot_name, 'pgoutput' AS plugin, 'logical' AS slot_type,"
            " current_database() AS database, NULL::integer AS active_pid, '0/2' AS confirmed_flush_lsn, NULL AS safe_wal_size,"
            f" false AS two_phase, false AS temporary, {restart_lsn}::pg_lsn AS restart_lsn, '{wal_status}' AS wal_status,"
            f" {conflicting}::boolean AS conflicting) AS pg_replication_slots"
        )
        slot = Slot.of(row)
        if expected is None:
            assert not slot.is_lost
            check_usable(connection, slot)
        else:
            with pytest.raises(LostSlotError, match=expected):
                check_usable(connection, slot)

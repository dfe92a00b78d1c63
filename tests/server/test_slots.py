"""Slots: their state, as the columns of an older server show it, and the look for changes in one that nobody uses."""

import postgres
import pytest

from cdcpipe.errors import LostSlotError
from cdcpipe.libpq.parameters import connection_parameters
from cdcpipe.replication.server import current_lsn
from cdcpipe.replication.session import connected, connected_walsender
from cdcpipe.replication.slots import Slot, check_usable, slot_columns, start_stream
from cdcpipe.subcommands import checksum


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


def test_a_look_for_changes_does_not_keep_the_slot(database: postgres.Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer may take it meanwhile, and the server may have much to decode, or wait for a standby. Then the answer is yes."""
    with database.connect() as connection:
        connection.execute("create table t (id int); create table other (id int); create publication p for table t")
        connection.execute("select pg_create_logical_replication_slot('looked_at', 'pgoutput')")
        connection.execute("insert into other select generate_series(1, 100000)")
    parameters = connection_parameters([("dbname", database.dsn)])
    with connected(parameters) as connection:

        def look() -> bool:
            return checksum.may_have_changes(connection, "looked_at", ["p"], current_lsn(connection))

        assert not look()
        with monkeypatch.context() as patched:
            patched.setattr(checksum, "_LOOK_MS", 1)
            assert look()
        assert not look()
        with connected_walsender(parameters) as walsender:
            start_stream(walsender, "looked_at", 0, {"proto_version": "1", "publication_names": '"p"'})
            assert look()

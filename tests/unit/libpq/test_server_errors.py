"""Errors that the server reports: which of them pass without a change of the data, and what the hint names."""

from unittest.mock import Mock

import pytest

from cdcpipe.errors import ConnectionClosedError, InitError, ServerError
from cdcpipe.libpq.direct_copy import Fields
from cdcpipe.libpq.server_errors import NO_REPLICATION, server_error
from cdcpipe.replication.slot_creation import NewSlot, create_slot


def reported(state: str, message: str) -> ServerError | ConnectionClosedError:
    return server_error(Fields(f"SERROR\0C{state}\0M{message}\0\0".encode()), reads_rows=True)


@pytest.mark.parametrize(
    ("state", "message", "hint"),
    [
        ("53100", "could not write to data file for XID 743: No space left on device", "make room on the server's disk"),
        ("53200", "out of memory", "give the server more memory"),
        ("53000", "out of file descriptors: Too many open files", "raise the limit on the server"),
        ("58030", "could not read file: Input/output error", "cannot read or write its disk"),
    ],
)
def test_what_the_server_lacks_is_named(state: str, message: str, hint: str) -> None:
    error = reported(state, message)
    assert error.message == f"{ServerError.SHORTAGE}{message} ({state})"
    assert hint in (error.hint or "")


@pytest.mark.parametrize("state", ["53300", "53400", "58P01", "XX000", "22021"])
def test_other_errors_are_no_shortage(state: str) -> None:
    assert ServerError.SHORTAGE not in reported(state, "so it is").message


def refused(message: str, hint: str = "") -> str:
    """Return the hint for a role that may not create a slot."""
    error = server_error(Fields(f"SFEHLER\0C42501\0M{message}\0H{hint}\0\0".encode()))
    connection = Mock()
    connection.execute.side_effect = [[], error, []]  # SET role, the function, RESET role
    with pytest.raises(InitError) as caught:
        create_slot(connection, NewSlot("s", "wal2json", failover=False, is_on_standby=False, timeout_s=None))
    return caught.value.hint or ""


def test_replication_is_advised_in_all_languages_of_the_server() -> None:
    """But only for slots: a role that has it can read every table."""
    assert refused("keine Berechtigung, um Replikations-Slots zu verwenden") == NO_REPLICATION
    assert "output_plugin_libraries" in refused("Ausgabe-Plugin ist nicht erlaubt", "Es steht nicht in der Liste.")
    assert "REPLICATION" not in (reported("42501", "permission denied for table replication").hint or "")

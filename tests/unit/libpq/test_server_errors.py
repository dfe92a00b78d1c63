"""Errors that the server reports: which of them pass without a change of the data."""

import pytest

from cdcpipe.errors import ConnectionClosedError, ServerError
from cdcpipe.libpq.direct_copy import Fields
from cdcpipe.libpq.server_errors import server_error


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

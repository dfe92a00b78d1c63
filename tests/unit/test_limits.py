"""Errors whose cause is a limit of the machine: what the user is told to raise."""

import errno
import os

import pytest

from cdcpipe.errors import CdcpipeError, InitError, OutputError, ServerError, UnreachableError
from cdcpipe.limits import limit_hint


def os_error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def caused(error: CdcpipeError, cause: BaseException) -> CdcpipeError:
    error.__cause__ = cause
    return error


LIMITS = [
    (os_error(errno.EMFILE), "ulimit -n"),
    (os_error(errno.ENFILE), "fs.file-max"),
    (os_error(errno.ENOMEM), "ulimit -v"),
    (MemoryError(), "ulimit -v"),
    (RuntimeError("can't start new thread"), "ulimit -u"),
    (ImportError("libpq.so.5: cannot open shared object file: Too many open files"), "ulimit -n"),
    (UnreachableError("no connection to the server: could not create socket: Too many open files"), "ulimit -n"),
    (UnreachableError("no connection to the server: could not create socket: Too many open files in system"), "fs.file-max"),
    (UnreachableError("no connection to the server: out of memory"), "ulimit -v"),
    (OSError("Memory mapping file failed: Cannot allocate memory"), "ulimit -v"),
    (caused(OutputError("records can't be written"), os_error(errno.EMFILE)), "ulimit -n"),
    (caused(InitError("x"), UnreachableError("could not create socket: Too many open files")), "ulimit -n"),
]


@pytest.mark.parametrize(("error", "named"), LIMITS, ids=repr)
def test_a_limit_is_named(error: BaseException, named: str) -> None:
    assert named in (limit_hint(error) or "")


NONE = [
    os_error(errno.ENOENT),
    RuntimeError("something else"),
    OutputError("records can't be written: Broken pipe"),
    # These limits are the server's.
    ServerError("out of memory", sqlstate="53200"),
    UnreachableError("no connection to the server: FATAL:  out of file descriptors: Too many open files in system"),
]


@pytest.mark.parametrize("error", NONE, ids=repr)
def test_other_errors_name_none(error: BaseException) -> None:
    assert limit_hint(error) is None

"""Connects to a server within a deadline. libpq chooses among the hosts; hosts that do not answer are left out."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Mapping

from cdcpipe.errors import ConnectionParameterError, UnreachableError
from cdcpipe.libpq import hosts
from cdcpipe.libpq.connection_hints import connection_hint, is_refused_for_every_server, where_given
from cdcpipe.libpq.driver import conninfo, pq
from cdcpipe.libpq.parameters import effective_parameters, network_defaults
from cdcpipe.libpq.waiting import NO_LIMIT, wait

__all__ = ["connect", "current_host", "named_hosts"]


def connect(settings: Mapping[str, str], deadline: float, while_waiting: Callable[[], None] | None) -> pq.abc.PGconn:
    """Return a connection made with libpq's parameters ``settings``; raise UnreachableError if none can be made.

    A value that libpq refuses whatever the server is raises ConnectionParameterError.

    If a host does not answer in time, this function leaves it out, and libpq chooses among the rest. So target_session_attrs
    and load_balance_hosts keep their meaning.
    """
    effective = effective_parameters(settings)
    defaults = network_defaults(effective)
    timeout_s = _connect_timeout_s((defaults | effective)["connect_timeout"], settings)
    named = named_hosts(effective)
    left, failures = hosts.look_up(named, min(deadline, time.monotonic() + timeout_s))
    while left or not named:  # named is empty if the lists do not fit together; libpq reports that
        parameters = {**defaults, **settings, **hosts.parameters_of(left)}
        pgconn = pq.PGconn.connect_start(conninfo.make_conninfo(**parameters).encode())
        if _poll(pgconn, timeout_s, deadline, while_waiting):
            return pgconn
        message = _in_one_line(pgconn.get_error_message()) if pgconn.status == pq.ConnStatus.BAD else ""
        silent = current_host(pgconn)
        pgconn.finish()
        if message:
            hint = connection_hint(message, settings)
            if is_refused_for_every_server(message):
                raise ConnectionParameterError(message, hint=hint)
            raise UnreachableError("; ".join([f"{UnreachableError.BEGINNING}{message}", *failures]), hint=hint)
        failures.append(f"{silent} did not answer in time (connect_timeout)")
        rest = [each for each in left if not each.is_at(silent)]
        if rest == left or time.monotonic() >= deadline:
            break
        left = rest
    msg = f"{UnreachableError.BEGINNING}{'; '.join(failures)}"
    raise UnreachableError(msg, hint="check host and port, and that the server is up")


def _in_one_line(text: str) -> str:
    """Return libpq's text for an error: a line for each host that was tried. A line that begins with a tab continues another."""
    return "; ".join(text.strip().replace("\n\t", " ").split("\n"))


def _poll(pgconn: pq.abc.PGconn, timeout_s: float, deadline: float, while_waiting: Callable[[], None] | None) -> bool:
    """Return True once connected; False if libpq has given up (its status is BAD), or if the current host is silent."""
    host, host_deadline = None, deadline
    while pgconn.status != pq.ConnStatus.BAD:
        state = pgconn.connect_poll()
        if state == pq.PollingStatus.OK:
            return True
        if state == pq.PollingStatus.FAILED:
            return False
        if host != (host := current_host(pgconn)):
            host_deadline = min(deadline, time.monotonic() + timeout_s)
        events = select.POLLIN if state == pq.PollingStatus.READING else select.POLLOUT
        if not wait(pgconn.socket, events, host_deadline, while_waiting):
            return False
    return False


def _connect_timeout_s(value: str, settings: Mapping[str, str]) -> float:
    """Return the time limit for each host. As in libpq, 0 means no limit, and 1 means 2 seconds."""
    try:
        seconds = int(value)
    except ValueError:
        msg = f"connect_timeout takes a number of seconds, not {value!r}"
        raise ConnectionParameterError(msg, hint=f"correct {where_given('connect_timeout', settings)}") from None
    return max(seconds, 2) if seconds > 0 else NO_LIMIT


def named_hosts(effective: Mapping[str, str]) -> list[hosts.Host]:
    """Return the servers that libpq would try with these parameters."""
    return hosts.split_hosts(*(effective.get(name, "") for name in ("host", "hostaddr", "port")))


def current_host(pgconn: pq.abc.PGconn) -> hosts.Host:
    """Return the server to which libpq is connecting or connected."""
    return hosts.Host(*(value.decode("utf-8", "replace") for value in (pgconn.host, pgconn.hostaddr, pgconn.port)))

"""Splits the lists of servers in a connection string, and looks up host names with a deadline.

libpq looks up a name in a call that nothing can interrupt, not even a signal. Here a thread looks up the name, so that the caller
can stop waiting.
"""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Sequence
from typing import NamedTuple

from cdcpipe.threads import Worker

__all__ = ["Host", "look_up", "parameters_of", "split_hosts"]

_SLICE_S = 0.1
"""The length of one wait. Between two waits, Python calls signal handlers."""


class Host(NamedTuple):
    """One server, with libpq's fields. ``hostaddr`` takes precedence over ``host``. Each may be empty."""

    host: str
    hostaddr: str
    port: str

    def __str__(self) -> str:
        return f"{self.host or self.hostaddr or 'the default host'}{f', port {self.port}' if self.port else ''}"

    def is_at(self, other: Host) -> bool:
        """Tell whether libpq's ``other``, which has all known fields, is this server."""
        is_there = self.hostaddr == other.hostaddr if self.hostaddr else self.host == other.host
        return is_there and self.port in ("", other.port)


def split_hosts(host: str, hostaddr: str, port: str) -> list[Host]:
    """Return the servers in libpq's three lists, which are separated by commas; empty if the lists do not fit together."""
    hosts, addresses, ports = (value.split(",") if value else [] for value in (host, hostaddr, port))
    count = max(len(hosts), len(addresses), 1)
    hosts, addresses = hosts or [""] * count, addresses or [""] * count
    ports = ports * count if len(ports) == 1 else ports or [""] * count
    if not len(hosts) == len(addresses) == len(ports):
        return []
    return [Host(*each) for each in zip(hosts, addresses, ports, strict=True)]


def parameters_of(hosts: Sequence[Host]) -> dict[str, str]:
    """Return libpq's parameters for these servers."""
    return {name: ",".join(getattr(each, name) for each in hosts) for name in Host._fields} if hosts else {}


def look_up(hosts: Sequence[Host], deadline: float) -> tuple[list[Host], list[str]]:
    """Replace each name by its addresses. Returns the servers to connect to, and the errors of names that have no address."""
    lookups = {each.host: _Lookup(each.host) for each in hosts if not each.hostaddr and _is_name(each.host)}
    found: list[Host] = []
    failures: list[str] = []
    for each in hosts:
        lookup = None if each.hostaddr else lookups.get(each.host)
        if lookup is None:
            found.append(each)
        elif lookup.is_done_by(deadline):
            found += [Host(each.host, address, each.port) for address in lookup.addresses]
            failures += [f'could not translate host name "{each.host}" to address: {lookup.error}'] if lookup.error else []
        else:
            failures.append(f'could not translate host name "{each.host}" to address in time')
    return found, failures


def _is_name(host: str) -> bool:
    if not host or host.startswith(("/", "@")):  # a directory of Unix sockets, or an abstract one
        return False
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return True
    return False


class _Lookup:
    """Looks up one name, in a daemon thread, which does not delay the end of the process."""

    def __init__(self, host: str) -> None:
        self._host = host
        self.addresses: list[str] = []
        self.error = ""
        self._thread = Worker(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            answers = socket.getaddrinfo(self._host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as ex:
            self.error = (ex.strerror if isinstance(ex, OSError) else None) or str(ex)
            return
        self.addresses = list(dict.fromkeys(str(answer[4][0]) for answer in answers))

    def is_done_by(self, deadline: float) -> bool:
        while self._thread.is_alive() and (left_s := deadline - time.monotonic()) > 0:
            self._thread.join(min(left_s, _SLICE_S))
        return not self._thread.is_alive()

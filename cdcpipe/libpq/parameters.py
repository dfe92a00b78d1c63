"""Connection parameters: turns those of the command line into libpq's, and finds those that libpq would use."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from cdcpipe.errors import InvalidArgumentsError
from cdcpipe.libpq.driver import conninfo, errors, pq

__all__ = ["connection_parameters", "effective_parameters", "network_defaults", "protection_of"]

_SECRETS = ("password", "sslpassword", "oauth_client_secret", "scram_client_key", "scram_server_key")

_PROTECTION = frozenset(
    {
        *("sslmode", "sslnegotiation", "sslrootcert", "sslcrl", "sslcrldir", "sslcert", "sslkey", "sslcertmode"),
        *("ssl_min_protocol_version", "ssl_max_protocol_version"),
        *("gssencmode", "krbsrvname", "gsslib", "channel_binding", "require_auth", "requirepeer"),
    }
)
"""How a session is encrypted, and how server and user prove who they are."""

_UNLISTED_DEFAULTS: Mapping[str, bytes] = MappingProxyType({"sslcertmode": b"allow"})
"""Default values that libpq fills in, but does not name as such."""

_URI = re.compile(r"\s*(postgres(ql)?:|\w+://)", re.IGNORECASE)
_BEFORE_PATH = re.compile(r"\s*\w+:/*[^/?]*")
_URI_HINT = "it is postgresql://user@host:port/database?name=value, with %-codes for : / @ ? # [ ] % inside a part of it"
_STRING_HINT = "it is name=value name='a value with spaces', with \\' for a quote character and \\\\ for a backslash in a value"


# A dead network is noticed after 60 + 6 * 10 = 120 s. That is longer than the pause of a live migration or of a failed-over
# router, and much shorter than what Linux does by itself: 2 h until the first probe, and 15 minutes for data that nobody
# acknowledges. A probe each minute keeps an idle connection in the tables of firewalls and load balancers, which drop idle
# connections after 240 s (Azure), 350 s (AWS) or 600 s (Google). A walsender gives up earlier, after wal_sender_timeout (60 s).
_KEEPALIVES: Mapping[str, str] = MappingProxyType(
    {"keepalives_idle": "60", "keepalives_interval": "10", "keepalives_count": "6"},
)
_CONNECT_TIMEOUT = "30"


def connection_parameters(parameters: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Merge libpq parameters in the order given. As in libpq, ``dbname`` may be a conninfo string or a URI.

    Raises InvalidArgumentsError for a parameter that libpq does not know, and for a password, because every user of the machine can
    read a command line.
    """
    merged: dict[str, str] = {}
    for key, value in parameters:
        if key in _SECRETS:
            _refuse_secret(key)
        expanded = _parse_conninfo(value) if key == "dbname" and _is_conninfo(value) else _checked(key, value)
        for secret in _SECRETS:
            if expanded.get(secret):
                _refuse_secret(secret)
        merged.update({name: str(setting) for name, setting in expanded.items() if setting is not None})
    encoding = merged.get("client_encoding", "UTF8")
    if encoding.replace("-", "").upper() != "UTF8":
        msg = f"client_encoding can't be {encoding}: cdcpipe takes and gives all texts in UTF8"
        raise InvalidArgumentsError(msg, hint=f"leave it out, and convert what cdcpipe writes: iconv -f UTF-8 -t {encoding}")
    return merged


def _is_conninfo(dbname: str) -> bool:
    """Tell whether ``dbname`` is a connection string for libpq, or was meant as one (``postgres:/user:…``)."""
    return "=" in dbname or _is_uri(dbname)


def _parse_conninfo(text: str) -> dict[str, Any]:
    """Split a connection string into parameters. No error shows any part of the string.

    A password may contain a character that ends it for libpq: ``/`` or ``@`` in a URI, a space in the other form. libpq then names
    the rest of the password in its error, or takes this rest for another parameter.
    """
    try:
        expanded: dict[str, Any] | None = conninfo.conninfo_to_dict(text)
    except errors.Error:
        expanded = None
    if expanded is not None and not _has_misplaced_rest(text, expanded):
        return expanded
    what, hint = ("URI", _URI_HINT) if _is_uri(text) else ("connection string", _STRING_HINT)
    raise InvalidArgumentsError(f"the {what} that was given as database can't be read (it is not shown)", hint=hint)


def _has_misplaced_rest(text: str, expanded: Mapping[str, Any]) -> bool:
    """Tell whether a port is not a number, or a URI has an ``@`` in the place of the database's name."""
    ports = str(expanded.get("port") or "").split(",")
    path = _BEFORE_PATH.sub("", text).partition("?")[0] if _is_uri(text) else ""
    return "@" in path or not all(port.strip().isdecimal() or not port for port in ports)


def _is_uri(text: str) -> bool:
    return _URI.match(text) is not None


def _checked(key: str, value: str) -> dict[str, str]:
    """Return one parameter. Raise InvalidArgumentsError if libpq has no parameter of this name."""
    try:
        conninfo.make_conninfo(**{key: value})
    except errors.Error:
        # A key that is not a name may be the beginning of a connection string, so it is not shown.
        named = f"connection parameter {key!r}" if key.isidentifier() else "a connection parameter"
        msg = f"{named} can't be used: libpq has none of this name"
        raise InvalidArgumentsError(
            msg, hint="PostgreSQL's manual lists them: Parameter Key Words, in the chapter on libpq"
        ) from None
    return {key: value}


def _refuse_secret(key: str) -> None:
    msg = f"{key} is not taken from an option: options are on command lines, which every user of this machine can read"
    raise InvalidArgumentsError(msg, hint="set PGPASSWORD, or use a password file (PGPASSFILE) or a service file")


def effective_parameters(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the parameters that libpq would use, including those from the environment and from a service file."""
    # The invalid sslmode makes libpq stop after it has collected the parameters, before it looks up a name or connects.
    pgconn = pq.PGconn.connect_start(conninfo.make_conninfo(**{**settings, "sslmode": "none"}).encode())
    try:
        return {each.keyword.decode(): each.val.decode("utf-8", "replace") for each in pgconn.info if each.val}
    finally:
        pgconn.finish()


def protection_of(pgconn: pq.abc.PGconn) -> dict[str, str]:
    """Return how an open connection is protected, wherever that was set: those of these parameters that have no default value.

    For a default, such as ``sslmode=prefer``, there is no parameter: it would count before what the environment of the process that
    gets the parameters says. (`effective_parameters` does not know the ``sslmode``.)
    """
    return {
        name: each.val.decode("utf-8", "replace")
        for each in pgconn.info
        if (name := each.keyword.decode()) in _PROTECTION
        and each.val
        and each.val != (each.compiled or _UNLISTED_DEFAULTS.get(name))
    }


def network_defaults(effective: Mapping[str, str]) -> dict[str, str]:
    """Return the time limits for hosts and the network that are missing in ``effective`` (`effective_parameters`).

    ``connect_timeout`` applies to each host. ``tcp_user_timeout`` limits how long sent data may stay unacknowledged. It is as long
    as the keepalives take, also those that the user has set, because on Linux it replaces ``keepalives_count``. libpq uses none of
    the TCP parameters on a Unix socket. Example: with ``keepalives_idle=30`` the result has a ``tcp_user_timeout`` of 90,000 ms.
    """
    keepalives = {name: effective.get(name, default) for name, default in _KEEPALIVES.items()}
    defaults = {"connect_timeout": _CONNECT_TIMEOUT, **keepalives}
    idle, interval, count = keepalives.values()
    if all(value.isdecimal() and int(value) for value in (idle, interval, count)):  # 0: the operating system's, which is unknown
        defaults["tcp_user_timeout"] = str(1000 * (int(idle) + int(interval) * int(count)))
    return {name: value for name, value in defaults.items() if name not in effective}

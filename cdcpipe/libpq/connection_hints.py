"""Says what the user can do if no connection could be made. libpq gives no SQLSTATE then, so its message decides.

    connection_hint('invalid sslmode value: "banana"', {})    # correct the environment variable PGSSLMODE

A hint names what the user can change: an option, an environment variable, or the service file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Final

from cdcpipe import sqlstate
from cdcpipe.libpq.driver import pq
from cdcpipe.libpq.server_errors import HINTS, NO_POOLER, NO_REPLICATION

__all__ = ["GENERAL_HINT", "connection_hint", "is_refused_for_every_server", "where_given"]

GENERAL_HINT: Final = (
    "check host, port, user and database (-h -p -U -d, or libpq's environment variables), and that the server is up"
)
"""The hint for a message that is not known, such as one that the server has translated."""

_PARAMETER = re.compile(r'invalid "?(\w+)"? value: |invalid integer value ".*" for connection option "(\w+)"')
"""libpq's messages for a value that a connection parameter can't have."""

_SETTING = re.compile(r'FATAL: +(?:invalid value for parameter|unrecognized configuration parameter|parameter) "([\w.]+)"')
"""The server's messages for a setting that a session begins with."""

_NO_SETTING = re.compile(r"FATAL: +.*(requires a value|invalid command-line argument|invalid option)")

_OTHER_KIND = re.compile(r"(server|session) is (not )?(in hot standby mode|read-only)$", re.MULTILINE)
"""libpq's messages for a server that target_session_attrs excludes: a primary, a standby, or one that is read-only."""

_SETTING_VARIABLES = {"timezone": "PGTZ", "datestyle": "PGDATESTYLE", "geqo": "PGGEQO"}
"""The settings for which libpq has environment variables of their own, in lower case."""

_OPTIONS = {"host": "-h", "port": "-p", "user": "-U", "dbname": "-d"}

_OF_WRONG_PARAMETER = {
    "invalid port number": "port",
    "could not match": "host",
    "weak sslmode": "sslmode",
    "invalid SSL protocol version range": "ssl_min_protocol_version",
    "definition of service": "service",
    "service file": "service",
}
"""The parts of libpq's other messages that refuse a parameter before libpq asks a server."""

_OF_PARAMETER = {
    **_OF_WRONG_PARAMETER,
    "server does not support SSL": "sslmode",
    "root certificate file": "sslrootcert",
    "authentication method requirement": "require_auth",
    "channel binding required": "channel_binding",
    "requirepeer specifies": "requirepeer",
    "GSSAPI encryption required": "gssencmode",
    "without a valid SSL certificate": "sslcertmode",
    "private key file": "sslkey",
}
"""The parts of libpq's other messages that a parameter causes."""

_CLIENT_CERTIFICATE = re.compile(
    "requires a valid client certificate|certificate authentication failed|alert (?:unknown ca|bad certificate|certificate)"
)
"""Messages for a certificate of ours that the server does not take. The alerts are those of TLS."""


_OF_REFUSAL = [
    (re.compile(refusal), hint)
    for refusal, hint in (
        (
            "unsupported startup parameter|RDS Proxy|Tenant or user not found|tenant/user .*not found",
            f"this is a connection pooler: {NO_POOLER}",
        ),
        (
            "password authentication failed",
            (
                "check the password (PGPASSWORD, or the password file: PGPASSFILE, ~/.pgpass), whether it has expired"
                " (VALID UNTIL), and the user (-U, PGUSER)"
            ),
        ),
        (
            "(?:Peer|Ident) authentication failed",
            (
                "connect as the database user that pg_hba.conf and pg_ident.conf allow for your operating-system user (-U, PGUSER),"
                " or over TCP (-h localhost) if pg_hba.conf takes a password there"
            ),
        ),
        (
            "GSSAPI|Kerberos|SSPI",
            "get a Kerberos ticket (kinit), and check user (-U, PGUSER), host (-h) and krbsrvname",
        ),
        (r"\w+ authentication failed", "check the user (-U, PGUSER), its password, and the method that pg_hba.conf asks for"),
        ("password", HINTS[sqlstate.INVALID_PASSWORD]),
        ("too many connections for role", "raise the role's limit: ALTER ROLE name CONNECTION LIMIT …"),
        ("too many connections for database", "raise the database's limit: ALTER DATABASE name CONNECTION LIMIT …"),
        ("too many clients|connection slots are reserved|max_wal_senders", HINTS[sqlstate.TOO_MANY_CONNECTIONS]),
        ("not permitted to log in", "let the role log in: ALTER ROLE name LOGIN"),
        ("not currently accepting connections", "let the database take connections: ALTER DATABASE name ALLOW_CONNECTIONS true"),
        ("permission denied for database", "GRANT CONNECT ON DATABASE name TO role"),
        ("database .*does not exist|invalid database", HINTS[sqlstate.INVALID_CATALOG_NAME]),
        ("local user with ID", "name the database's user (-U, PGUSER): the user id of this process has no name that could be it"),
        ("role .*does not exist", "check the user's name (-U, PGUSER)"),
        ("WAL sender|replication role", NO_REPLICATION),
        (
            "could not (?:access file|load library)|incompatible library",
            (
                "the server can't load a library for this session: install it, or take it out of session_preload_libraries or"
                " local_preload_libraries (ALTER ROLE name RESET …, ALTER DATABASE name RESET …, ALTER SYSTEM RESET …)"
            ),
        ),
        ("pg_hba", HINTS[sqlstate.INVALID_AUTHORIZATION]),
        ("the database system is", HINTS[sqlstate.CANNOT_CONNECT_NOW]),
        (
            "Network is unreachable",
            "this machine has no route to that address: if the name (-h) has only IPv6 addresses, ask for one that has IPv4, too",
        ),
    )
]
"""The server's messages for a session that it refuses, and what the user can do."""


def connection_hint(message: str, settings: Mapping[str, str]) -> str:
    """Return a hint for a failed connection. ``settings`` are libpq's parameters as they were given to it."""
    if (parameter := _parameter_in(message)) is not None:
        return f"correct {where_given(parameter, settings)}"
    if (setting := _SETTING.search(message)) is not None:
        variable = _SETTING_VARIABLES.get(setting[1].lower(), "")
        given = f"the environment variable {variable}" if variable in os.environ else where_given("options", settings)
        return f"correct {setting[1]} in {given}"
    if _CLIENT_CERTIFICATE.search(message):
        given = where_given("sslcert", settings)
        return f"the server requires a client certificate that it trusts: correct {given}, and sslkey"
    if "certificate verify failed" in message:
        given = where_given("sslrootcert", settings)
        return f"the server's certificate has expired, or no authority in sslrootcert has signed it: renew it, or correct {given}"
    if "does not match host name" in message:
        return "name the host as the server's certificate does (-h); -m hostaddr=… gives an address that this name does not have"
    if _OTHER_KIND.search(message):
        given = where_given("target_session_attrs", settings)
        return f"no server that answers is of the kind that target_session_attrs asks for: start one, or correct {given}"
    if _NO_SETTING.search(message):
        return f"correct {where_given('options', settings)}"
    return next((hint for refusal, hint in _OF_REFUSAL if refusal.search(message)), GENERAL_HINT)


def is_refused_for_every_server(message: str) -> bool:
    """Return whether libpq refuses the value of a connection parameter, whatever the server is."""
    return "FATAL:" not in message and (
        _PARAMETER.search(message) is not None or any(part in message for part in _OF_WRONG_PARAMETER)
    )


def _parameter_in(message: str) -> str | None:
    """Return the connection parameter whose value the message refuses; None for other messages, such as the server's."""
    if "FATAL:" in message:
        return None
    if (found := _PARAMETER.search(message)) is not None:
        return found[1] or found[2]
    return next((parameter for part, parameter in _OF_PARAMETER.items() if part in message), None)


def where_given(parameter: str, settings: Mapping[str, str]) -> str:
    """Say where the value of a connection parameter comes from: the command line, the environment, or a service file."""
    if parameter in settings:
        option = _OPTIONS.get(parameter)
        return f"{option}, or {parameter} in -d or -m" if option else f"{parameter}, which -m or -d gives"
    variables = {each.keyword.decode(): (each.envvar or b"").decode() for each in pq.Conninfo.get_defaults()}
    variable = variables.get(parameter, "")
    if variable in os.environ:
        return f"the environment variable {variable}"
    if parameter != "service" and ("PGSERVICE" in os.environ or "service" in settings):
        return f"{parameter} in the service file"
    return f"{parameter} (-m {parameter}=…{f', {variable}' if variable else ''})"

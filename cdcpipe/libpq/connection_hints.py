"""Says what the user can do if no connection could be made. libpq gives no SQLSTATE then, so its message decides.

    connection_hint('invalid sslmode value: "banana"', {})    # correct the environment variable PGSSLMODE

A hint names what the user can change: an option, an environment variable, or the service file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from cdcpipe import sqlstate
from cdcpipe.libpq.driver import pq
from cdcpipe.libpq.server_errors import HINTS

__all__ = ["connection_hint", "is_refused_for_every_server", "where_given"]

_PARAMETER = re.compile(r'invalid "?(\w+)"? value: |invalid integer value ".*" for connection option "(\w+)"')
"""libpq's messages for a value that a connection parameter can't have."""

_SETTING = re.compile(r'FATAL: +(?:invalid value for parameter|unrecognized configuration parameter|parameter) "([\w.]+)"')
"""The server's messages for a setting that a session begins with."""

_NO_SETTING = re.compile(r"FATAL: +.*(requires a value|invalid command-line argument|invalid option)")

_SETTING_VARIABLES = {"timezone": "PGTZ", "datestyle": "PGDATESTYLE", "geqo": "PGGEQO"}
"""The settings for which libpq has environment variables of their own, in lower case."""

_OPTIONS = {"host": "-h", "port": "-p", "user": "-U", "dbname": "-d"}

_OF_WRONG_PARAMETER = {
    "invalid port number": "port",
    "could not match": "host",
    "weak sslmode": "sslmode",
    "definition of service": "service",
    "service file": "service",
}
"""The parts of libpq's other messages that refuse a parameter before libpq asks a server."""

_OF_PARAMETER = {
    **_OF_WRONG_PARAMETER,
    "server does not support SSL": "sslmode",
    "root certificate file": "sslrootcert",
    "authentication method requirement": "require_auth",
}
"""The parts of libpq's other messages that a parameter causes."""


def connection_hint(message: str, settings: Mapping[str, str]) -> str:
    """Return a hint for a failed connection. ``settings`` are libpq's parameters as they were given to it."""
    if (parameter := _parameter_in(message)) is not None:
        return f"correct {where_given(parameter, settings)}"
    if (setting := _SETTING.search(message)) is not None:
        variable = _SETTING_VARIABLES.get(setting[1].lower(), "")
        given = f"the environment variable {variable}" if variable in os.environ else where_given("options", settings)
        return f"correct {setting[1]} in {given}"
    if _NO_SETTING.search(message):
        return f"correct {where_given('options', settings)}"
    if "password authentication failed" in message:
        return "check the password (PGPASSWORD, or the password file: PGPASSFILE, ~/.pgpass), and the user (-U, PGUSER)"
    if "password" in message:
        return HINTS[sqlstate.INVALID_PASSWORD]
    if "does not exist" in message and "database" in message:
        return HINTS[sqlstate.INVALID_CATALOG_NAME]
    if "does not exist" in message and "role" in message:
        return "check the user's name (-U, PGUSER)"
    if "WAL sender" in message or "replication role" in message:
        return HINTS[sqlstate.INSUFFICIENT_PRIVILEGE]
    if "pg_hba" in message:
        return HINTS[sqlstate.INVALID_AUTHORIZATION]
    return "check host, port, user and database (-h -p -U -d, or libpq's environment variables), and that the server is up"


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

"""The arguments of ``cdcpipe`` for a connection, from the values of the connection options."""

from __future__ import annotations

__all__ = ["connection_arguments"]


def connection_arguments(
    *, dbname: str | None, host: str | None, port: str | None, username: str | None, params: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the command-line arguments of ``cdcpipe`` for a connection."""
    arguments: list[str] = []
    for option, value in (("-d", dbname), ("-h", host), ("-p", port), ("-U", username)):
        if value is not None:
            arguments += [option, value]
    for param in params:
        arguments += ["-m", param]
    return tuple(arguments)

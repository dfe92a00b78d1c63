"""SQL as text, every name quoted by our own hand, and the settings of a session. No connection, no psycopg.

The walsender's grammar has no ``E'…'`` strings, so libpq's quoting, which writes them for backslashes, does not serve there:
a quote character is doubled and nothing else is special.
"""

from __future__ import annotations

from collections.abc import Mapping

from cdcpipe.errors import InvalidArgumentsError

__all__ = ["SESSION_SETTINGS", "TRIM_NUMBERS", "patient", "quote_identifier", "quote_literal", "reading_rows"]

SESSION_SETTINGS: Mapping[str, str] = {
    "DateStyle": "ISO",
    "IntervalStyle": "postgres",
    "TimeZone": "UTC",
    "extra_float_digits": "3",
    "bytea_output": "hex",
    "standard_conforming_strings": "on",
    "client_min_messages": "notice",
}
"""What decides how values look as text, and that the server's warnings arrive; set on every connection, so that no setting of a
role, a database or the environment can change it."""

_TRANSACTION_TIMEOUT_SINCE = 170000

TRIM_NUMBERS = ((r"(\.[0-9]*[1-9])0+(?![0-9])", r"\1"), (r"\.0+(?![0-9])", ""))
"""Regular expressions, and what to put in the place of all their matches, to end numbers with no zero behind the point."""


def patient(server_version: int) -> dict[str, str]:
    """Return the settings that lift every limit of time which a role or a database may have set for its sessions.

    A stream runs for ever, and the creation of a slot waits for others knowingly. Our own deadlines bound what must not last.
    """
    settings = dict.fromkeys(
        ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout", "idle_session_timeout"), "0"
    )
    if server_version >= _TRANSACTION_TIMEOUT_SINCE:
        settings["transaction_timeout"] = "0"
    return settings


def reading_rows(server_version: int) -> dict[str, str]:
    """Return the settings of a session that reads whole tables, and gets each value as the stream has it."""
    return {
        **SESSION_SETTINGS,
        # As in the walsender: names in values (regclass, ...) are always qualified.
        "search_path": "",
        # An error is better than rows that a policy hides.
        "row_security": "off",
        **patient(server_version),
    }


def _refuse_nul(text: str) -> None:
    if "\0" in text:
        msg = f"a name or a value can't hold a NUL character: {text!r}"
        raise InvalidArgumentsError(msg)


def quote_identifier(name: str) -> str:
    """Return ``name`` as a quoted identifier."""
    _refuse_nul(name)
    return '"' + name.replace('"', '""') + '"'


def quote_literal(value: str) -> str:
    """Return ``value`` as a string literal (``standard_conforming_strings`` is on: backslashes are plain)."""
    _refuse_nul(value)
    return "'" + value.replace("'", "''") + "'"

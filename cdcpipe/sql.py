"""Quotes names and values for SQL, and defines the settings of sessions. No connection, no psycopg.

libpq's quoting can't be used: for backslashes it writes ``E'…'`` strings, which the walsender's grammar does not have. So the
functions here double quote characters, and change no other character.
"""

from __future__ import annotations

from collections.abc import Mapping

from cdcpipe.errors import InvalidArgumentsError

__all__ = [
    "BUCKET_DIGITS",
    "LOGIN_ROLE",
    "LONGEST_NAME",
    "MANAGED_ROLES",
    "NO_SEARCH_PATH",
    "PART_DIGITS",
    "SERVICE_ROLES",
    "SESSION_SETTINGS",
    "SUM_DIGITS",
    "TRIM_NUMBERS",
    "patient",
    "quote_identifier",
    "quote_literal",
    "quote_table",
    "reading_rows",
]

SESSION_SETTINGS: Mapping[str, str] = {
    "DateStyle": "ISO",
    "IntervalStyle": "postgres",
    "TimeZone": "UTC",
    "extra_float_digits": "3",
    "bytea_output": "hex",
    # With "on", names in values (regclass, regproc, ...) have quotes, and ADBC does not find the types' functions by name.
    "quote_all_identifiers": "off",
    "standard_conforming_strings": "on",
    "client_min_messages": "notice",
    # No command waits for other sessions' transactions, as each one may with "serializable", "deferrable" and read-only together. A
    # standby refuses every command with "serializable".
    "default_transaction_isolation": "read committed",
    "default_transaction_deferrable": "off",
}
"""Settings that decide how values look as text, make the server send its warnings, and let commands run without waiting.

Every connection sets them, so that no setting of a role, a database or the environment changes them.
"""

NO_SEARCH_PATH: Mapping[str, str] = {"search_path": ""}
"""The setting of every session that runs SQL: only PostgreSQL's own functions and operators are found without a schema.

Otherwise a user who may create functions in a schema of the search path, such as ``public``, could have them run with this
program's rights: an operator ``public.>= (oid, integer)`` fits ``c.oid >= 16384`` better than PostgreSQL's own.
"""

LOGIN_ROLE: Mapping[str, str] = {"role": "none"}
"""The setting of every walsender's session: it has the rights of the role that has connected, which has REPLICATION.

Another role that takes its place (ALTER ROLE … SET role) does not inherit this attribute, and could create no slot.
"""

MANAGED_ROLES = (
    "rds_superuser",
    "azure_pg_admin",
    "cloudsqlsuperuser",
    "alloydbsuperuser",
    "neon_superuser",
    "supabase_privileged_role",
    "tsdbadmin",
)
"""The roles that stand for a superuser on managed services. A user's role can be a member."""

SERVICE_ROLES = (*MANAGED_ROLES, "supabase_admin")
"""The roles by which a managed service is known. supabase_admin is Supabase's own superuser, and no user's role is a member."""

_TRANSACTION_TIMEOUT_SINCE = 170000
_RESTRICTED_KINDS_SINCE = {14: 140013, 15: 150008, 16: 160004}
"""The first release of a major version that has ``restrict_nonsystem_relation_kind``. All later major versions have it."""

TRIM_NUMBERS = ((r"(\.[0-9]*[1-9])0+(?![0-9])", r"\1"), (r"\.0+(?![0-9])", ""))
"""Regular expressions with replacements. They remove trailing zeros after the decimal point."""

BUCKET_DIGITS, PART_DIGITS, SUM_DIGITS = 3, 3, 15
"""How many digits of an MD5 say in which bucket a row is, how many more in which part of the bucket, and how many are summed: 60
bits are a positive bigint."""


def patient(server_version: int) -> dict[str, str]:
    """Return the settings that remove every time limit that a role or a database may have for its sessions.

    A stream runs for ever, and the creation of a slot may have to wait. cdcpipe has its own deadlines for everything that must end.
    """
    settings = dict.fromkeys(
        ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout", "idle_session_timeout"), "0"
    )
    if server_version >= _TRANSACTION_TIMEOUT_SINCE:
        settings["transaction_timeout"] = "0"
    return settings


def reading_rows(server_version: int) -> dict[str, str]:
    """Return the settings of a session that reads whole tables and gets each value as in the stream."""
    has_restriction = server_version >= _RESTRICTED_KINDS_SINCE.get(server_version // 10000, 0)
    return {
        **SESSION_SETTINGS,
        # As in the walsender, names in values (regclass, ...) are always qualified.
        **NO_SEARCH_PATH,
        # Raise an error instead of leaving out rows that a policy hides.
        "row_security": "off",
        # The owner of a table may put a view in its place just before it is read (CVE-2024-7348): its functions would run here.
        **({"restrict_nonsystem_relation_kind": "view"} if has_restriction else {}),
        **patient(server_version),
    }


LONGEST_NAME = 63
"""How many bytes of a name PostgreSQL keeps. It cuts a longer one off, and says nothing."""


def check_name(text: str) -> None:
    """Raise InvalidArgumentsError if something on the server can't have this whole name.

    Two long names that begin alike are one name for the server: two consumers would share a slot, and each would miss changes.
    """
    if not text:
        raise InvalidArgumentsError("a slot, a publication or a schema can't have an empty name")
    written = text.encode(errors="replace")
    if len(written) <= LONGEST_NAME:
        return
    cut = written[:LONGEST_NAME].decode(errors="ignore")
    raise InvalidArgumentsError(
        f"the name {text!r} is too long: PostgreSQL keeps {LONGEST_NAME} bytes of a name",
        hint=f"give it a shorter name; if it is there already, the server calls it {cut!r}",
    )


def _refuse_nul(text: str) -> None:
    if "\0" in text:
        msg = f"a name or a value can't hold a NUL character: {text!r}"
        raise InvalidArgumentsError(msg)


def quote_identifier(name: str) -> str:
    """Return ``name`` as a quoted identifier."""
    _refuse_nul(name)
    return '"' + name.replace('"', '""') + '"'


def quote_table(schema: str, name: str) -> str:
    """Return the quoted name of a table with its schema."""
    return f"{quote_identifier(schema)}.{quote_identifier(name)}"


def quote_literal(value: str) -> str:
    """Return ``value`` as a string literal. Backslashes need no quoting, because ``standard_conforming_strings`` is on."""
    _refuse_nul(value)
    return "'" + value.replace("'", "''") + "'"

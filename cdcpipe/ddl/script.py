"""The SQL that installs, finds and removes DDL capture. No connection."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from importlib import resources
from typing import TYPE_CHECKING, Final

from cdcpipe.errors import InvalidArgumentsError
from cdcpipe.sql import quote_identifier, quote_literal

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["FIND", "NO_TABLES", "SETTINGS", "TRIGGERS", "VERSION", "Settings", "announce", "disarm", "install", "remove"]

VERSION: Final = 4
"""The version of capture.sql. Each change of what it installs needs a new number."""

TRIGGERS: Final = ("cdcpipe_ddl_command_end", "cdcpipe_sql_drop", "cdcpipe_table_rewrite")
"""The event triggers. Their names are the same in every version, because `remove` and an upgrade find the capture by them."""

SETTINGS: Final = "pg_catalog.substring(s.prosrc, '[{][^}]*[}]')"
"""An expression for the text of the installed settings. They are read where the functions have them, in the text of
``ddl_settings``: a dump without comments keeps it. ``s`` is the alias of its row in pg_proc."""

FIND: Final = f"""
SELECT e.evtname, e.evtenabled, n.nspname, (
    SELECT {SETTINGS} FROM pg_catalog.pg_proc s
    WHERE s.pronamespace = n.oid AND s.proname = 'ddl_settings' AND s.pronargs = 0)
FROM pg_catalog.pg_event_trigger e
JOIN pg_catalog.pg_proc p ON p.oid = e.evtfoid JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace
WHERE e.evtname IN ({", ".join(map(quote_literal, TRIGGERS))}) ORDER BY 1
"""
"""A query with a row for each event trigger: its name and state, the schema of its function, and the text of the settings."""

NO_TABLES: Final = "SELECT oid FROM pg_catalog.pg_class WHERE false"
"""A query for the tables of a message that describes none."""

_QUOTES: Final = "$cdcpipe$"


@dataclass(frozen=True, slots=True)
class Settings:
    """What is installed: the version, whether messages have the statement's text, and whether an error fails the user's DDL."""

    version: int = VERSION
    statements: bool = True
    strict: bool = False

    @property
    def description(self) -> str:
        """What the user can choose, in words."""
        return f"{'with' if self.statements else 'without'} the statements' texts{', strict' if self.strict else ''}"

    @classmethod
    def parse(cls, text: str | None) -> Settings | None:
        """Read the text that `SETTINGS` gives. Return None if it is not that of a known version."""
        try:
            found = json.loads(text or "")
            return cls(int(found["version"]), bool(found["statements"]), bool(found["strict"]))
        except (ValueError, KeyError, TypeError):
            return None


def _capture() -> str:
    return resources.files(__package__).joinpath("capture.sql").read_text()


def install(schema: str, settings: Settings, relations: str = NO_TABLES, publications: Sequence[str] = ()) -> str:
    """Return the script that installs the capture into ``schema``, over any older version. It must run in one transaction.

    It ends with the message of the kind ``installed`` (see `announce`): without it, DDL from before would count as captured.
    """
    values = {
        "schema": quote_identifier(schema),
        "schema_name": quote_literal(schema),
        "settings": quote_literal(json.dumps(asdict(settings))),
    }
    if _QUOTES in schema:
        msg = f"a schema of DDL capture can't have {_QUOTES} in its name"
        raise InvalidArgumentsError(msg, hint="name another schema")
    capture = re.sub(r"@(schema|schema_name|settings)@", lambda match: values[match[1]], _capture())
    begins = announce(schema, "installed", relations, publications)
    return f"{capture}\n-- Tell the stream's reader that the capture begins.\n{begins};\n"


def announce(schema: str, kind: str, relations: str = NO_TABLES, publications: Sequence[str] = ()) -> str:
    """Return the statement that writes a message of the kind ``installed`` or ``removed``.

    ``relations`` is a query for the OIDs of the tables that the message describes.
    """
    names = ", ".join(map(quote_literal, publications))
    return (
        f"SELECT {quote_identifier(schema)}.ddl_announce({quote_literal(kind)},"
        f" ARRAY({relations}), ARRAY[{names}]::pg_catalog.text[])"
    )


def disarm() -> str:
    """Return the statements that drop the event triggers. Other sessions' DDL may still be running the functions."""
    return "".join(f"DROP EVENT TRIGGER IF EXISTS {name};\n" for name in TRIGGERS)


def remove(schema: str) -> str:
    """Return the statement that drops the functions, after `disarm`, and the schema if it is empty then.

    It first waits until the statements that were running when it began have ended, because their triggers may need the functions.
    It does not wait longer than 5 s: a statement looks for triggers at its end, so a long one finds that there are none.
    """
    functions = ", ".join(map(quote_literal, re.findall(r"^CREATE OR REPLACE FUNCTION @schema@\.(\w+)", _capture(), re.MULTILINE)))
    return f"""DO {_QUOTES}
DECLARE
    place pg_catalog.oid := (SELECT n.oid FROM pg_catalog.pg_namespace n WHERE n.nspname = {quote_literal(schema)});
    found pg_catalog.regprocedure;
BEGIN
    FOR i IN 1..500 LOOP
        PERFORM pg_catalog.pg_stat_clear_snapshot();
        EXIT WHEN NOT EXISTS (
            SELECT FROM pg_catalog.pg_stat_activity a
            WHERE a.datname = pg_catalog.current_database() AND a.pid <> pg_catalog.pg_backend_pid()
            AND a.state = 'active' AND a.backend_xid IS NOT NULL AND a.query_start < pg_catalog.statement_timestamp());
        PERFORM pg_catalog.pg_sleep(0.01);
    END LOOP;
    FOR found IN SELECT p.oid FROM pg_catalog.pg_proc p WHERE p.pronamespace = place AND p.proname IN ({functions}) LOOP
        EXECUTE pg_catalog.format('DROP FUNCTION %s', found);
    END LOOP;
    IF NOT EXISTS (
        SELECT FROM pg_catalog.pg_depend d
        WHERE d.refclassid = 'pg_catalog.pg_namespace'::pg_catalog.regclass AND d.refobjid = place)
    THEN
        EXECUTE pg_catalog.format('DROP SCHEMA %I', {quote_literal(schema)});
    END IF;
END
{_QUOTES}"""

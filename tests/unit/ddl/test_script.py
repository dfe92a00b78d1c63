"""The SQL of DDL capture, without a server."""

import re

from cdcpipe.ddl import script
from cdcpipe.sql import SESSION_SETTINGS


def test_the_script_changes_the_privileges_of_its_own_functions_only() -> None:
    """The schema may have been there, with functions that others call."""
    sql = script.install("app", script.Settings())
    made = re.findall(r'^CREATE OR REPLACE FUNCTION "?app"?\.(\w+)\(', sql, re.MULTILINE)
    (revoked,) = re.findall(r"^REVOKE ALL ON (.*?)FROM PUBLIC;", sql, re.MULTILINE | re.DOTALL)
    assert re.findall(r"(\w+) IN SCHEMA", revoked) == []
    assert sorted(re.findall(r"\.(\w+)\(", revoked)) == sorted(made)


def test_the_script_ends_with_the_message_that_the_capture_begins() -> None:
    """A reader takes a capture without this message for one that was always there."""
    last = script.install("app", script.Settings()).rstrip().rsplit("\n", 1)[-1]
    assert last == f"{script.announce('app', 'installed')};"


def test_the_script_comments_a_schema_only_where_it_creates_it() -> None:
    sql = script.install("app", script.Settings())
    (block,) = re.findall(r"IF NOT EXISTS \(SELECT FROM pg_catalog.pg_namespace.*?END IF;", sql, re.DOTALL)
    assert (block.count("CREATE SCHEMA"), block.count("COMMENT ON SCHEMA")) == (1, 1)
    assert (sql.count("CREATE SCHEMA "), sql.count("COMMENT ON SCHEMA ")) == (1, 1)


def test_no_setting_of_a_role_changes_the_texts_of_a_message() -> None:
    sql = script.install("app", script.Settings())
    heads = dict(re.findall(r'^CREATE OR REPLACE FUNCTION "?app"?\.(\w+)(.*?)^AS ', sql, re.MULTILINE | re.DOTALL))
    of_values = {"DateStyle", "IntervalStyle", "TimeZone", "extra_float_digits", "bytea_output", "quote_all_identifiers"}
    assert of_values < SESSION_SETTINGS.keys()
    assert of_values == {name for name in SESSION_SETTINGS if re.search(rf'SET "?{name}"? = ', heads["ddl_tables"])}
    for name, head in heads.items():
        is_of_names = name in ("ddl_tables", "ddl_type", "ddl_commands")
        assert ("SET quote_all_identifiers = off" in head) == is_of_names, name

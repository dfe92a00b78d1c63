"""Functions and operators of other users: cdcpipe never calls them, wherever the search path finds them."""

import psycopg
import pytest

from support.cli_process import run_cli
from support.published_database import PublishedDatabase

SHADOWS = """
do $do$
declare
  shadow record;
  signature text;
begin
  for shadow in
    select oprname as name, null as function, array_remove(array[oprleft, oprright], 0) as types, oprresult as result
    from pg_operator
    where oprnamespace = 'pg_catalog'::regnamespace and oprleft <> 0 and oprresult <> 0
    union all
    select null, proname, proargtypes::oid[], prorettype
    from pg_proc
    where pronamespace = 'pg_catalog'::regnamespace and prokind = 'f' and not proretset and pronargs > 0
          and not exists (select from pg_type where oid = any (proargtypes::oid[] || prorettype) and typtype = 'p')
    union all
    -- They fit better than PostgreSQL's own, which take two values of one type.
    select name, null, array[a, b]::regtype[]::oid[], 'bool'::regtype
    from unnest(array['=', '<>', '>=', '<']) name, unnest(array['oid', 'int2', 'int4']) a, unnest(array['oid', 'int2', 'int4']) b
  loop
    signature := format('(%s)', (select string_agg(format_type(type, null), ', ') from unnest(shadow.types) type));
    begin
      execute format('create function evil.%I%s returns %s language plpgsql as $$ begin raise exception %L; end $$',
                     coalesce(shadow.function, shadow.name), signature, format_type(shadow.result, null), 'a stranger''s function');
      if shadow.name is not null then
        execute format('create operator evil.%s (function = evil.%I, leftarg = %s, rightarg = %s)', shadow.name, shadow.name,
                       format_type(shadow.types[1], null), format_type(shadow.types[2], null));
      end if;
    exception when others then null;  -- there is one already, or it takes a type that no function in PL/pgSQL takes
    end;
  end loop;
end $do$
"""


def rendered(on: PublishedDatabase, *args: str) -> tuple[int, bytes, str]:
    """Return exit code, stdout and stderr. Nothing is confirmed."""
    on.released()
    with on.cli("-N", "--binary", *args, header=False) as cli:
        out = b"".join(iter(cli.read_bytes, b""))
        return cli.wait(), out, cli.stderr


def test_no_function_of_another_user_is_called(on18: PublishedDatabase) -> None:
    on18.sql(
        "create type mood as enum ('ok', 'sad')",
        "create table u (id int primary key, m mood default 'ok', ms mood[], r regclass, amount money)",
        "alter publication p add table u",
        "insert into u values (1, 'sad', array['ok', 'sad']::mood[], 'u', '12.5')",
    )
    end = ["--endpos", str(on18.value("select pg_current_wal_insert_lsn()"))]
    outputs = [["-J", "-o", "include-default", "-o", "include-domain-data-type", *end], ["--output", "test_decoding", *end]]
    expected = [rendered(on18, *each) for each in outputs]
    assert [(code, stderr) for code, _, stderr in expected] == [(0, "")] * 2
    assert b'"type":"mood"' in expected[0][1]

    on18.sql("create schema evil", SHADOWS, f'alter database "{on18.database.name}" set search_path = evil, pg_catalog, public')
    with on18.database.connect() as other, pytest.raises(psycopg.errors.RaiseException, match="a stranger's function"):
        other.execute("select 1::oid >= 2::int4")
    assert [rendered(on18, *each) for each in outputs] == expected

    base = ["-d", on18.database.dsn, "-S", f"{on18.slot}_new"]
    for command in (
        ["prepare", *base, "--publication", "p", "-c", "--parts"],
        ["slot", *base],
        ["ddl", "install", "-d", on18.database.dsn],
        ["ddl", "status", "-d", on18.database.dsn],
        ["doctor", *base, "--publication", "p"],
    ):
        code, _, stderr = run_cli(*command)
        assert (code, stderr) == (0, ""), command[:2]

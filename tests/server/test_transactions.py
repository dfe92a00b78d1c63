"""Streamed transactions of a real server, assembled: the result equals version 1 of the protocol."""

import random

import postgres
import pytest

from cdcpipe.ddl import script
from cdcpipe.pgoutput.transactions import Transactions
from support.logical_stream import Both, peek
from support.seeds import SEED
from support.whole_transactions import plain, rows_with_columns, take_all


def workload(database: postgres.Database, rng: random.Random) -> None:
    sessions = [database.connect() for _ in range(3)]
    depth = [0] * len(sessions)
    for number in range(120):
        which = rng.randrange(len(sessions))
        session = sessions[which]
        if not depth[which]:
            session.execute("begin")
            depth[which] = 1
        action = rng.random()
        if action < 0.5:
            session.execute(f"insert into t select {number} from generate_series(1, {rng.choice([1, 50, 400])})")
        elif action < 0.6:
            session.execute(f"insert into u values ({number}, 'sad')")
        elif action < 0.65:
            # Inside a savepoint only those that do not belong to it: see the module's docstring.
            session.execute(f"select pg_logical_emit_message({depth[which] == 1 and rng.random() < 0.7}, 'p', 'x')")
        elif action < 0.7:
            session.execute(f"create table created_{number} ()")  # DDL capture says in which savepoint
        elif action < 0.82:
            session.execute(f"savepoint s{depth[which]}")
            depth[which] += 1
        elif action < 0.92 and depth[which] > 1:
            depth[which] = rng.randrange(1, depth[which])
            verb = rng.choice(["release", "rollback to"])
            session.execute(f"{verb} s{depth[which]}")
            depth[which] += verb == "rollback to"
        elif action > 0.94:
            session.execute(rng.choice(["commit", "commit", "rollback"]))
            depth[which] = 0
    for session in sessions:
        session.execute("commit")
        session.close()


@pytest.mark.parametrize("streaming", ["on", "parallel"])
def test_the_same_as_version_1_from_a_real_server(pg: postgres.Cluster, streaming: str) -> None:
    if streaming == "parallel" and pg.version_num < 160000:
        pytest.skip("streaming=parallel is PostgreSQL 16's")
    print(f"CDCPIPE_TEST_SEED={SEED}")
    with pg.database() as database:
        both = Both(database, "pgoutput")
        both.run("create type mood as enum ('sad', 'ok')")
        both.run("create table t (id int, v text default repeat('v', 200)); create table u (id int primary key, m mood)")
        both.run(script.install("cdcpipe", script.Settings()))
        both.begin()
        workload(database, random.Random(SEED))
        # DDL that is the first in a savepoint, and undone with it.
        both.run(
            "begin; insert into t select g from generate_series(1, 400) g; savepoint a; create table undone (); savepoint b;"
            " create table undone_too (); release b; rollback to a; savepoint c; create table kept (); release c; commit"
        )
        # DDL that is undone; an undone part with another shape inside a transaction that commits; a truncate.
        both.run("begin; alter table t add column w int; insert into t select 1, 'x', g from generate_series(1, 4000) g; rollback")
        both.run(
            "begin; insert into t select g from generate_series(1, 400) g; savepoint a; alter table t add column w int;"
            " insert into t select g, 'x', g from generate_series(1, 400) g; rollback to a; insert into t values (1);"
            " truncate u; commit"
        )
        both.run("insert into t values (1); begin; alter table t add w int; insert into t select 1, 'x', 1; commit")
        both.run(
            "do $$ begin for i in 1..50 loop begin insert into t values (i);"
            " if i % 3 = 0 then raise 'no'; end if; exception when others then null; end; end loop; end $$"
        )
        expected = both.raw()
        options = {"proto_version": "4" if streaming == "parallel" else "2", "streaming": streaming}
        options |= {"publication_names": "p", "messages": "true"}
        session = {"logical_decoding_work_mem": "64kB"}
        if pg.version_num >= 180000:
            session["debug_logical_replication_streaming"] = "immediate"
        streamed = peek(database.dsn, both.slots[0], options, both._now(), **session)
        both.connection.close()
    assert {b"S", b"A", b"c"} <= {data[:1] for _, data in streamed}
    transactions = Transactions(streaming_parallel=streaming == "parallel", spill_threshold=100_000)
    records = []
    for lsn, data in streamed:
        transactions.feed(lsn, data)
        records += take_all(transactions)
    assert not transactions._held.all()
    assert plain(records) == plain(expected)
    assert rows_with_columns(records) == rows_with_columns(expected)

"""Which callbacks a plugin gets from a real server, and in which order, as the API's docstrings say."""

from __future__ import annotations

import re

import pytest

from cdcpipe.plugins.renderer import Renderer
from support.logical_stream import both_on
from support.recorder import Recorder

# The grammar of the module's docstring; each callback is a word.
TRANSACTION = r"(filter_by_origin )?begin (change |truncate |message )*commit "
PREPARED = r"(filter_by_origin )?begin_prepare (change |truncate |message )*prepare |commit_prepared |rollback_prepared "
BLOCK = r"(filter_by_origin )?stream_start (stream_change |stream_truncate |stream_message )*stream_stop "
STREAM = rf"{BLOCK}|stream_abort |stream_commit |stream_prepare "


@pytest.fixture
def both(pg):
    with both_on(pg, "pgoutput", logical_decoding_work_mem="64kB") as made:
        made.run("create table t (id int, v text default repeat('v', 100)); create table u (id int)")
        yield made


def record(both, options=None) -> Recorder:
    plugin = Recorder()
    renderer = Renderer(plugin, lambda lsn, record: None)
    for wal_start, data in both.raw(options):
        renderer.feed(wal_start, data)
    renderer.close()
    return plugin


def names(plugin) -> list[str]:
    return [call[0] for call in plugin.calls]


def of_transaction(plugin, xid) -> list[str]:
    """Return the calls for one transaction. Of a run of equal calls, return one."""
    mine = [name for name, *args in plugin.calls if args and getattr(args[0], "xid", None) == xid]
    return [name for number, name in enumerate(mine) if number == 0 or mine[number - 1] != name]


def test_transactions(both):
    both.begin()
    both.run("alter table t replica identity full")
    both.run("begin; insert into t values (1); update t set id = 2; delete from t; truncate t, u; commit")
    both.run("begin; insert into t values (1); rollback")
    both.run("create table unpublished_rows ()")
    both.run(
        """
        begin; insert into u values (1); savepoint s; insert into u values (2); rollback to s;
        select pg_logical_emit_message(true, 'p', ''); select pg_logical_emit_message(false, 'p', '');
        insert into u values (3); commit
        """
    )
    both.run("begin; insert into u values (4); prepare transaction 'callbacks'")
    both.run("commit prepared 'callbacks'")
    plugin = record(both)
    assert names(plugin) == [
        *("begin", "change", "change", "change", "truncate", "commit"),
        # Not transactional: it comes as soon as it is written.
        *("message", "begin", "change", "message", "change", "commit"),
        *("begin", "change", "commit"),
        "shutdown",
    ]
    _, txn, commit_lsn, lsn = plugin.calls[5]
    assert all(call[1] is txn for call in plugin.calls[:5])
    assert commit_lsn == txn.final_lsn < txn.end_lsn == lsn


def test_prepared_transactions(both):
    both.begin(two_phase=True)
    both.run("begin; insert into u values (1); truncate u; prepare transaction 'one'")
    both.run("insert into t values (2)")
    both.run("begin; insert into t values (3); prepare transaction 'two'")
    both.run("rollback prepared 'two'")
    both.run("commit prepared 'one'")
    plugin = record(both, {"two_phase": "on", "proto_version": "3"})
    assert names(plugin) == [
        *("begin_prepare", "change", "truncate", "prepare"),
        *("begin", "change", "commit"),
        *("begin_prepare", "change", "prepare", "rollback_prepared", "commit_prepared"),
        "shutdown",
    ]
    gids = [args[0].gid for name, *args in plugin.calls if "prepare" in name]
    assert gids == ["one", "one", "two", "two", "two", "one"]
    assert plugin.calls[0][1] is plugin.calls[3][1]


def test_transactions_in_progress(both):
    both.begin(two_phase=True)
    rows = "insert into t select generate_series(1, 2000)"
    with both.database.connect() as other:
        other.execute("begin")
        other.execute(rows)
        both.run(f"begin; {rows}; savepoint a; {rows}")
        other.execute(f"savepoint b; {rows}")
        both.run("rollback to a; select pg_logical_emit_message(true, 'p', ''); truncate u")
        both.run("select pg_logical_emit_message(false, 'p', '')")
        both.run(rows)
        both.run("commit")
        both.run("insert into t values (1)")
        other.execute("rollback")
    both.run(f"begin; {rows}; prepare transaction 'large'")
    both.run("commit prepared 'large'")
    plugin = record(both, {"streaming": "on", "two_phase": "on", "proto_version": "3"})
    said = names(plugin)
    assert re.fullmatch(rf"({STREAM}|{TRANSACTION}|{PREPARED}|message )*shutdown ", "".join(f"{name} " for name in said)), said
    ends = [(name, args[0].xid) for name, *args in plugin.calls if name in ("stream_commit", "stream_prepare", "commit_prepared")]
    assert [name for name, _ in ends] == ["stream_commit", "stream_prepare", "commit_prepared"]
    committed, prepared = ends[0][1], ends[1][1]
    assert ends[2][1] == prepared
    aborts = [(args[0].xid, args[1]) for name, *args in plugin.calls if name == "stream_abort"]
    (sub,) = {subxid for xid, subxid in aborts if xid == committed}
    assert sub != committed
    if both.database.cluster.version != "18":  # which sends nothing of what it knows to be aborted
        assert any(xid == subxid != committed for xid, subxid in aborts)
    mine = of_transaction(plugin, committed)
    assert mine[:3] == ["stream_start", "stream_change", "stream_stop"]
    assert mine[-2:] == ["stream_stop", "stream_commit"]
    assert {"stream_abort", "stream_message", "stream_truncate"} <= set(mine)
    changes = [args[2].xid for name, *args in plugin.calls if name == "stream_change" and args[0].xid == committed]
    assert {committed, sub} <= set(changes)
    # Between its blocks others come whole: what is not transactional, and what was committed meanwhile.
    assert {"message", "begin"} <= set(said)


@pytest.mark.parametrize("options", [{}, {"streaming": "on", "proto_version": "2"}])
def test_transactions_of_another_origin(both, options):
    """The filter is asked once for each transaction. No change of a refused transaction reaches the plugin."""
    origins = [f"{name}_{both.database.name}" for name in ("wanted", "unwanted")]
    for origin in origins:
        both.run(f"select pg_replication_origin_create('{origin}')")
    both.begin()
    for origin, rows in [*((origin, rows) for rows in (1, 3000) for origin in origins), ("", 1)]:
        if origin:
            both.run(f"select pg_replication_origin_session_setup('{origin}')")
        both.run(f"begin; insert into t select generate_series(1, {rows}); commit")
        if origin:
            both.run("select pg_replication_origin_session_reset()")
    plugin = Recorder()
    plugin.filter_by_origin = lambda origin: plugin.calls.append(("filter_by_origin", origin)) or origin.name.startswith("un")
    renderer = Renderer(plugin, lambda lsn, record: None)
    for wal_start, data in both.raw(options):
        renderer.feed(wal_start, data)
    said = names(plugin)
    assert [origin.name for name, origin, *_ in plugin.calls if name == "filter_by_origin"] == origins * 2
    assert said.count("commit") + said.count("stream_commit") == 3
    assert said.count("change") + said.count("stream_change") == 3002
    if options:
        assert said.count("stream_commit") == 1
        assert {args[0].origin.name for name, *args in plugin.calls if name.startswith("stream_")} == {origins[0]}
    for origin in origins:
        both.run(f"select pg_replication_origin_drop('{origin}')")

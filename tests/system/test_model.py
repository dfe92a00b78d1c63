"""Random transactions on random tables, while parts are killed: every table equals its source, and has every change once."""

from pathlib import Path
from typing import Any

import equality
import postgres
import pytest
from model import Model
from model_ledger import Change, Ledger
from soak_round import SETTINGS, Round

from spark_sink.changelog.tables import changelogs_of
from spark_sink.warehouse import stored_histories
from spark_sink.warehouse.warehouse import Warehouse
from support.requirements import need
from support.seeds import SEED


@pytest.mark.spark
def test_tables_equal_their_sources_whatever_is_killed(spark: Any, tmp_path: Path) -> None:
    """A snapshot under concurrent writes. Then streamer, server and driver are killed. (`scripts/soak` does this for longer.)

    Changelogs, replicas, and stored histories are compared.
    """
    print(f"CDCPIPE_TEST_SEED={SEED}")
    need("18")
    with postgres.Cluster("18", settings=SETTINGS) as cluster:
        kills = ("streamer", "server", "driver")
        history = ("--history", "table", "--history-interval", "3")
        played = Round(cluster, tmp_path, SEED, kills, moments=("tables",), work=20, before=20, tables=4, options=history)
        print(played.play(spark))
    # The comparison finds what is missing, and what is there once too often, in a table whose last change came with the stream.
    streamed = _streamed(spark, played)
    candidates = [(n, c) for n, c in played.ledger.changes.items() if c[-1].op != "drop" and c[-1].xid in streamed]
    name, changes = max(candidates, key=lambda item: len(item[1]))
    for wrong in (changes[:-1], [*changes, changes[-1]], [*changes, Change(changes[-1].xid, "delete", None, None)]):
        assert list(equality.compare_changelog(spark, played.warehouse, Ledger({name: wrong}))), name
    assert not list(equality.compare_changelog(spark, played.warehouse, Ledger({name: changes})))
    house = Warehouse.existing(played.warehouse)
    table = next(table for table in house.tables() if stored_histories.facts(house, table) is not None)
    wrong = [*played.ledger.changes[table.name], Change(0, "insert", -1, None)]
    assert list(equality.compare_history(spark, house, table, wrong)) == ["stamps: missing [-1], surplus []"]


def _streamed(spark: Any, played: Round) -> set[int]:
    """Return the xids of the transactions in the changelogs. The other transactions are in snapshots."""
    house = Warehouse.existing(played.warehouse)
    there = [changelogs_of(spark, house).read(table) for table in house.tables() if house.has_changelog(table)]
    return {xid for changes in there for (xid,) in changes.where("_cdc_op != 'snapshot'").select("_cdc_xid").distinct().collect()}


def test_the_ledger_has_what_is_committed(database: postgres.Database) -> None:
    """Also, the same seed gives the same transactions."""
    print(f"CDCPIPE_TEST_SEED={SEED}")
    ledgers = []
    for _ in range(2):
        with database.cluster.database() as made, made.connect() as connection:
            model = Model(made.connect, seed=SEED, tables=4)
            model.prepare()
            model.work(60)
            ledgers.append(model.ledger())
            for name, relation in model.relations().items():
                there = {stamp for (stamp,) in connection.execute(f"select stamp from {relation.sql}")}
                assert there == Ledger.stamps(ledgers[-1].changes[name]), name
            model.close()
    done = [[(c.op, c.stamp, c.old_stamp) for name in sorted(ledger.changes) for c in ledger.changes[name]] for ledger in ledgers]
    assert done[0] == done[1]
    assert {op for op, *_ in done[0]} >= {"insert", "update"}

"""The random transactions of scripts/soak: their ledger has what was committed."""

import os
import random

import postgres
from model import Ledger, Model

SEED = int(os.environ.get("CDCPIPE_TEST_SEED", random.randrange(1 << 32)))


def test_the_ledger_has_what_is_committed(database: postgres.Database) -> None:
    """And the same seed gives the same transactions."""
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

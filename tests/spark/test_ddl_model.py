"""Random DDL and changes by several sessions, on several versions of the server, while runs are killed.

With captured DDL every replica equals its table, and the changelog tells what the table was. Without it, whatever differs is named.
(`scripts/soak --ddl` does this for longer.)
"""

from pathlib import Path
from typing import Any

import postgres
import pytest
from ddl_rounds import SETTINGS, DdlRound
from ddl_workload import Workload

from support.requirements import need
from support.seeds import SEED


@pytest.mark.spark
@pytest.mark.parametrize(
    ("version", "options"),
    [
        ("18", {"parts": 2, "steps": 50, "kills": 1, "states": 4}),
        ("17", {"parts": 1, "steps": 30, "states": 1}),
        ("15", {"parts": 1, "steps": 30, "is_captured": False}),
    ],
)
def test_tables_follow_random_ddl(spark: Any, tmp_path: Path, version: str, options: dict[str, Any]) -> None:
    print(f"CDCPIPE_TEST_SEED={SEED}")  # shown if the test fails
    need(version)
    with postgres.Cluster(version, settings=SETTINGS) as cluster:
        print(DdlRound(cluster, tmp_path, SEED, spark, **options).play())


def test_the_same_seed_gives_the_same_statements() -> None:
    """No session waits for another one, and all tables still exist in the end."""
    need("18")
    print(f"CDCPIPE_TEST_SEED={SEED}")
    found = []
    with postgres.Cluster("18", settings=SETTINGS) as cluster:
        for _ in range(2):
            with cluster.database() as database:
                workload = Workload(database.connect, SEED, renames=True)
                workload.prepare()
                workload.fill()
                workload.work(150)
                workload.settle()
                columns = {name: workload.columns(name) for name in workload.tables}
                with database.connect() as connection:
                    rows = {name: connection.execute(f"select id from {name} order by id").fetchall() for name in columns}
                found.append((columns, rows))
                workload.close()
    assert found[0] == found[1]

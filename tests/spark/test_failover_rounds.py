"""A pipeline through several failovers that goes on by itself: each ends with equal tables, or with the gap named as well."""

from pathlib import Path
from typing import Any

import pytest
from failover_rounds import FailoverRounds
from standbys import Pair

from support.requirements import need

pytestmark = pytest.mark.spark


def test_rounds(spark: Any, tmp_path: Path) -> None:
    need("18")
    with Pair("18") as pair, FailoverRounds(pair, tmp_path, spark, seed=13) as rounds:
        for kind in ("synchronous", "lagging"):
            rounds.play(kind)

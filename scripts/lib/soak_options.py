"""The options of scripts/soak. This module imports the standard library only, so that --help needs no environment."""

from __future__ import annotations

import argparse
import random

import postgres
from demo_options import description_of

__all__ = ["BIG_CASES", "EXECUTOR", "FAILOVER_KINDS", "KILLS", "NETWORK_KINDS", "make_parser"]

KILLS = ("streamer", "walsender", "server", "driver", "jvm", "stop")
"""What is ended, and how: see `soak_round.Round._kill_…`."""
EXECUTOR = "executor"
"""On a cluster, too: with a local master executors are the JVM's threads."""
NETWORK_KINDS = ("mixed", "delay", "resets", "silence")
"""What the network between server and runs does: see weather.py."""
FAILOVER_KINDS = ("synchronous", "asynchronous", "lagging")
"""How a standby follows its primary: see failover_rounds.py."""
BIG_CASES = ("transaction", "columns", "tables", "value")
"""What can be large: see big.py."""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/soak", description=description_of("soak"), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10, help="begin no round after so long (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32), help="of the first round (default: a random one)")
    parser.add_argument("--tables", type=int, default=6, help="to begin with (default: %(default)s)")
    parser.add_argument("--postgres", choices=postgres.VERSIONS, help="default: a random one for each round")
    parser.add_argument("--kill", action="append", choices=[*KILLS, EXECUTOR], help="kill only this; repeatable")
    parser.add_argument(
        "--master",
        default="local[2]",
        help="Spark's master for the runs (default: %(default)s); with local-cluster[2,1,1024] executors are killed, too",
    )
    parser.add_argument("--leave-untold", action="store_true", help="leave what PostgreSQL does not tell to the program")
    parser.add_argument(
        "--big", choices=sorted(BIG_CASES), action="append", help="no rounds, but what is large: see big.py; repeatable"
    )
    parser.add_argument(
        "--rekey-with-rows", action="store_true", help="change keys in transactions that change the table's rows, too"
    )
    parser.add_argument("--alter-while-copied", action="store_true", help="alter tables while the snapshot copies them, too")
    parser.add_argument(
        "--network",
        nargs="?",
        const="mixed",
        choices=NETWORK_KINDS,
        help="the network between server and runs is bad, too: late (delay), broken off (resets) or silent; default: everything",
    )
    parser.add_argument(
        "--failover",
        nargs="?",
        const="mixed",
        choices=("mixed", *FAILOVER_KINDS),
        help="no rounds of that kind, but a primary that is killed and a standby that is promoted, again and again",
    )
    parser.add_argument(
        "--ddl",
        nargs="?",
        const="mixed",
        choices=("mixed", "captured", "uncaptured"),
        help="no rounds of that kind, but random DDL of several sessions, with captured DDL and without",
    )
    parser.add_argument("--scale", type=float, default=1.0, help="of the big cases (default: %(default)s)")
    return parser


if __name__ == "__main__":
    make_parser().parse_args()

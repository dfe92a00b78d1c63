"""scripts/soak: runs random transactions on random tables, kills the pipeline, and proves that all changes arrive exactly once.

A round makes a database with random tables, some of which have rows already (model.py). `cdcpipe-spark run -c` runs beside random
transactions. The round kills parts of the run, or the server, at random moments, each time after the run has made progress. Between
two runs it sometimes deletes a checkpoint or a replica, or changes how batches are cut. Half of the rounds keep stored histories.
With ``--network`` the runs reach the server through a proxy (faulty_proxy.py) that goes silent, breaks connections, throttles and
delays at random, or does only one of these (weather.py). When everything is in the tables, the round compares all of it
(equality.py). The seed of a round is printed: it decides what the round does, but not when. With ``--failover`` the rounds are
others: see failover_rounds.py; with ``--ddl``, too: see ddl_rounds.py.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import big
import postgres
from ddl_rounds import SETTINGS as DDL_SETTINGS
from ddl_rounds import DdlError, DdlRound
from failover_rounds import FailoverError, FailoverRounds
from soak_options import EXECUTOR, FAILOVER_KINDS, KILLS, make_parser
from soak_round import JVM_OPTIONS, NETWORK_SETTINGS, SETTINGS, Round, SoakError
from standbys import Pair

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import SparkSession


def rounds(args: argparse.Namespace) -> Iterator[int]:
    """Yield the seeds of the rounds, starting with the given one."""
    rng = random.Random(args.seed)
    deadline = time.monotonic() + 60 * args.minutes
    yield args.seed
    while time.monotonic() < deadline:
        yield rng.randrange(1 << 32)


def teller() -> Callable[[str], None]:
    """Return a function that prints a text with the seconds since now."""
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - started:6.1f} s  {text}", file=sys.stderr, flush=True)

    return say


def play(args: argparse.Namespace, seed: int, spark: SparkSession, directory: Path) -> None:
    """Play the round of this seed."""
    rng = random.Random(seed)
    version = args.postgres or rng.choice(postgres.available_versions())
    possible = KILLS if args.master.startswith("local[") else (*KILLS, EXECUTOR)
    kills = tuple(rng.choices(args.kill or possible, k=rng.randint(2, 5)))
    history = rng.choice([(), ("--history", "table", "--history-interval", rng.choice(["0.5", "3"]))])
    say = teller()
    print(f"round with --seed {seed}, PostgreSQL {version}", file=sys.stderr, flush=True)
    with postgres.Cluster(version, settings=SETTINGS | (NETWORK_SETTINGS if args.network else {})) as cluster:
        made = Round(
            cluster,
            directory,
            seed,
            kills,
            work=rng.choice([20, 60, 200]),
            before=rng.choice([0, 40]),
            tables=args.tables,
            leave_untold=args.leave_untold,
            rekey_with_rows=args.rekey_with_rows,
            alter_while_copied=args.alter_while_copied,
            say=say,
            options=("--master", args.master, *history),
            network=args.network,
        )
        say(made.play(spark))


def play_ddl(args: argparse.Namespace, seed: int, spark: SparkSession, directory: Path) -> None:
    """Play the round of random DDL of this seed."""
    rng = random.Random(seed)
    version = args.postgres or rng.choice(postgres.available_versions())
    is_captured, steps = args.ddl == "captured" or (args.ddl == "mixed" and rng.random() < 0.7), rng.choice([30, 100])
    print(f"round with --seed {seed}, PostgreSQL {version}, {args.ddl}", file=sys.stderr, flush=True)
    with postgres.Cluster(version, settings=DDL_SETTINGS) as cluster:
        made = DdlRound(cluster, directory, seed, spark, is_captured=is_captured, steps=steps, kills=rng.randrange(3))
        print(made.play(), file=sys.stderr, flush=True)


def play_big(args: argparse.Namespace) -> int:
    """Play the big cases; return the exit code."""
    for name in args.big:
        with tempfile.TemporaryDirectory(prefix="cdcpipe-big-") as directory, postgres.Cluster(args.postgres or "18") as cluster:
            try:
                figures = big.play(name, args.scale, cluster, Path(directory), teller())
            except big.BigError as ex:
                print(f"scripts/soak: {name}: {ex}", file=sys.stderr)
                return 1
            print(json.dumps(figures))
    return 0


def play_failover(args: argparse.Namespace, spark: SparkSession) -> int:
    """Play rounds of failover on one pair of servers; return the exit code."""
    rng = random.Random(args.seed)
    deadline = time.monotonic() + 60 * args.minutes
    directory = Path(tempfile.mkdtemp(prefix="cdcpipe-soak-"))
    done = 0
    print(f"rounds of failover with --seed {args.seed}, in {directory}", file=sys.stderr, flush=True)
    try:
        with Pair(args.postgres or "18") as pair, FailoverRounds(pair, directory, spark, args.seed) as rounds:
            while not done or time.monotonic() < deadline:
                kind = args.failover if args.failover in FAILOVER_KINDS else rng.choice(FAILOVER_KINDS)
                print(rounds.play(kind), file=sys.stderr, flush=True)
                done += 1
    except FailoverError as ex:
        print(f"scripts/soak: round {done + 1}, with --seed {args.seed}: {ex}", file=sys.stderr)
        return 1
    shutil.rmtree(directory)
    print(f"{done} rounds of failover, nothing lost in silence")
    return 0


def main() -> int:
    """Play rounds until the time is over or a round fails."""
    parser = make_parser()
    args = parser.parse_args()
    if args.kill and EXECUTOR in args.kill and args.master.startswith("local["):
        parser.error(f"--kill {EXECUTOR} needs a cluster: --master 'local-cluster[2,1,1024]'")
    if args.big:
        return play_big(args)
    from spark_sink.spark import session

    os.environ.setdefault("SPARK_SUBMIT_OPTS", JVM_OPTIONS)
    started = time.monotonic()
    done = 0
    spark = session.build(app_name="soak", format="delta", conf={"spark.sql.shuffle.partitions": "2"})
    try:
        if args.failover:
            return play_failover(args, spark)
        for seed in rounds(args):
            directory = Path(tempfile.mkdtemp(prefix="cdcpipe-soak-"))
            try:
                (play_ddl if args.ddl else play)(args, seed, spark, directory)
            except BaseException as ex:
                print(f"scripts/soak: round {done + 1} failed; its files are in {directory}", file=sys.stderr)
                print(f"scripts/soak: again: scripts/soak --minutes 0 {_again(args, seed)}", file=sys.stderr)
                if not isinstance(ex, SoakError | DdlError):
                    raise
                print(f"scripts/soak: {ex}", file=sys.stderr)
                return 1
            shutil.rmtree(directory)
            done += 1
    except KeyboardInterrupt:
        print("scripts/soak: interrupted", file=sys.stderr)
    finally:
        spark.stop()
    print(f"{done} rounds in {(time.monotonic() - started) / 60:.0f} minutes, nothing missing, nothing twice")
    return 0 if done else 1


def _again(args: argparse.Namespace, seed: int) -> str:
    options: dict[str, Any] = {"--seed": seed, "--tables": args.tables, "--postgres": args.postgres, "--master": args.master}
    options |= {"--network": args.network, "--ddl": args.ddl}
    said = [f"{name} {value}" for name, value in options.items() if value is not None]
    said += [f"--kill {kill}" for kill in args.kill or ()]
    flags = ("leave_untold", "rekey_with_rows", "alter_while_copied")
    said += [f"--{name.replace('_', '-')}" for name in flags if getattr(args, name)]
    return " ".join(said)


if __name__ == "__main__":
    sys.exit(main())

"""The backlog over a bad network (faulty_proxy.py): 50 ms late in each direction, or with a reset in 1 % of its pieces of 1 MiB.

After a reset, each program has to start again. pg_recvlogical does this itself, after 5 s; `cdcpipe` in a loop of the shell; `land`
by itself. Each run meets the same resets: at the same bytes of the n-th connection that carries data.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from faulty_proxy import FaultyProxy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from backlog import Backlog

    Command = Callable[[Backlog, str, str, Path], list[str]]

__all__ = ["measure"]

DELAY_S = 0.05
RESET_SHARE, PIECE_BYTES = 0.01, 1 << 20
SEED = 1
"""The first connection breaks after 15 MB, the second one after 197 MB."""


def delay(proxy: FaultyProxy) -> None:
    proxy.delay(DELAY_S)


def resets(proxy: FaultyProxy) -> None:
    proxy.reset_at_random(RESET_SHARE, SEED, PIECE_BYTES)


NETWORKS = {"tcp, 50 ms late": delay, "tcp, 1 % resets": resets}


def until_success(command: Command) -> Command:
    """Return the command in a loop of the shell that starts it again until it succeeds."""

    def looped(*arguments: Any) -> list[str]:
        return ["sh", "-c", 'until "$@"; do :; done', "sh", *command(*arguments)]

    return looped


def measure(
    made: Backlog,
    runs: int,
    variants: dict[str, dict[str, Command]],
    count: Mapping[str, Callable[[Path], dict[str, int]]],
    run_once: Callable[[list[str], str], dict[str, Any]],
) -> Iterator[dict[str, Any]]:
    """Yield a line per run; the variants of a network take turns.

    ``variants`` has their commands for each of `NETWORKS`, with the reference first. ``count`` has the functions that count the
    rows of a first run, which is not timed. (After a reset, a program may write rows again.)
    """
    for network, make_bad in NETWORKS.items():
        counts: dict[str, dict[str, int]] = {}
        for run in range(runs + 1):
            for number, (variant, command) in enumerate(variants[network].items()):
                with (
                    FaultyProxy(made.cluster.port) as proxy,
                    made.slot("pgoutput") as slot,
                    tempfile.TemporaryDirectory() as directory,
                ):
                    make_bad(proxy)
                    scratch = Path(directory)
                    arguments = command(made, slot, proxy.dsn(made.cluster.tcp_dsn), scratch)
                    result = run_once(arguments, "null" if run else str(scratch / "output"))
                    resets = len(proxy.random_resets)
                    if run == 0:
                        counts[variant] = count[variant](scratch) if variant in count else {}
                        continue
                yield {
                    "benchmark": "network",
                    "transport": network,
                    "variant": variant,
                    "reference": number == 0,
                    "run": run,
                    "rows_wanted": made.rows,
                    **counts[variant],
                    **result,
                    "resets": resets,
                    "server": made.cluster.version_num,
                }

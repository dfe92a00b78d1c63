"""A fake streamer without a server, for faults that a real one rarely has. It runs fake_streamer_program.py in a directory.

The directory has input files:

- `transactions.json`: the transactions of the "server", [[end LSN, [[relation id, its description, record], ...]], ...], the bytes
  in hexadecimal (`Transaction.pieces`);
- `turns.json`: the fault of each start, in order; after the last one there are no faults;
- `looks.json`: the faults of `prepare` after the first stream.

The program writes `starts` and `looks` (the arguments, a line each), `commands` (the commands from stdin), and `confirmed` (the
slot's position). It checks that each confirmed position is durable in `staging`.
"""

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cdcpipe.lsn import LSN
from cdcpipe.retry import RetryPolicy
from spark_sink.launcher import launcher as launcher_module
from spark_sink.launcher.config import LauncherConfig
from spark_sink.launcher.launcher import Launcher
from spark_sink.launcher.restart import RestartPolicy
from spark_sink.staging.filler import SealPolicy
from spark_sink.staging.log import list_segments
from support.pgoutput_stream import Transaction, decode_segment

PROGRAM = Path(__file__).with_name("fake_streamer_program.py")
SMALL = SealPolicy(segment_bytes=400, seal_interval_s=0.05, held_bytes=300, backlog_interval_s=0)

WORK = [Transaction(0x100 + 0x20 * n, tuple((16384 + n % 3, b"value %d" % n) for _ in range(1 + n % 5))) for n in range(1, 60)]


class Fake:
    """The directory of a fake streamer, and launchers that use it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.staging = directory / "staging"

    def set_turns(self, turns: list[dict[str, Any]]) -> None:
        (self.directory / "turns.json").write_text(json.dumps(turns))

    def set_looks(self, turns: list[dict[str, Any]]) -> None:
        (self.directory / "looks.json").write_text(json.dumps(turns))

    def set_transactions(self, transactions: list[Transaction]) -> None:
        encoded = [[t.end_lsn, [[number, text.hex(), rest.hex()] for number, text, rest in t.pieces()]] for t in transactions]
        (self.directory / "transactions.json").write_text(json.dumps(encoded))

    def config(self, **changes: Any) -> LauncherConfig:
        (self.directory / "streamed").unlink(missing_ok=True)
        config = LauncherConfig(
            slot="s",
            staging=self.staging,
            publications=("p",),
            connection=("-d", "db"),
            available_now=True,
            seal=SMALL,
            command=(sys.executable, "-I", "-S", str(PROGRAM), str(self.directory)),
        )
        return replace(config, **changes)

    def run(self, **changes: Any) -> Launcher:
        launcher = Launcher(self.config(**changes))
        launcher.start()
        launcher.wait()
        return launcher

    def read(self, name: str) -> list[str]:
        path = self.directory / name
        return path.read_text().splitlines() if path.exists() else []

    @property
    def starts(self) -> list[list[str]]:
        return [json.loads(line) for line in self.read("starts")]

    @property
    def confirmed_lsn(self) -> int:
        lines = self.read("confirmed")
        return LSN.parse(lines[0]) if lines else 0x100

    def landed(self) -> list[Transaction]:
        return [t for segment in list_segments(self.staging) for t in decode_segment(segment.path.read_bytes())]

    def check(self, transactions: list[Transaction]) -> None:
        """Assert that every transaction landed exactly once, and that none was confirmed before it was sealed."""
        assert self.landed() == transactions
        assert self.read("liar") == []


def make_fake(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    transactions: list[Transaction] = WORK,
    turns: list[dict[str, Any]] | None = None,
) -> Fake:
    """Create a fake streamer, and let launchers of this process restart it without a pause."""
    monkeypatch.setattr(
        launcher_module, "RestartPolicy", partial(RestartPolicy, pauses=RetryPolicy(first_pause_s=0.01, longest_pause_s=10))
    )
    made = Fake(directory)
    made.set_transactions(transactions)
    made.set_turns(turns or [])
    return made

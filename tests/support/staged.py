"""A staging log that a test writes step by step: epochs, transactions, a simulated server, a writer."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from spark_sink.staging.filler import Operation, SealPolicy, SegmentFiller
from spark_sink.staging.log import Epoch, Position, list_segments
from spark_sink.staging.writer import Failpoint, Sealing, StagingWriter
from support.pgoutput_stream import (
    Message,
    Transaction,
    commit,
    decode_segment,
    encode_stream,
)
from support.segments import describe_epoch

BIG = SealPolicy(segment_bytes=1 << 30, seal_interval_s=1e9)


def make_epoch(root: Path, number: int, start_lsn: int, *segments: tuple[int, int], **fields: object) -> Path:
    directory = root / f"{number:06d}"
    directory.mkdir(parents=True)
    (directory / "epoch.json").write_text(describe_epoch(start_lsn, **{"system_id": "7"} | fields))
    for start, end in segments:
        (directory / f"{start:016X}-{end:016X}.cdc").write_bytes(commit(end - 1, end))
    return directory


def ranges(root: Path, after: Position | None = None) -> list[tuple[int, int, int]]:
    return [(segment.epoch, segment.start_lsn, segment.end_lsn) for segment in list_segments(root, after)]


Drawn = list[tuple[int, list[tuple[int, bytes]] | bytes]]


def build(drawn: Drawn, start_lsn: int = 0x100) -> list[Transaction | Message]:
    transactions: list[Transaction | Message] = []
    end_lsn = start_lsn
    for distance, content in drawn:
        end_lsn += distance + 1
        is_message = isinstance(content, bytes)
        transactions.append(Message(end_lsn, content) if is_message else Transaction(end_lsn, tuple(content)))
    return transactions


SOURCE = Epoch(1, system_id="7", timeline=1, database="db", slot="s", publications=("p",), options={}, start_lsn=0x100)
"""The epoch that a test wants to begin."""


class Server:
    """Simulates a server with a slot: sends the transactions after the confirmed position, keeps them until they are confirmed."""

    def __init__(self, transactions: list[Transaction]) -> None:
        self.transactions = transactions
        self.confirmed_lsn = 0x100

    def stream(self, start_lsn: int) -> bytes:
        after = max(start_lsn, self.confirmed_lsn)
        return encode_stream([transaction for transaction in self.transactions if transaction.end_lsn > after])


def abandon(writer: StagingWriter) -> None:
    """Simulate the end of a process: close the descriptor of the lock, which releases the lock."""
    os.close(writer._lock._fd)
    writer._lock._fd = -1


def land(root: Path, server: Server, hook: Callable[[Failpoint], None] | None = None, chunk: int = 100) -> None:
    """Do the work of the launcher, in one thread instead of two."""
    writer = StagingWriter(root, slot="s", hook=hook)
    try:
        epoch = writer.begin_epoch(replace(SOURCE, start_lsn=server.confirmed_lsn))
        filler = SegmentFiller(epoch.start_lsn, SealPolicy(segment_bytes=250, seal_interval_s=1e9, held_bytes=200))

        def apply(operations: list[Operation]) -> None:
            for operation in operations:
                sealing = writer.apply(operation)
                if sealing is not None:
                    segment = writer.seal(sealing)
                    if hook is not None:
                        hook(Failpoint.BEFORE_FEEDBACK)
                    server.confirmed_lsn = segment.end_lsn
                    if hook is not None:
                        hook(Failpoint.AFTER_FEEDBACK)

        stream = server.stream(epoch.start_lsn)
        for pos in range(0, len(stream), chunk):
            apply(filler.feed(stream[pos : pos + chunk], 0))
        apply(filler.finish())
    finally:
        abandon(writer)


def landed(root: Path) -> list[Transaction]:
    return [transaction for segment in list_segments(root) for transaction in decode_segment(segment.path.read_bytes())]


WORK = build([(20, [(16384 + n % 3, b"v%d" % n)] * (1 + n % 4)) for n in range(12)] + [(20, [(16385, bytes(90))] * 8)])


def seal_all(writer: StagingWriter, operations: list[Operation]) -> None:
    for operation in operations:
        sealing = writer.apply(operation)
        if sealing is not None:
            writer.seal(sealing)


def fill(writer: StagingWriter, transactions: list[Transaction]) -> Sealing:
    filler = SegmentFiller(writer.end_lsn, BIG)
    sealing = None
    for operation in filler.feed(encode_stream(transactions), 0) + filler.finish():
        sealing = writer.apply(operation) or sealing
    assert sealing is not None
    return sealing

"""``cdcpipe decode``: renders or explains a captured stream.

    captures ─▶ records ─▶ (whole transactions) ─▶ output plugin ─▶ chunks ─▶ stdout

A capture is the pipe's bytes with headers, from a pgoutput slot: the output of ``cdcpipe -H``, or a segment of a staging log.
Several captures are one stream, in the order given. Each of them ends at the end of a record. The output is the same as that of
live rendering. An empty record, with which ``--idle-positions`` tells a position, is skipped.

This module holds at most one record in memory, beside what `Transactions` and the output plugin hold. Before each read, and
however it ends, it writes all rendered records. Bytes that can't be rendered raise an error that names the capture and the
position.
"""

from __future__ import annotations

import logging
import os
import select
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from io import FileIO
from typing import Final, Self

from cdcpipe.errors import CdcpipeError, InvalidArgumentsError, OutputError, ProtocolError
from cdcpipe.lsn import format_lsn
from cdcpipe.pgoutput.decode import NAMES, decode
from cdcpipe.pgoutput.messages import (
    Begin,
    BeginPrepare,
    Commit,
    CommitPrepared,
    Prepare,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
)
from cdcpipe.pgoutput.transactions import SPILL_THRESHOLD, Transactions
from cdcpipe.pipe.framing import RecordReader, encode_header
from cdcpipe.plugins import load
from cdcpipe.plugins.base import OutputPlugin, Query, lacks_origins
from cdcpipe.plugins.catalog import NoCatalogError
from cdcpipe.plugins.renderer import Renderer
from cdcpipe.replication.session import connected
from cdcpipe.subcommands.explain import Explainer
from cdcpipe.types.binary.decoder import UnknownTypeError
from cdcpipe.units import listed

__all__ = ["Captures", "RenderConfig", "explain", "render"]

log = logging.getLogger(__name__)

CHUNK_BYTES: Final = 256 << 10

_CHANGES = frozenset(b"IUDTM")
_NO_BOUNDARIES = frozenset(b"IUDTMRYO")
_STREAM_START: Final = ord("S")

_HINT = "a capture is all that cdcpipe -H wrote from a pgoutput slot, from its beginning; without -N, -j, -J and --output"


@dataclass(frozen=True, slots=True)
class RenderConfig:
    """How to render captures. ``output`` is the output plugin, ``options`` are its options.

    ``parameters`` are libpq's. They name the server to ask for what the stream does not contain; None: ask no server.
    """

    output: str
    options: Mapping[str, str | None] = field(default_factory=dict)
    parameters: Mapping[str, str] | None = None
    whole_transactions: bool = False
    spill_threshold: int = SPILL_THRESHOLD
    write_header: bool = False
    write_newline: bool = False


def render(files: Sequence[str], config: RenderConfig, out_fd: int = 1) -> None:
    """Render the captures with the output plugin, and write its records. ``-`` is stdin."""
    load(config.output, config.options, _no_catalog)  # find a mistake in its name or options before connecting
    with _Sink(out_fd) as sink, _catalog(config.parameters) as query:
        plugin = load(config.output, config.options, query)
        add, has_header, has_newline = sink.add, config.write_header, config.write_newline

        def write(lsn: int, record: bytes) -> None:
            if has_newline:
                record += b"\n"
            add(encode_header(lsn, len(record)) + record if has_header else record)

        with closing(Renderer(plugin, write, streaming_parallel=None)) as renderer, _whole(config, renderer.feed) as feed:
            captures = Captures(files, sink.flush)
            unfinished = _Unfinished()
            with captures.locating_errors():
                for lsn, data in captures if plugin.needs_origin is None else _with_origins(captures, plugin):
                    feed(lsn, data)
                    if data[0] not in _NO_BOUNDARIES:
                        unfinished.observe(data)
            for what in unfinished.describe(whole=config.whole_transactions):
                log.warning("%s ends %s", captures.name, what)


def _with_origins(records: Iterable[tuple[int, bytes]], plugin: OutputPlugin) -> Iterator[tuple[int, bytes]]:
    """Yield the records. Raises InvalidArgumentsError for a transaction in progress, whose origin may be missing."""
    for lsn, data in records:
        if data[0] == _STREAM_START:
            raise lacks_origins(plugin, "leave the option out, or capture without --streaming")
        yield lsn, data


def explain(files: Sequence[str], out_fd: int = 1) -> None:
    """Write each message of the captures as text for people. ``-`` is stdin."""
    with _Sink(out_fd) as sink:
        captures = Captures(files, sink.flush)
        explainer = Explainer()
        with captures.locating_errors():
            for lsn, data in captures:
                sink.add(explainer.explain(captures.pos, lsn, data).encode())


class Captures:
    """Reads the records of all captures as one stream. Iterating yields (LSN, record).

    ``name`` is the current capture. ``pos`` is the position in it of the last record's header, or of the error. ``before_read`` is
    called before each read, which may wait.
    """

    def __init__(self, files: Sequence[str], before_read: Callable[[], None]) -> None:
        self._files = files
        self._before_read = before_read
        self._reader = RecordReader()
        self._record = b""
        self._lsn = 0
        self.name = ""

    @property
    def pos(self) -> int:
        """The position of the first byte of that header in the capture."""
        return self._reader.pos

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        for file in self._files:
            self.name = "stdin" if file == "-" else file
            try:
                stream = open(0 if file == "-" else file, "rb", buffering=0, closefd=file != "-")  # noqa: SIM115 - in the with below
            except OSError as ex:
                raise self._unreadable(ex) from ex
            with stream:
                yield from self._records(stream)

    def _records(self, stream: FileIO) -> Iterator[tuple[int, bytes]]:
        reader = self._reader = RecordReader()
        try:
            while data := self._read(stream):
                reader.feed(data)
                for lsn, record in reader:
                    if record:  # an empty one is an idle position (--idle-positions), and no message
                        self._lsn, self._record = lsn, record
                        yield lsn, record
            reader.end()
        except ProtocolError:
            self._record = b""
            raise

    def _read(self, stream: FileIO) -> bytes:
        """Return the bytes at hand. Wait only if there are none."""
        self._before_read()
        try:
            while (data := stream.read(CHUNK_BYTES)) is None:  # a process that shares the pipe has made it non-blocking
                select.select([stream], [], [])
        except OSError as ex:
            raise self._unreadable(ex) from ex
        return data

    def _unreadable(self, ex: OSError) -> CdcpipeError:
        return CdcpipeError(f"{self.name} can't be read: {ex.strerror}")

    @contextmanager
    def locating_errors(self) -> Iterator[None]:
        """Add the position of the record to an error about it."""
        try:
            yield
        except (ProtocolError, InvalidArgumentsError, UnknownTypeError) as ex:
            record = self._record
            what = f" ({_kind(record)}, LSN {format_lsn(self._lsn)})" if record else ""
            message = f"{self.name}, byte {self.pos}{what}: {ex.message}"
            if isinstance(ex, ProtocolError):
                raise ProtocolError(message, hint=ex.hint or _HINT) from ex
            kind = InvalidArgumentsError if isinstance(ex, InvalidArgumentsError) else CdcpipeError
            raise kind(message, hint=ex.hint) from ex


def _kind(record: bytes) -> str:
    return NAMES.get(chr(record[0]), f"kind 0x{record[0]:02x}")


class _Sink:
    """Joins records into chunks, and writes them. Raises OutputError if the descriptor is closed or fails."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._pieces: list[bytes] = []
        self._size = 0

    def __enter__(self) -> Self:
        try:
            # If the descriptor is closed, the next file that is opened gets its number. So check now.
            os.fstat(self._fd)
        except OSError as ex:
            raise self._error(ex) from ex
        return self

    def __exit__(self, *exc: object) -> None:
        self.flush()

    def add(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._size += len(piece)
        if self._size > CHUNK_BYTES:
            self.flush()

    def flush(self) -> None:
        data = memoryview(b"".join(self._pieces))
        self._pieces.clear()
        self._size = 0
        while data:
            try:
                data = data[os.write(self._fd, data) :]
            except BlockingIOError:  # a process that shares the pipe has made it non-blocking
                select.select([], [self._fd], [])
            except OSError as ex:
                raise self._error(ex) from ex

    @staticmethod
    def _error(ex: OSError) -> OutputError:
        return OutputError(
            f"records can't be written: {ex.strerror}",
            hint="see whether the program that reads the records has ended, and whether there is room; then start again",
        )


@contextmanager
def _catalog(parameters: Mapping[str, str] | None) -> Iterator[Query]:
    """Yield the function that answers the output plugin's queries: it asks the server, or raises if none is given."""
    if parameters is None:
        yield _no_catalog
        return
    with connected(parameters) as connection:
        yield connection.execute


def _no_catalog(sql: str) -> Sequence[tuple[str | None, ...]]:
    del sql
    raise NoCatalogError


Feed = Callable[[int, bytes], object]


@contextmanager
def _whole(config: RenderConfig, feed: Feed) -> Iterator[Feed]:
    """Put `Transactions` before ``feed``, if the configuration asks for whole transactions."""
    if not config.whole_transactions:
        yield feed
        return
    transactions = Transactions(streaming_parallel=None, spill_threshold=config.spill_threshold)
    reader = RecordReader()

    def feed_whole(lsn: int, data: bytes) -> None:
        if transactions.is_direct and data and data[0] in _CHANGES:
            feed(lsn, data)
            return
        transactions.feed(lsn, data)
        while transactions.has_pending:
            reader.feed(transactions.take(CHUNK_BYTES))
            for record_lsn, record in reader:
                feed(record_lsn, record)

    with closing(transactions):
        yield feed_whole


class _Unfinished:
    """Tracks the transactions that have begun and not ended. It takes well-formed messages that may begin or end one."""

    def __init__(self) -> None:
        self._open_xid: int | None = None
        self._streamed: dict[int, None] = {}
        self._prepared: dict[str, None] = {}

    def observe(self, data: bytes) -> None:
        match message := decode(data, streaming_parallel=None):
            case Begin() | BeginPrepare():
                self._open_xid = message.xid
            case Commit():
                self._open_xid = None
            case StreamStart():
                self._streamed[message.xid] = None
            case StreamCommit():
                self._streamed.pop(message.xid, None)
            case StreamAbort() if message.xid == message.subxid:
                self._streamed.pop(message.xid, None)
            case Prepare():
                self._open_xid = None
                self._prepared[message.gid] = None
            case StreamPrepare():
                self._streamed.pop(message.xid, None)
                self._prepared[message.gid] = None
            case CommitPrepared() | RollbackPrepared():
                self._prepared.pop(message.gid, None)

    def describe(self, *, whole: bool) -> Iterator[str]:
        """Yield a sentence for each kind of transaction in the middle of which the stream ends."""
        if self._open_xid is not None:
            yield f"inside transaction {self._open_xid}: its records are not complete"
        result = "none of their records are written" if whole else "their records are not complete"
        if self._streamed:
            yield f"while transactions are in progress ({listed([*map(repr, self._streamed)])}): {result}"
        if self._prepared and whole:
            yield f"while transactions are prepared ({listed([*map(repr, self._prepared)])}): {result}"

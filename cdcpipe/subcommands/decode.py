"""What was captured, rendered or explained: `cdcpipe decode`.

    captures ─▶ records ─▶ (whole transactions) ─▶ output plugin ─▶ chunks ─▶ stdout

A capture is the pipe's bytes with headers, from a pgoutput slot: what ``cdcpipe -H`` wrote, or a segment of a staging log. Several
are one stream, in the order given; each ends where a record ends. What comes out is what live rendering writes.

No more is held than a record, or what `Transactions` and the output plugin hold. Before more is read, and on every way out, all
that has been rendered is written. Whatever the bytes, they are rendered or an error that names capture and position.
"""

from __future__ import annotations

import logging
import os
import select
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from cdcpipe.pipe.framing import RecordReader
from cdcpipe.plugins import load
from cdcpipe.plugins.base import Query
from cdcpipe.plugins.catalog import NoCatalogError
from cdcpipe.plugins.renderer import Renderer
from cdcpipe.replication.session import connected
from cdcpipe.subcommands.explain import Explainer
from cdcpipe.types.binary.decoder import UnknownTypeError

__all__ = ["Captures", "RenderConfig", "explain", "render"]

log = logging.getLogger(__name__)

CHUNK_BYTES: Final = 256 << 10

_CHANGES = frozenset(b"IUDTM")
_NO_BOUNDARIES = frozenset(b"IUDTMRYO")

_HINT = "a capture is all that cdcpipe -H wrote from a pgoutput slot, from its beginning; without -N, -j, -J and --output"


@dataclass(frozen=True, slots=True)
class RenderConfig:
    """How captures are rendered: ``output`` is the output plugin, ``options`` are its own.

    ``parameters`` are libpq's, of the server that is asked what the stream does not say; None: none is asked.
    """

    output: str
    options: Mapping[str, str | None] = field(default_factory=dict)
    parameters: Mapping[str, str] | None = None
    whole_transactions: bool = False
    spill_threshold: int = SPILL_THRESHOLD
    write_header: bool = False
    write_newline: bool = False


def render(files: Sequence[str], config: RenderConfig, out_fd: int = 1) -> None:
    """Write the records of the output plugin for the captures; ``-`` is stdin."""
    load(config.output, config.options, _no_catalog)  # a mistake in its name or options shows before there is a connection
    with _Sink(out_fd) as sink, _catalog(config.parameters) as query:
        plugin = load(config.output, config.options, query)
        add, has_header, has_newline = sink.add, config.write_header, config.write_newline

        def write(lsn: int, record: bytes) -> None:
            if has_newline:
                record += b"\n"
            add(b"w %X/%X %d\n%b" % (lsn >> 32, lsn & 0xFFFFFFFF, len(record), record) if has_header else record)

        with closing(Renderer(plugin, write, streaming_parallel=None)) as renderer, _whole(config, renderer.feed) as feed:
            captures = Captures(files, sink.flush)
            unfinished = _Unfinished()
            with captures.locating_errors():
                for lsn, data in captures:
                    feed(lsn, data)
                    if data[0] not in _NO_BOUNDARIES:
                        unfinished.observe(data)
            for what in unfinished.describe(whole=config.whole_transactions):
                log.warning("%s ends %s", captures.name, what)


def explain(files: Sequence[str], out_fd: int = 1) -> None:
    """Write what each message of the captures says; ``-`` is stdin."""
    with _Sink(out_fd) as sink:
        captures = Captures(files, sink.flush)
        explainer = Explainer()
        with captures.locating_errors():
            for lsn, data in captures:
                sink.add(explainer.explain(captures.pos, lsn, data).encode())


class Captures:
    """The records of captures, one stream: iterating yields (LSN, record).

    ``name``, the capture, and ``pos`` tell where the header of the record is that was yielded last, or what is wrong.
    ``before_read`` is called before there is any waiting for more.
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
        """The byte of the capture at which that header begins."""
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
                    self._lsn, self._record = lsn, record
                    yield lsn, record
            reader.end()
        except ProtocolError:
            self._record = b""
            raise

    def _read(self, stream: FileIO) -> bytes:
        """Return what there is, waiting only if there is nothing."""
        self._before_read()
        try:
            while (data := stream.read(CHUNK_BYTES)) is None:  # somebody who shares the pipe does not want to wait
                select.select([stream], [], [])
        except OSError as ex:
            raise self._unreadable(ex) from ex
        return data

    def _unreadable(self, ex: OSError) -> CdcpipeError:
        return CdcpipeError(f"{self.name} can't be read: {ex.strerror}")

    @contextmanager
    def locating_errors(self) -> Iterator[None]:
        """Add to an error about a record where that is."""
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
    """Joins what is to be written into chunks; raise OutputError if the descriptor is closed or fails."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._pieces: list[bytes] = []
        self._size = 0

    def __enter__(self) -> Self:
        try:
            # Were it closed, the next file that is opened would get its number.
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
            except BlockingIOError:  # somebody who shares the pipe does not want to wait
                select.select([], [self._fd], [])
            except OSError as ex:
                raise self._error(ex) from ex

    @staticmethod
    def _error(ex: OSError) -> OutputError:
        return OutputError(f"records can't be written: {ex.strerror}", hint="the reader has closed the pipe, or the disk is full")


@contextmanager
def _catalog(parameters: Mapping[str, str] | None) -> Iterator[Query]:
    """Give what answers the output plugin's questions: the server, or nobody."""
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
    """Put `Transactions` before ``feed``, if that is asked for."""
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
    """What has begun and not ended; it looks at well-formed messages that may begin or end something."""

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
        """Yield, for each kind of transaction that has no end, where the stream ends."""
        if self._open_xid is not None:
            yield f"inside transaction {self._open_xid}: its records are not complete"
        result = "none of their records are written" if whole else "their records are not complete"
        if self._streamed:
            yield f"while transactions are in progress ({_list(self._streamed)}): {result}"
        if self._prepared and whole:
            yield f"while transactions are prepared ({_list(self._prepared)}): {result}"


def _list(names: Mapping[int, None] | Mapping[str, None]) -> str:
    shown = [repr(name) for name in names]
    return ", ".join(shown[:5]) + (f" and {len(shown) - 5} more" if len(shown) > 5 else "")

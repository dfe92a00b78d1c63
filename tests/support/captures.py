"""Builds captures by hand, and renders them like `cdcpipe decode`."""

import tempfile
from pathlib import Path

from cdcpipe.errors import CdcpipeError
from cdcpipe.pgoutput.messages import (
    Begin,
    Column,
    Commit,
    Insert,
    Message,
    Relation,
    StreamCommit,
    StreamStart,
    StreamStop,
    Type,
)
from cdcpipe.subcommands.decode import RenderConfig, explain, render
from support.cli_process import run_cli
from support.pgoutput_build import build
from support.pgoutput_stream import record


def capture(*messages: Message | bytes) -> bytes:
    """Return records with the LSNs 0/100, 0/200, …, and 0/0 for descriptions."""
    parts = []
    for number, message in enumerate(messages, 1):
        lsn = 0 if isinstance(message, Relation | Type) else number << 8
        parts.append(record(message if isinstance(message, bytes) else build(message), lsn))
    return b"".join(parts)


def relation(xid: int | None = None) -> Relation:
    return Relation(xid, 16385, "public", "t", "d", (Column(1, "id", 23, -1), Column(0, "v", 25, -1)))


def row(number: int, value: bytes | None = b"x", xid: int | None = None) -> Insert:
    return Insert(xid, 16385, (b"%d" % number, value))


BEGIN, COMMIT = Begin(0x900, 5, 7), Commit(0, 0x900, 0x930, 5)
PLAIN = (BEGIN, relation(), row(1), row(2, None), COMMIT)
STREAMED = (StreamStart(7, True), relation(7), row(1, xid=7), StreamStop(), StreamCommit(7, 0, 0x900, 0x930, 5))


def rendered(tmp_path: Path, *captures: bytes, output: str = "wal2json", **config: object) -> tuple[bytes, CdcpipeError | None]:
    """Render captures from files called 0.cdc, 1.cdc, …. Returns the output, and the error that ended the rendering."""
    options = {"format-version": "2"} if output == "wal2json" else {}
    files = []
    for number, data in enumerate(captures):
        path = tmp_path / f"{number}.cdc"
        path.write_bytes(data)
        files.append(str(path))
    error = None
    with tempfile.TemporaryFile() as out:
        try:
            render(files, RenderConfig(output, **{"options": options, "write_newline": True, **config}), out.fileno())
        except CdcpipeError as ex:
            error = ex
        out.seek(0)
        return out.read(), error


def explained(tmp_path: Path, data: bytes) -> tuple[str, CdcpipeError | None]:
    path = tmp_path / "explained.cdc"
    path.write_bytes(data)
    error = None
    with tempfile.TemporaryFile() as out:
        try:
            explain([str(path)], out.fileno())
        except CdcpipeError as ex:
            error = ex
        out.seek(0)
        return out.read().decode(), error


def decoded(*args: str, stdin: bytes = b"") -> bytes:
    code, out, stderr = run_cli("decode", *args, stdin=stdin)
    assert (code, stderr) == (0, "")
    return out

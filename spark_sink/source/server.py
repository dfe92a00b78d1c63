"""Segments for executors that do not see the staging directory: the driver serves them, each executor keeps copies. No pyspark.

    with SegmentServer(staging, "driver.example") as server:    # in the driver
        ...                                                     # server.path: a file, for its user alone, that says where it is
    origin = Origin.read(server.path)                           # in any process on the driver's machine
    fetch(origin, "000001/...-....cdc")                         # in an executor: the path of a copy

A segment goes over the network once to each executor that reads it, however many tables are in it, as a stream of bytes: neither
side holds it in memory, and there is no limit to its size. Copies are below Spark's local directory (else the system's
temporary one), for their user alone; what has not been used for a while goes once they take too much room.

Segments and indexes are all that is served, and only to who knows the key: each request is signed with it, the key is never
sent. What is sent is not encrypted, as Spark's own traffic is not unless it is told to.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import http.client
import json
import os
import re
import secrets
import shutil
import tempfile
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from cdcpipe.errors import InvalidArgumentsError
from spark_sink.staging.log import StagingError

if TYPE_CHECKING:
    from types import TracebackType

    from pyspark.sql import SparkSession


__all__ = ["SEGMENTS_PORT", "Origin", "SegmentServer", "fetch", "name_of", "serve_segments"]

_NAME = re.compile(r"[0-9]{6,9}/[0-9A-F]{16}-[0-9A-F]{16}\.(cdc|idx)", re.ASCII)
_SIGNATURE: Final = "X-Cdcpipe-Signature"
_TIMEOUT_S: Final = 60.0
_COPY_BYTES: Final = 1 << 20

CACHE_BYTES: Final = 1 << 30
"""Copies of more than this on one machine: the ones that were not used for the longest time go,"""
IDLE_S: Final = 120.0
"""but none that was used so short a time ago: a task may be about to open it."""


class Origin(NamedTuple):
    """Where a server is, and the key to it. Goes to executors with a task; not for logs."""

    host: str
    port: int
    key: str

    @classmethod
    def read(cls, path: Path | str) -> Origin:
        """Read what a `SegmentServer` wrote to its ``path``."""
        try:
            return cls(**json.loads(Path(path).read_bytes()))
        except (OSError, ValueError, TypeError) as ex:
            msg = f"no segment server is described by {path}"
            raise StagingError(msg, hint="the driver that started it has ended") from ex

    def sign(self, name: str) -> str:
        """Return the signature of a request for a file."""
        return hmac.new(self.key.encode(), name.encode(), hashlib.sha256).hexdigest()


def name_of(path: Path) -> str:
    """Return what a segment is called in requests."""
    return f"{path.parent.name}/{path.name}"


class SegmentServer:
    """Serves one staging directory from ``start`` to ``stop``, to executors that know this machine as ``host``."""

    def __init__(self, root: Path, host: str, *, bind: str | None = None, port: int = 0) -> None:
        """Listen on ``bind`` (left out: ``host``) and ``port`` (0: any); raise StagingError if that can't be."""
        try:
            self._server = _Server((bind or host, port), _Handler)
        except OSError as ex:
            msg = f"cannot listen on {bind or host}, port {port}, to serve segments to executors: {ex.strerror or ex}"
            raise StagingError(msg, hint="set spark.driver.host and spark.driver.bindAddress to what executors reach") from ex
        self._server.root = root
        self._server.origin = Origin(host, self._server.server_address[1], secrets.token_hex(32))
        self._directory = Path(tempfile.mkdtemp(prefix="cdcpipe-segments-"))
        self.path = self._directory / "origin.json"
        self.path.touch(mode=0o600)
        self.path.write_text(json.dumps(self._server.origin._asdict()))
        threading.Thread(target=self._server.serve_forever, name="cdcpipe-segments", daemon=True).start()

    def stop(self) -> None:
        """Serve nothing more."""
        self._server.shutdown()
        self._server.server_close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _type: type[BaseException] | None, _value: BaseException | None, _tb: TracebackType | None) -> None:
        self.stop()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    root: Path
    origin: Origin

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing here either: an executor that gets too little says so."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _TIMEOUT_S

    def do_GET(self) -> None:
        """Send a file."""
        name = self.path.removeprefix("/")
        if not hmac.compare_digest(self.headers.get(_SIGNATURE, ""), self.server.origin.sign(name)):
            self.send_error(HTTPStatus.FORBIDDEN)
            return
        if _NAME.fullmatch(name) is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        try:
            fd = os.open(self.server.root / name, os.O_RDONLY)
        except OSError:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        with open(fd, "rb") as stream:
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Length", str(os.fstat(stream.fileno()).st_size))
            self.end_headers()
            self.wfile.flush()
            self.connection.sendfile(stream)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's signature
        """Say nothing: who asks is told."""


def fetch(origin: Origin, name: str) -> Path:
    """Return where this machine's copy of a segment is, getting it and its index first if need be; StagingError if it can't."""
    path = _copies(origin) / name
    for directory in (path.parent.parent, path.parent):
        directory.mkdir(mode=0o700, exist_ok=True)
    # The index first: it would be built again from a segment that has none.
    _get(origin, str(Path(name).with_suffix(".idx")), path.with_suffix(".idx"), is_optional=True)
    _get(origin, name, path)
    _make_room(_copies(origin))
    return path


def _copies(origin: Origin) -> Path:
    """Return the directory of the copies: Spark deletes its own when the executor ends."""
    local = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0] or tempfile.gettempdir()
    digest = hashlib.sha256(origin.key.encode()).hexdigest()[:16]
    return Path(local) / f"cdcpipe-segments-{os.geteuid()}-{digest}"


def _get(origin: Origin, name: str, path: Path, *, is_optional: bool = False) -> None:
    """Make sure that a copy is there; one process gets it, others that want it wait."""
    if _use(path):
        return
    part = path.with_name(f".{path.name}.part")
    with open(part, "ab", opener=_private) as sink:
        fcntl.flock(sink, fcntl.LOCK_EX)
        if _use(path):  # it came while we waited
            part.unlink(missing_ok=True)
            return
        sink.seek(0)
        sink.truncate()
        try:
            if _download(origin, name, sink, is_optional=is_optional):
                sink.flush()
                part.rename(path)
        except (OSError, http.client.HTTPException) as ex:
            msg = f"segment {name} could not be got from the driver at {origin.host}:{origin.port}: {str(ex) or repr(ex)}"
            raise StagingError(
                msg, hint="executors must reach the driver; spark.cdcpipe.segments.port gives it a fixed port"
            ) from ex


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def _download(origin: Origin, name: str, sink: Any, *, is_optional: bool) -> bool:
    """Copy a file from the server; return False if it is optional, and not there."""
    connection = http.client.HTTPConnection(origin.host, origin.port, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", f"/{name}", headers={_SIGNATURE: origin.sign(name)})
        response = connection.getresponse()
        if response.status == HTTPStatus.NOT_FOUND and is_optional:
            return False
        if response.status != HTTPStatus.OK:
            raise OSError(f"{response.status} {response.reason}")
        expected = int(response.headers["Content-Length"])
        shutil.copyfileobj(response, sink, _COPY_BYTES)
        if sink.tell() != expected:
            raise OSError(f"{sink.tell()} of {expected} bytes came")
        return True
    finally:
        connection.close()


def _use(path: Path) -> bool:
    """Note that a copy is used now; return False if it is not there."""
    try:
        os.utime(path)
    except FileNotFoundError:
        return False
    return True


def _make_room(directory: Path) -> None:
    """Delete the oldest copies of those that are too many."""
    found = []
    for path in directory.glob("*/*"):
        try:
            status = path.stat()
        except FileNotFoundError:
            continue
        found.append((status.st_mtime, status.st_size, path))
    total = sum(size for _, size, _ in found)
    for used_at, size, path in sorted(found):
        if total <= CACHE_BYTES or used_at > time.time() - IDLE_S:
            return
        path.unlink(missing_ok=True)
        total -= size


SEGMENTS_PORT = "spark.cdcpipe.segments.port"
"""A setting of our own: the port on which the driver serves segments to executors that don't see staging; any if unset."""


def serve_segments(spark: SparkSession, staging: Path) -> SegmentServer:
    """Start to serve a staging directory to the session's executors, which know this machine as Spark's driver."""
    conf = spark.sparkContext.getConf()
    for setting in ("spark.network.crypto.enabled", "spark.ssl.rpc.enabled", "spark.authenticate.enableSaslEncryption"):
        if conf.get(setting, "false") == "true":
            raise InvalidArgumentsError(
                f"{setting} is set, and segments that the driver sends to executors are not encrypted",
                hint="let executors see the staging directory instead (--staging-shared yes)",
            )
    host = conf.get("spark.driver.host", "localhost")
    port = int(conf.get(SEGMENTS_PORT, "0"))
    return SegmentServer(staging, host, bind=conf.get("spark.driver.bindAddress", host), port=port)

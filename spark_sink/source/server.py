"""Sends segments from the driver to executors that cannot see the staging directory. Executors keep copies. No pyspark.

    with SegmentServer(staging, "driver.example") as server:    # in the driver
        server.address                                          # its address and key, which tasks carry to executors
    address = SegmentAddress.read(server.path)                  # in another process on this machine: the same, from a private file
    fetch(address, "000001/...-....cdc")                        # in an executor: returns the path of a copy

Each executor fetches a segment once, even if many tables are in it. Both sides stream the bytes: neither holds a segment in memory,
and its size has no limit. The copies are private files in Spark's local directory, or in the system's temporary directory. When
they take too much room, the executor deletes those that were not used for a while.

The server sends only segments and indexes, and only to clients that know the key. Clients sign each request with the key, and never
send the key itself. The contents are not encrypted, like Spark's own traffic by default.
"""

from __future__ import annotations

import contextlib
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
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from cdcpipe.errors import InvalidArgumentsError
from cdcpipe.threads import Worker
from spark_sink.files.local import private_opener
from spark_sink.files.system_hints import disk_hint_of
from spark_sink.files.temporary import directory_of_process
from spark_sink.staging.log import StagingError

if TYPE_CHECKING:
    from types import TracebackType

    from pyspark.sql import SparkSession


__all__ = ["SEGMENTS_PORT", "SegmentAddress", "SegmentServer", "fetch", "name_of", "serve_segments"]

_NAME = re.compile(r"[0-9]{6,9}/[0-9A-F]{16}-[0-9A-F]{16}\.(cdc|idx)", re.ASCII)
_SIGNATURE: Final = "X-Cdcpipe-Signature"
_TIMEOUT_S: Final = 60.0
_COPY_BYTES: Final = 1 << 20

CACHE_BYTES: Final = 1 << 30
"""When the copies on one machine are larger than this together, the least recently used ones are deleted,"""
IDLE_S: Final = 120.0
"""but not those used within this time: a task may be about to open them."""


class SegmentAddress(NamedTuple):
    """Address and key of a segment server. Tasks carry it to executors. Never log it."""

    host: str
    port: int
    key: str

    @classmethod
    def read(cls, path: Path | str) -> SegmentAddress:
        """Read the file ``path`` of a `SegmentServer`."""
        try:
            return cls(**json.loads(Path(path).read_bytes()))
        except (OSError, ValueError, TypeError) as ex:
            msg = f"{path} does not describe a segment server"
            raise StagingError(msg, hint="the driver that wrote it has ended") from ex

    def sign(self, name: str) -> str:
        """Return the signature of a request for a file."""
        return hmac.new(self.key.encode(), name.encode(), hashlib.sha256).hexdigest()


def name_of(path: Path) -> str:
    """Return the name of a segment in requests."""
    return f"{path.parent.name}/{path.name}"


class SegmentServer:
    """Serves one staging directory until ``stop``. Executors reach this machine under the name ``host``."""

    def __init__(self, root: Path, host: str, *, bind: str | None = None, port: int = 0) -> None:
        """Listen on ``bind`` (default: ``host``) and ``port`` (0: any free port). Raises StagingError if this is not possible."""
        try:
            self._server = _Server((bind or host, port), _Handler)
        except OSError as ex:
            msg = f"cannot listen on {bind or host}, port {port}, to serve segments to executors: {ex.strerror or ex}"
            raise StagingError(
                msg, hint="set spark.driver.host and spark.driver.bindAddress to an address that executors reach"
            ) from ex
        self._server.root = root
        self.address = self._server.address = SegmentAddress(host, self._server.server_address[1], secrets.token_hex(32))
        self._directory = Path(tempfile.mkdtemp(prefix="cdcpipe-segments-", dir=directory_of_process()))
        self.path = self._directory / "address.json"
        self.path.touch(mode=0o600)
        self.path.write_text(json.dumps(self.address._asdict()))
        Worker(target=self._server.serve_forever, name="cdcpipe-segments", daemon=True).start()

    def stop(self) -> None:
        """Stop serving."""
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
    address: SegmentAddress

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing: an executor that gets too few bytes reports it."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _TIMEOUT_S

    def do_GET(self) -> None:
        """Send a file."""
        name = self.path.removeprefix("/")
        if not hmac.compare_digest(self.headers.get(_SIGNATURE, ""), self.server.address.sign(name)):
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
        """Log nothing: the client gets the answer and reports errors."""


def fetch(address: SegmentAddress, name: str) -> Path:
    """Return the path of this machine's copy of a segment. Fetches the segment and its index if they are not there.

    Raises StagingError if the driver can't be reached or does not send the segment.
    """
    path = _copies(address) / name
    for directory in (path.parent.parent, path.parent):
        directory.mkdir(mode=0o700, exist_ok=True)
    # Fetch the index first: a task that finds a segment without an index would build one.
    _get(address, str(Path(name).with_suffix(".idx")), path.with_suffix(".idx"), is_optional=True)
    _get(address, name, path)
    _make_room(_copies(address))
    return path


def _copies(address: SegmentAddress) -> Path:
    """Return the directory of the copies, in Spark's local directory, which Spark deletes when the executor ends."""
    local = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0] or tempfile.gettempdir()
    digest = hashlib.sha256(address.key.encode()).hexdigest()[:16]
    return Path(local) / f"cdcpipe-segments-{os.geteuid()}-{digest}"


def _get(address: SegmentAddress, name: str, path: Path, *, is_optional: bool = False) -> None:
    """Make sure that a copy exists. One process fetches it; others that need it wait."""
    if _use(path):
        return
    part = path.with_name(f".{path.name}.part")
    with open(part, "ab", opener=private_opener) as sink:
        fcntl.flock(sink, fcntl.LOCK_EX)
        if _use(path):  # another process fetched it while we waited
            part.unlink(missing_ok=True)
            return
        sink.seek(0)
        sink.truncate()
        try:
            if _download(address, name, sink, is_optional=is_optional):
                sink.flush()
                part.rename(path)
        except (OSError, http.client.HTTPException) as ex:
            msg = f"cannot fetch segment {name} from the driver at {address.host}:{address.port}: {str(ex) or repr(ex)}"
            disk_hint = disk_hint_of(ex) if isinstance(ex, OSError) else None
            if disk_hint is not None:  # the part would keep the last room
                with contextlib.suppress(OSError):
                    sink.truncate(0)
            hint = disk_hint or "executors must reach the driver; spark.cdcpipe.segments.port gives it a fixed port"
            raise StagingError(msg, hint=hint) from ex


def _download(address: SegmentAddress, name: str, sink: Any, *, is_optional: bool) -> bool:
    """Copy a file from the server; return False if it is optional and does not exist."""
    connection = http.client.HTTPConnection(address.host, address.port, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", f"/{name}", headers={_SIGNATURE: address.sign(name)})
        response = connection.getresponse()
        if response.status == HTTPStatus.NOT_FOUND and is_optional:
            return False
        if response.status != HTTPStatus.OK:
            raise OSError(f"{response.status} {response.reason}")
        expected = int(response.headers["Content-Length"])
        shutil.copyfileobj(response, sink, _COPY_BYTES)
        if sink.tell() != expected:
            raise OSError(f"only {sink.tell()} of {expected} bytes arrived")
        return True
    finally:
        connection.close()


def _use(path: Path) -> bool:
    """Mark a copy as used now; return False if it does not exist."""
    try:
        os.utime(path)
    except FileNotFoundError:
        return False
    return True


def _make_room(directory: Path) -> None:
    """Delete the least recently used copies, as far as there are too many."""
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
"""A setting of cdcpipe: the port on which the driver serves segments; any free port if unset."""


def serve_segments(spark: SparkSession, staging: Path) -> SegmentServer:
    """Start a server of a staging directory for the session's executors, at the address of Spark's driver."""
    conf = spark.sparkContext.getConf()
    for setting in ("spark.network.crypto.enabled", "spark.ssl.rpc.enabled", "spark.authenticate.enableSaslEncryption"):
        if conf.get(setting, "false") == "true":
            raise InvalidArgumentsError(
                f"{setting} is set, but cdcpipe sends segments from the driver to executors without encryption",
                hint="let executors see the staging directory instead (--staging-shared yes)",
            )
    host = conf.get("spark.driver.host", "localhost")
    port = int(conf.get(SEGMENTS_PORT, "0"))
    return SegmentServer(staging, host, bind=conf.get("spark.driver.bindAddress", host), port=port)

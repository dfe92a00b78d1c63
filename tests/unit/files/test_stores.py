"""Clients of object stores, and a server on this machine whose answers are not Amazon's."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import fsspec
import pytest
from gcsfs.retry import HttpError  # type: ignore[import-untyped]

from cdcpipe.retry import RetryPolicy
from spark_sink.files import places, stores

EXISTS = """<?xml version="1.0" encoding="UTF-8"?>
<Error><Code>PreconditionFailed</Code><Message>At least one of the pre-conditions you specified did not hold</Message>\
<Key>shop/x</Key><BucketName>lake</BucketName><Resource>/lake/shop/x</Resource><Region>us-east-1</Region>\
<RequestId>185F8CB34287DB74</RequestId><HostId>dd9025bab4ad464b</HostId></Error>"""
"""As MinIO answers: without the element Condition, which Amazon's answers have."""
CONFLICT = """<?xml version="1.0" encoding="UTF-8"?>
<Error><Code>ConditionalRequestConflict</Code><Message>A conflicting conditional operation is in progress</Message></Error>"""


@pytest.mark.parametrize(("code", "said", "advised"), [(429, "refuses", "--seal-interval"), (403, "be reached", "GOOGLE_")])
def test_a_store_that_is_busy_lacks_no_credentials(monkeypatch: pytest.MonkeyPatch, code: int, said: str, advised: str) -> None:
    """Google's takes one write a second to an object."""
    monkeypatch.setenv("NO_GCE_CHECK", "true")

    def refuse(*_: Any) -> None:
        raise HttpError({"code": code, "message": "no"})

    monkeypatch.setattr(places, "read_bytes", refuse)
    with pytest.raises(places.StorageError, match=said) as caught:
        places.read_file(places.place("gs://lake/shop"))
    assert advised in (caught.value.hint or "")


class S3:
    """The objects of a server for S3's protocol. It refuses the next ``conflicts`` PUTs."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.conflicts = 0

    def put(self, path: str, data: bytes) -> tuple[int, str]:
        if self.conflicts:
            self.conflicts -= 1
            return 409, CONFLICT
        if self.objects.setdefault(path, data) is not data:
            return 412, EXISTS
        return 200, ""


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    store = S3()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_PUT(self) -> None:
            assert self.headers["If-None-Match"] == "*"
            status, text = store.put(self.path, self.rfile.read(int(self.headers["Content-Length"])))
            self.answer(status, text.encode())

        def do_GET(self) -> None:
            self.answer(200, store.objects[self.path])

        def answer(self, status: int, data: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
            for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION", "AWS_DEFAULT_REGION"):
                monkeypatch.setenv(name, "us-east-1")
            client = fsspec.get_filesystem_class("s3")
            client.clear_instance_cache()
            yield store
            client.clear_instance_cache()
        finally:
            server.shutdown()


def test_a_server_that_does_not_name_the_condition(s3: S3) -> None:
    root = places.place("s3a://lake/shop")
    places.check_store(root)
    places.put_if_absent(root / "x", b"one")
    places.put_if_absent(root / "x", b"one")  # as after a lost answer
    with pytest.raises(FileExistsError):
        places.put_if_absent(root / "x", b"two")
    assert s3.objects["/lake/shop/x"] == b"one"


def test_a_put_while_another_is_under_way_is_repeated(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "_PUTS", RetryPolicy(attempts=4))
    root = places.place("s3a://lake/shop")
    s3.conflicts = 3
    places.put_if_absent(root / "x", b"one")
    assert s3.objects == {"/lake/shop/x": b"one"}
    s3.conflicts = 1000
    with pytest.raises(OSError, match="A conflicting conditional operation is in progress"):
        places.put_if_absent(root / "y", b"one")

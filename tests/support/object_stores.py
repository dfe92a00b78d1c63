"""Runs emulated object stores on this machine: moto for S3, Azurite for Azure, fake-gcs-server for Google Cloud Storage.

The latter two are not Python packages. If npm and Go are installed, `scripts/test` installs them in the virtual environment.
Otherwise the tests look for them on the PATH, and are skipped if they are missing.
"""

import contextlib
import logging
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import fsspec
from moto.server import ThreadedMotoServer
from ports import free_port

from support.waiting import until

AZURITE = "azurite-blob"
FAKE_GCS = "fake-gcs-server"

# The well-known account and key from Azurite's manual.
ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@dataclass(frozen=True)
class Store:
    """A running store: its URL, with ``{}`` for the bucket, and the Spark settings that it needs in addition to the docs' ones."""

    kind: str
    url: str
    environment: dict[str, str]
    endpoint: str
    settings: list[str] = field(default_factory=list)


def missing(kind: str) -> str | None:
    """Return why a store of this kind can't run here: the missing program. None if it can run."""
    name = {"azure": AZURITE, "gcs": FAKE_GCS}.get(kind)
    return f"there is no {name}" if name is not None and _program(name) is None else None


@contextlib.contextmanager
def started(kind: str) -> Iterator[Store]:
    start, protocol = {"s3": (_s3, "s3"), "azure": (_azure, "abfs"), "gcs": (_gcs, "gs")}[kind]
    with start() as store:
        try:
            yield store
        finally:
            # fsspec keeps file systems, whatever the environment says meanwhile: the next store has another port.
            fsspec.get_filesystem_class(protocol).clear_instance_cache()


@contextlib.contextmanager
def _s3() -> Iterator[Store]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    endpoint = "http://{}:{}".format(*server.get_host_and_port())
    environment = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    environment |= {"AWS_REGION": "us-east-1", "AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": endpoint}
    try:
        yield Store("s3", "s3a://{}/shop", environment, endpoint)
    finally:
        server.stop()


@contextlib.contextmanager
def _azure() -> Iterator[Store]:
    options = ["--inMemoryPersistence", "--silent", "--skipApiVersionCheck", "--disableTelemetry", "--blobPort", "0"]
    with _running(AZURITE, *options) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if listens := re.search(r"successfully listens on http://(\S+)", line):
                break
        else:
            raise AssertionError(f"{AZURITE} has ended")
        endpoint = listens[1]
        connection = f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={ACCOUNT_KEY};"
        environment = {
            "AZURE_STORAGE_CONNECTION_STRING": f"{connection}BlobEndpoint=http://{endpoint}/{ACCOUNT};",
            "AZURE_STORAGE_ACCOUNT_KEY": ACCOUNT_KEY,
        }
        settings = {
            "abfs.endpoint": endpoint,
            "always.use.https": "false",
            "networking.library": "JDK_HTTP_URL_CONNECTION",  # the other library requires TLS
            # Azurite has only the blob API, which has no directories.
            "account.hns.enabled": "false",
            "fns.account.service.type": "BLOB",
        }
        conf = [f"spark.hadoop.fs.azure.{key}={value}" for key, value in settings.items()]
        yield Store("azure", f"abfs://{{}}@{ACCOUNT}.dfs.core.windows.net/shop", environment, endpoint, conf)


@contextlib.contextmanager
def _gcs() -> Iterator[Store]:
    # The server does not report a port that the system chose, and its answers contain the port. So choose a free one here.
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    options = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-public-host", f"127.0.0.1:{port}"]
    with _running(FAKE_GCS, "-backend", "memory", "-external-url", endpoint, "-log-level", "error", *options) as process:

        def answers() -> bool:
            assert process.poll() is None
            try:
                urllib.request.urlopen(f"{endpoint}/storage/v1/b").close()
            except OSError:
                return False
            return True

        until(answers, f"an answer of {FAKE_GCS}")
        # To find out whether a bucket has directories, gcsfs would ask another service, which is not emulated.
        environment = {"STORAGE_EMULATOR_HOST": endpoint, "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
        conf = [f"spark.hadoop.fs.gs.storage.root.url={endpoint}", "spark.hadoop.fs.gs.auth.type=UNAUTHENTICATED"]
        yield Store("gcs", "gs://{}/shop", environment, endpoint, conf)


def _program(name: str) -> str | None:
    return shutil.which(name, path=str(Path(sys.prefix) / "stores/bin")) or shutil.which(name)


@contextlib.contextmanager
def _running(name: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    program = _program(name)
    assert program is not None
    with subprocess.Popen([program, *options], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            yield process
        finally:
            process.kill()

"""Places in object stores. No test connects to a store."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fsspec import asyn

from cdcpipe.errors import InvalidArgumentsError
from spark_sink.delta import sql as delta
from spark_sink.files import places, stores
from spark_sink.files.places import StorageError, place
from spark_sink.warehouse.warehouse import Warehouse
from support.blocked_imports import import_without
from support.forked_commands import ForkedCommands
from support.paths import ROOT


def test_warehouses_that_cannot_be_in_a_store(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentsError, match="Parquet tables can't be in an object store"):
        Warehouse("s3a://bucket/lake", "parquet")
    for url in ("hdfs://node/lake", "file:///srv/lake", "https://host/lake"):
        with pytest.raises(InvalidArgumentsError, match="the warehouse can't be there"):
            Warehouse(url, "delta")
    with pytest.raises(InvalidArgumentsError, match="not a URL"):
        Warehouse(Path("s3a://bucket/lake"), "delta")
    assert place(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("start", ["s3a://bucket", "gs://bucket", "abfss://lake@account.dfs.core.windows.net"])
def test_a_url_has_one_reading(start: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a store // and .. are parts of a name. Hadoop removes them: Spark would merge into the tables of another warehouse."""
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "a2V5")
    for path in ("//shop", "/a//shop", "/./shop", "/a/../shop", "/.."):
        with pytest.raises(InvalidArgumentsError, match=r"the warehouse can't have a part of its path that is empty, \. or \.\."):
            Warehouse(f"{start}{path}", "delta")
    for path in ("/shop[1]", "/shop*", "/shop?", "/{a,b}"):
        with pytest.raises(InvalidArgumentsError, match="the warehouse can't have the characters"):
            Warehouse(f"{start}{path}", "delta")
    for path in ("/", "/shop/", "/a.b/..shop", "/a b/c%20d"):
        assert places.name(place(f"{start}{path}") / "t") == f"{start}{path.rstrip('/')}/t"


@pytest.mark.parametrize("option", ["--staging", "--checkpoint", "--spill"])
def test_other_directories_must_be_in_a_file_system(option: str, commands: ForkedCommands) -> None:
    options = {"--staging": "staging", "--warehouse": "s3a://bucket/lake"} | {option: "s3a://bucket/x"}
    arguments = [text for pair in options.items() for text in pair]
    done = commands.cdcpipe_spark("run", "-S", "s", "--publication", "p", *arguments)
    assert done.code == 1
    assert f"{option} must be a directory of a local or mounted file system, not a URL" in done.stderr


def test_missing_packages_for_a_store_are_named() -> None:
    s3, gcs = ("s3a://b/x", "s3"), ("gs://b/x", "gcs")
    for modules, named in (({"upath"}, [s3]), ({"gcsfs", "s3fs"}, [s3, gcs])):
        urls = [url for url, _ in named]
        done = import_without(modules, f"spark_sink.__main__ as m\nfor url in {urls}: m.invoke(['verify', '--warehouse', url])")
        for url, extra in named:
            assert f"error: {url}: " in done.stderr
            assert f"hint: pip install 'cdcpipe[{extra}]'" in done.stderr


def test_the_names_that_spark_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    # Otherwise gcsfs asks Google's machines for credentials, and waits.
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    assert places.name(place("s3a://bucket/lake/") / "t") == "s3a://bucket/lake/t"
    assert delta.table_name(place("s3a://bucket/a b") / "public.%41") == "spark_catalog.delta.`s3a://bucket/a b/public.%41`"
    assert places.name(place("gs://bucket/lake") / "t") == "gs://bucket/lake/t"


def test_a_request_to_google_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one, gcsfs waits for ever for a network that has become silent."""
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    made: Any = place("gs://bucket/lake")
    deadlines = made.fs.requests_timeout
    assert 0 < deadlines.sock_connect <= deadlines.sock_read < deadlines.total < 3600
    assert (made / "t").fs is made.fs
    assert place(places.name(made)).fs is made.fs  # type: ignore[attr-defined]


@pytest.mark.parametrize("scheme", ["abfs", "abfss"])
def test_a_place_in_azure_has_an_account(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "a2V5")
    url = f"{scheme}://lake@account.dfs.core.windows.net"
    assert places.name(place(url)) == f"{url}/"
    assert places.name(place(f"{url}/shop/") / "t") == f"{url}/shop/t"
    assert places.name(place(places.name(place(f"{url}/shop")))) == f"{url}/shop"
    one, two = (Warehouse(f"{scheme}://lake@{account}.dfs.core.windows.net/shop", "delta") for account in ("one", "two"))
    assert one.local_root(ROOT) != two.local_root(ROOT)
    for wrong in (
        "lake/shop",
        "lake@account/shop",
        "lake@account.dfs.core.chinacloudapi.cn/shop",
        "@account.dfs.core.windows.net/shop",
    ):
        with pytest.raises(InvalidArgumentsError, match=r"write abfss?://CONTAINER@ACCOUNT\.dfs\.core\.windows\.net/PATH"):
            place(f"{scheme}://{wrong}")


def test_a_move_that_is_repeated_leaves_the_moved_file_as_it_is(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    (source / "rows").write_bytes(b"rows")
    places.move_files(source, target, ["rows"])
    with pytest.raises(FileNotFoundError):
        places.move_files(source, target, ["rows"])
    assert (target / "rows").read_bytes() == b"rows"


class Azure:
    """A client of Azure whose copies are pending at first. Copies of files that have a status here get this one."""

    protocol = "abfs"

    def __init__(self, path: str, statuses: dict[str, list[str | None]]) -> None:
        self.path, self.statuses = path, statuses
        self.fs = self.service_client = self

    def __truediv__(self, name: str) -> "Azure":
        return Azure(f"{self.path}/{name}", self.statuses)

    @property
    def loop(self) -> Any:
        return asyn.get_loop()

    def copy(self, sources: list[str], targets: list[str]) -> None:
        assert [path.rpartition("/")[2] for path in sources] == [path.rpartition("/")[2] for path in targets]

    def get_blob_client(self, container: str, blob: str) -> Any:
        left = self.statuses[f"{container}/{blob}"]

        async def get() -> Any:
            return SimpleNamespace(copy=SimpleNamespace(status=left.pop(0) if len(left) > 1 else left[0]))

        return SimpleNamespace(get_blob_properties=get)


def test_a_copy_in_azure_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller commits the copies, and then removes the files that were copied."""
    monkeypatch.setattr(stores, "_COPY_PAUSE_S", 0.0)
    statuses: dict[str, list[str | None]] = {"c/two/a": ["pending", "pending", "success"], "c/two/b": [None]}
    source, target = Azure("c/one", statuses), Azure("c/two", statuses)
    places.copy_files(source, target, ["a", "b"])
    assert statuses["c/two/a"] == ["success"]
    statuses["c/two/a"] = ["pending", "failed"]
    with pytest.raises(StorageError, match="did not copy a file to c/two/a: the copy is failed"):
        places.copy_files(source, target, ["a"])
    statuses["c/two/a"] = ["pending"]
    monkeypatch.setattr(stores, "_COPY_S", -1.0)
    with pytest.raises(StorageError, match="has not copied a file to c/two/a"):
        places.move_files(source, target, ["a"])

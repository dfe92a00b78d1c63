"""Files of a warehouse, in a file system or in an object store: one function for each operation that differs. No pyspark.

A place is a `Path`, or in a store a `UPath`, which has the same methods (universal_pathlib, over fsspec). `name` returns Spark's
name of a place. `place` makes the place from that name again, also in an executor.

Two rules hold in both:

- Commits are atomic and never overwrite. In a file system `put_if_absent` makes a hard link, which fails if the name is taken. In a
  store an object appears only when it is complete, and a PUT has the condition that no such object exists (`check_store`).
- A file is durable before another file names it. In a file system this takes fsync. In a store each object is durable at once.

A store has no directories, no rename and no locks. Locks and Spark's checkpoint are therefore in the staging directory
(`Warehouse.local_root`).
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar, cast

from cdcpipe.errors import CdcpipeError, InitError, InvalidArgumentsError
from spark_sink.files import local, stores
from spark_sink.files.stores import StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Sequence

    import pyarrow.parquet as pq

__all__ = [
    "Listed",
    "StorageError",
    "check_store",
    "copy_files",
    "is_local",
    "list_files",
    "list_names",
    "make_directory",
    "map_reads",
    "move_files",
    "name",
    "parquet_reader",
    "parquet_writer",
    "place",
    "put_if_absent",
    "read_bytes",
    "read_file",
    "read_json",
    "read_known",
    "read_lines",
    "remove_files",
    "remove_other_files",
    "remove_tree",
    "sync_directory",
    "sync_file",
    "write_file",
    "write_json",
]

_logger = logging.getLogger(__name__)

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_MOST_CALLS: Final = 8
"""The most calls that `map_reads` runs at a time. More would need more memory: a call may read a column of a whole file."""
_WHOLE_BYTES: Final = 1 << 20
"""The largest Parquet file that is read whole from a store. To transfer this takes less time than two more requests."""
_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
_EXTRAS: Final = {"s3": "s3", "s3a": "s3", "abfs": "azure", "abfss": "azure", "gs": "gcs"}
"""By scheme of the URL: the name of the optional dependencies (extra) for such a store."""

_PATTERN: Final = frozenset("[]*?{}")
"""Characters of patterns: fsspec and Hadoop would take the name for those of other objects, too."""

_AZURE: Final = re.compile(r"abfss?://[^@/]+@[^@./]+\.dfs\.core\.windows\.net(/|$)")

_WRITTEN: Final = ("LastModified", "last_modified", "mtime")
"""What the listings of s3fs, adlfs and gcsfs call the time at which an object was last written."""

_CREDENTIALS: Final = {
    "s3": "bucket is there, and that the environment has credentials, region and endpoint (AWS_ACCESS_KEY_ID, "
    "AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT_URL)",
    "azure": "container is there, and that the environment has credentials (AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN; "
    "with AZURE_STORAGE_ANON=false a managed identity's)",
    "gcs": "bucket is there, and that the environment has credentials (GOOGLE_APPLICATION_CREDENTIALS, the path of a key file)",
}

_BUSY: Final = "start again later; if it happens often, use the store less: longer --seal-interval and --replica-interval"


# --- places ---


def place(given: Path | str, what: str = "this") -> Path:
    """Return the place that a path or a URL names; a path becomes absolute. Error messages call it ``what``.

    Raises InvalidArgumentsError if the URL does not belong to a known kind of object store, or has two readings, InitError if the
    packages for this kind are not installed.
    """
    match = _URL.match(given) if isinstance(given, str) else None
    if match is None:
        if isinstance(given, str) or is_local(given):
            return local.nameable_directory(given, what)
        return given
    text = str(given)
    extra = _EXTRAS.get(match[1])
    if extra is None:
        schemes = ", ".join(f"{scheme}://" for scheme in _EXTRAS)
        raise InvalidArgumentsError(
            f"{text}: {what} can't be there",
            hint=f"give a path of a local or mounted file system, or a URL that begins with {schemes}",
        )
    if extra == "azure" and not _AZURE.match(text):
        raise InvalidArgumentsError(f"{text}: write {match[1]}://CONTAINER@ACCOUNT.dfs.core.windows.net/PATH")
    _check_readings(text, text[match.end() :], what)
    try:
        from upath import UPath

        # Other processes write there, too, so a cached listing would be out of date.
        made = UPath(text, use_listings_cache=False, **(stores.google_deadlines() if extra == "gcs" else {}))
        made.fs  # noqa: B018 - imports the package for this kind of store
    except ImportError as ex:
        raise InitError(f"{text}: {ex}", hint=f"pip install 'cdcpipe[{extra}]'") from ex
    except ValueError as ex:
        raise InvalidArgumentsError(f"{text}: {ex}") from ex
    return cast("Path", made)


def _check_readings(url: str, path: str, what: str) -> None:
    """Raise InvalidArgumentsError for a URL that is one place for fsspec and another one for Spark's connectors.

    In a store ``//``, ``.`` and ``..`` are parts of a name, and fsspec takes them so. Hadoop removes them from the path.
    """
    if {"", ".", ".."} & set(path.rstrip("/").split("/")):
        raise InvalidArgumentsError(
            f"{url}: {what} can't have a part of its path that is empty, . or ..",
            hint="write the path without them; is each variable set from which it comes?",
        )
    if _PATTERN & set(path):
        raise InvalidArgumentsError(
            f"{url}: {what} can't have the characters {' '.join(sorted(_PATTERN & set(path)))} in its path",
            hint="choose a path without them: for the clients of stores they are patterns",
        )


def is_local(path: Path) -> bool:
    """Tell whether a place is in a file system."""
    return isinstance(path, Path)


def name(path: Path) -> str:
    """Return Spark's name of a place."""
    account = None if is_local(path) else _store(path).storage_options.get("account_name")
    if account is None:
        return str(path)
    container, _, rest = _store(path).path.partition("/")
    return f"{_store(path).protocol}://{container}@{account}.dfs.core.windows.net/{rest}"


def _store(path: Path) -> Any:
    """Return a place in a store, typed as Any: the type Path lacks UPath's attributes."""
    return path


def check_store(root: Path) -> None:
    """Raise StorageError if the store ignores the condition of a PUT and overwrites an existing object."""
    if is_local(root):
        return
    path = root / "_cdcpipe/store_check"
    for _ in range(2):
        try:
            put_if_absent(path, secrets.token_hex(8).encode())
        except FileExistsError:
            return
        except Exception as ex:
            raise _unreachable(path, ex) from ex
    raise StorageError(
        f"the store of {name(root)} has no conditional writes: it replaced an object that it was asked to leave alone",
        hint="Delta Lake's commits need them; S3, MinIO, Azure and Google Cloud Storage have them",
    )


# --- directories ---


def make_directory(path: Path) -> None:
    """Create a directory and its parents, if they do not exist."""
    if is_local(path):
        path.mkdir(parents=True, exist_ok=True)


def list_names(path: Path) -> list[str]:
    """Return the names in a directory; none if there is no directory."""
    try:
        if is_local(path):
            return os.listdir(path)  # noqa: PTH208 - a log may have 100,000 names, and iterdir makes a Path of each
        return [entry.rstrip("/").rpartition("/")[2] for entry in _store(path).fs.ls(_store(path).path, detail=False)]
    except (FileNotFoundError, NotADirectoryError):
        return []


class Listed(NamedTuple):
    """A file: its name in a directory, its bytes, and when it was last written, in seconds since 1970."""

    name: str
    size: int
    written_s: float


_CHANGE_DATA: Final = "_change_data"
"""The directory of a Delta table with what its commits have changed, for a table with ``delta.enableChangeDataFeed``."""


def list_files(path: Path, but: Container[str] = ()) -> Iterator[Listed]:
    """Yield the files in a directory, and in those below it, except those with the names ``but``. No directory has no files.

    Leaves out names that begin with ``_`` or ``.``, as Delta Lake does, but not the files of a change data feed. The name of a file
    below has slashes.
    """
    directories = [""]
    while directories:
        directory = directories.pop()
        for found, is_directory, entry in _entries(path / directory if directory else path):
            if found.startswith(("_", ".")) and (directory, found, is_directory) != ("", _CHANGE_DATA, True):
                continue
            below = f"{directory}{found}"
            if is_directory:
                directories.append(f"{below}/")
            elif below not in but:
                yield Listed(below, *_size_and_time(entry))


def _entries(path: Path) -> Iterator[tuple[str, bool, Any]]:
    try:
        if is_local(path):
            with os.scandir(path) as found:
                yield from ((entry.name, entry.is_dir(), entry) for entry in found)
            return
        for entry in _store(path).fs.ls(_store(path).path, detail=True):
            yield entry["name"].rstrip("/").rpartition("/")[2], entry["type"] == "directory", entry
    except (FileNotFoundError, NotADirectoryError):
        return


def _size_and_time(entry: Any) -> tuple[int, float]:
    if isinstance(entry, os.DirEntry):
        found = entry.stat()
        return found.st_size, found.st_mtime
    return int(entry["size"]), next(entry[name] for name in _WRITTEN if name in entry).timestamp()


def remove_tree(path: Path) -> None:
    """Remove a directory and its contents, if it exists. Files that can't be removed stay."""
    if is_local(path):
        shutil.rmtree(path, ignore_errors=True)
        return
    try:
        _store(path).fs.rm(_store(path).path, recursive=True)
    except OSError:
        return


def remove_files(path: Path, names: Sequence[str]) -> None:
    """Remove files of a directory; in a file system in the given order. Files that do not exist are skipped."""
    if is_local(path):
        for each in names:
            (path / each).unlink(missing_ok=True)
    elif names:
        with suppress(FileNotFoundError):  # gcsfs and adlfs raise it if there is none of them
            _store(path).fs.rm([str(_store(path / each).path) for each in names])


def remove_other_files(path: Path, names: Iterable[str]) -> None:
    """Remove what is in a directory, all of it files, but these."""
    kept = set(names)
    remove_files(path, [name for name in list_names(path) if name not in kept])


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    if is_local(path):
        local.fsync_directory(path)


# --- files ---


def sync_file(path: Path) -> None:
    """Make the contents of a file durable."""
    if is_local(path):
        with local.named(path), path.open("rb") as written:
            os.fsync(written.fileno())


def write_file(path: Path, data: bytes) -> None:
    """Write a new file with durable contents. Its name is durable after `sync_directory`. After an error there is no file."""
    if not is_local(path):
        path.write_bytes(data)
        return
    with local.named(path), path.open("xb") as stream:
        try:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        except BaseException:
            path.unlink()
            raise


def put_if_absent(path: Path, data: bytes) -> None:
    """Create a file atomically; contents and name are durable then. Raises FileExistsError if the file exists."""
    if not is_local(path):
        try:
            stores.create_object(_store(path).fs, _store(path).path, data)
        except FileExistsError:
            # The answer to a first request may have been lost: then the object is ours, and the second request fails.
            if read_bytes(path) != data:
                raise
        return
    temporary = path.with_name(f".cdcpipe-{secrets.token_hex(8)}.tmp")
    try:
        write_file(temporary, data)
        try:
            # Unlike a rename, a link fails if the name is taken.
            os.link(temporary, path)
        except OSError:
            # On NFS, too, the answer to a first request may have been lost.
            if not (path.exists() and path.samefile(temporary)):
                raise
    finally:
        temporary.unlink(missing_ok=True)
    local.fsync_directory(path.parent)


def read_bytes(path: Path) -> bytes:
    """Return the contents of a small file."""
    if is_local(path):
        with local.named(path):
            return path.read_bytes()
    # One request. For several at a time, s3fs (since 2026.3) would first ask for the size.
    contents: bytes = _store(path).fs.cat_file(_store(path).path, max_concurrency=1)
    return contents


def read_lines(path: Path) -> list[bytes]:
    """Return the lines of a file that has one JSON text per line.

    Only a line feed ends a line. `str.splitlines` would also cut at U+2028, U+2029 and U+0085, which JSON allows inside strings.
    """
    return [line for line in read_bytes(path).split(b"\n") if line]


def map_reads(function: Callable[[_Item], _Result], items: Sequence[_Item], path: Path) -> list[_Result]:
    """Return ``function`` of each item, in their order. ``path`` is the place that the function reads.

    For a store some calls run at a time, in threads, because each of them waits for the store. So all results must fit into
    memory. Raises the error of the first call that fails.

        lines = map_reads(read_lines, [root / "a", root / "b"], root)
    """
    if len(items) < 2 or is_local(path):
        return [function(item) for item in items]
    with ThreadPoolExecutor(min(len(items), _MOST_CALLS)) as pool:
        return list(pool.map(function, items))


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a small JSON file as `local.read_json` does. Raises StorageError if the store can't be reached."""
    data = read_file(path)
    return None if data is None else local.parse_json(path, data)


def read_known(path: Path) -> dict[str, Any]:
    """Read a small JSON file with what is only remembered, to save work: a file that is damaged, or not there, has nothing."""
    try:
        return read_json(path) or {}
    except local.DamagedFileError as ex:
        _logger.warning("%s; it counts as lost", ex)
        return {}


def read_file(path: Path) -> bytes | None:
    """Return the contents of a small file as `local.read_file` does. Raises StorageError if the store can't be reached."""
    if is_local(path):
        return local.read_file(path)
    try:
        return read_bytes(path)
    except FileNotFoundError:
        return None
    except CdcpipeError:
        raise
    except Exception as ex:
        raise _unreachable(path, ex) from ex


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a small JSON file atomically; it is durable when this returns. Raises StorageError if the store can't be reached.

    Whoever may read the tables may read it: in a file system the umask decides for both.
    """
    if is_local(path):
        local.write_json(path, value, 0o666)
        return
    try:
        path.write_bytes(json.dumps(value, indent=1).encode() + b"\n")
    except Exception as ex:
        raise _unreachable(path, ex) from ex


def _unreachable(path: Path, ex: Exception) -> StorageError:
    said = str(ex).strip().partition("\n")[0] or type(ex).__name__
    if stores.is_busy(ex):
        return StorageError(f"the store refuses requests to {name(path)} for the moment: {said}", hint=_BUSY)
    return StorageError(
        f"{name(path)} can't be reached: {said}",
        hint=f"see that the {_CREDENTIALS[_EXTRAS[_store(path).protocol]]}",
    )


def copy_files(source: Path, target: Path, names: Iterable[str]) -> None:
    """Copy files to another directory; in a file system by hard links, so that nothing may write to them afterwards.

    The copies are complete when this returns. Raises StorageError if a store does not complete one.
    """
    if not is_local(source):
        files = [(str(_store(source / each).path), str(_store(target / each).path)) for each in names]
        if files:
            _store(source).fs.copy(*map(list, zip(*files, strict=True)))
            if _EXTRAS.get(_store(target).protocol) == "azure":
                stores.wait_for_azure(_store(target).fs, [copied for _, copied in files])
        return
    for each in names:
        os.link(source / each, target / each)


def move_files(source: Path, target: Path, names: Iterable[str]) -> None:
    """Move files to another directory and give them the present time, so that VACUUM does not remove them as old.

    In a store the files are copied only. The caller removes the originals.
    """
    if not is_local(source):
        copy_files(source, target, names)
        return
    for each in names:
        os.utime(source / each)  # not `touch`: a new empty file would replace one that was moved before
        (source / each).rename(target / each)


def parquet_reader(path: Path, size: int | None = None, **options: Any) -> pq.ParquetFile:
    """Open a Parquet file. ``size`` is its size in bytes, if the caller knows it: a store then gets fewer requests.

    From a store, a small file is read whole, with one request.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if is_local(path):
        return pq.ParquetFile(path, **options)
    if size is not None and size <= _WHOLE_BYTES:
        return pq.ParquetFile(pa.BufferReader(read_bytes(path)), **options)
    known = {} if size is None else {"size": size}
    # pre_buffer fetches all wanted ranges of the object at once; a cache would fetch more than these.
    return pq.ParquetFile(_store(path).open("rb", cache_type="none", **known), pre_buffer=True, **options)


def parquet_writer(path: Path, schema: Any, **options: Any) -> pq.ParquetWriter:
    """Begin a Parquet file."""
    import pyarrow.parquet as pq

    if is_local(path):
        return pq.ParquetWriter(path, schema, **options)
    return pq.ParquetWriter(_store(path).path, schema, filesystem=_store(path).fs, **options)

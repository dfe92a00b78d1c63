"""Gives Spark's JVM a home without pyspark.zip, so that Python workers start with half of the CPU time (`without_zip`).

The JVM puts ``python/lib/pyspark.zip`` of its home (SPARK_HOME) first in the PYTHONPATH of its Python workers. Python keeps no
bytecode for a zip, so each worker process would compile pyspark anew. The installed pyspark has its bytecode beside it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pwd
import shutil
import sys
import sysconfig
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cdcpipe.errors import InitError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["GATEWAY", "HOME_HINT", "check_named", "is_local_master", "user_home", "without_zip"]

_logger = logging.getLogger(__name__)

HOME_HINT: Final = "unset SPARK_HOME, or set it to the directory of a Spark 4.2"

GATEWAY: Final = "PYSPARK_GATEWAY_PORT"
"""The environment variable in which spark-submit passes the port of its JVM to the program that it runs."""

_HOME = "SPARK_HOME"
_OURS: Final = "-4.2."
"""In the names of the jars of the Spark that cdcpipe needs."""
_WITH_THE_ZIP = "python"
"""The directory of an installed pyspark that has nothing but the zip files."""


def user_home() -> Path:
    """Return the user's home: ``$HOME``, or the system's entry for the user if ``$HOME`` is no directory."""
    named = Path(os.environ.get("HOME", ""))
    if named.is_absolute():
        return named
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        return Path("/")  # a container's user without an entry in the system


def check_named() -> None:
    """Raise InitError if SPARK_HOME names a directory without Spark 4.2. Under spark-submit, Spark runs already."""
    named = os.environ.get(_HOME)
    if named is None or GATEWAY in os.environ:
        return
    cores = [jar.name for jar in Path(named, "jars").glob("spark-core_*.jar")]  # none if somebody has built this Spark
    is_other = bool(cores) and not any(_OURS in name for name in cores)
    if is_other or not Path(named, "bin/spark-submit").exists():
        found = f"another Spark ({cores[0]})" if is_other else "no Spark"
        raise InitError(f"SPARK_HOME is {named}, which has {found}", hint=HOME_HINT)


def is_local_master(master: str) -> bool:
    """Tell whether Spark's tasks run in the driver's JVM."""
    return master == "local" or master.startswith("local[")


@contextmanager
def without_zip(master: str) -> Iterator[None]:
    """Set SPARK_HOME for a JVM that starts inside: a directory of links to everything in the installed pyspark but the zip.

    The directory is in the user's cache, and stays there for the next start. Does nothing if the workers need the zip: on a
    cluster, with another Python interpreter, or if pyspark is not installed for every process of this interpreter; nor if the
    user has set SPARK_HOME; nor if the cache cannot be written.
    """
    installed = _installed()
    if (
        not is_local_master(master)
        or _HOME in os.environ
        or os.environ.get("PYSPARK_PYTHON") != sys.executable
        or not _is_found(installed)
    ):
        yield
        return
    try:
        home = _linked(installed, _cache())
    except OSError as ex:
        _logger.info("Python workers start more slowly, because Spark's home can't be linked in the cache: %s", ex)
        yield
        return
    os.environ[_HOME] = str(home)
    try:
        yield
    finally:
        del os.environ[_HOME]


def _installed() -> Path:
    import pyspark

    return Path(pyspark.__file__).resolve().parent


def _is_found(installed: Path) -> bool:
    """Tell whether a new process of this interpreter imports this pyspark, and whether it has Spark's jars, too."""
    found = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    return any(Path(path).resolve() == installed.parent for path in found if path) and (installed / "jars").is_dir()


def _cache() -> Path:
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (named if named.is_absolute() else user_home() / ".cache") / "cdcpipe"


def _linked(installed: Path, cache: Path) -> Path:
    """Return the directory with the links, and make it if it is not there. Its name depends on what it links to."""
    entries = sorted(path for path in installed.iterdir() if path.name != _WITH_THE_ZIP)
    digest = hashlib.sha256("\0".join(map(str, entries)).encode()).hexdigest()
    home = cache / f"spark-{digest[:16]}"
    if home.is_dir():
        return home
    cache.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=cache, prefix="spark-", suffix=".tmp"))
    try:
        for entry in entries:
            (made / entry.name).symlink_to(entry)
        made.rename(home)
    except OSError:
        shutil.rmtree(made)
        if not home.is_dir():  # another process has made it meanwhile
            raise
    return home

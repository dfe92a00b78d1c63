"""The environment variables of Spark's JVM and of its Python workers."""

from __future__ import annotations

import locale
import os
import sys
import sysconfig
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from spark_sink.spark.home import GATEWAY

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["import_nothing_from_here", "naming_all_paths", "prepare_workers", "python_path", "stay_on_this_machine"]

_ADDRESSES: Final = ("SPARK_LOCAL_HOSTNAME", "SPARK_LOCAL_IP")


def import_nothing_from_here() -> None:
    """Let no Python process that this one starts import from the current directory. A command calls this at its start.

    Spark starts the workers of a local master with ``python -m``, which looks there before everything else. The directory may have
    a ``queue.py`` of other programs or of another user, or another version of these packages. Workers on other machines do not get
    the variable. Nor does a program call this that imports `spark_sink`: its workers may need the modules that it has there.
    """
    os.environ["PYTHONSAFEPATH"] = "1"


def stay_on_this_machine(settings: Mapping[str, str]) -> None:
    """Let Spark listen at 127.0.0.1 alone, and run its workers with this interpreter, unless this start names others.

    By default Spark looks up this machine's name, and ends if it does not resolve. It would listen at the address that it finds,
    which other machines reach, and which may go away while it runs (VPN, Wi-Fi). Its user interface knows SPARK_LOCAL_IP alone:
    without it, it listens at all addresses. A PYSPARK_PYTHON of the user's profile is for other programs: that interpreter may not
    have our packages.
    """
    if GATEWAY in os.environ:
        return
    if not ({"spark.driver.host", "spark.driver.bindAddress"} & settings.keys() or set(_ADDRESSES) & os.environ.keys()):
        os.environ.update(dict.fromkeys(_ADDRESSES, "127.0.0.1"))
    os.environ["PYSPARK_PYTHON"] = sys.executable


def prepare_workers(settings: Mapping[str, str]) -> None:
    """Choose the interpreter of the Python workers, here and in executors, and let them find these packages.

    The interpreter is this one, unless the user names one for the executors' machines. By default Spark would use the first
    ``python3`` on the PATH, which may be another interpreter without pyarrow.
    """
    if "spark.pyspark.python" in settings:
        os.environ["PYSPARK_PYTHON"] = settings["spark.pyspark.python"]
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    if path := python_path():
        os.environ["PYTHONPATH"] = path


def python_path() -> str:
    """Return PYTHONPATH with the directory of these packages added, unless they are installed for every Python process."""
    root = str(Path(__file__).resolve().parents[2])
    entries = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if root not in entries and root not in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        entries.insert(0, root)
    return os.pathsep.join(entries)


@contextmanager
def naming_all_paths() -> Iterator[None]:
    """Give a JVM that starts inside a locale with which it can name every path that this process can name.

    Python takes names of files as UTF-8 whatever the locale is, Java as the locale says. With ``LC_ALL=C``, or a locale that is not
    installed on this machine, a JVM cannot open a path that is not ASCII; some of its calls write to another one instead, with
    ``?`` in its name.
    """
    if sys.getfilesystemencoding() != "utf-8" or locale.getencoding().upper() == "UTF-8":
        yield
        return
    before = os.environ.get("LC_ALL")
    os.environ["LC_ALL"] = "C.UTF-8"
    try:
        yield
    finally:
        if before is None:
            del os.environ["LC_ALL"]
        else:
            os.environ["LC_ALL"] = before

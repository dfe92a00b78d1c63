"""The home of Spark's JVM without pyspark.zip: when it is made, of what, and when it is left out."""

import os
import sys
import sysconfig
from pathlib import Path

import pytest

from spark_sink.spark import home
from spark_sink.spark.home import without_zip


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory that looks like an installed pyspark, found through PYTHONPATH."""
    made = tmp_path / "site" / "pyspark"
    for name in ("bin", "jars", "python/lib"):
        (made / name).mkdir(parents=True)
    (made / "python/lib/pyspark.zip").touch()
    (made / "daemon.py").touch()
    monkeypatch.setattr(home, "_installed", lambda: made)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{made.parent}")
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("SPARK_HOME", raising=False)
    return made


def given(master: str = "local[2]") -> Path | None:
    """Return the home that a JVM would get."""
    with without_zip(master):
        found = os.environ.get("SPARK_HOME")
    return None if found is None else Path(found)


def test_it_has_all_but_the_zip(installed: Path, tmp_path: Path) -> None:
    found = given()
    assert found is not None
    assert found.parent == tmp_path / ".cache/cdcpipe"
    assert {path.name: path.resolve() for path in found.iterdir()} == {
        name: installed / name for name in ("bin", "jars", "daemon.py")
    }
    assert "SPARK_HOME" not in os.environ


def test_the_next_start_finds_it(installed: Path, tmp_path: Path) -> None:
    first = given()
    assert given("local") == first
    (installed / "conf").mkdir()
    second = given()
    assert second is not None
    assert (second / "conf").is_dir()
    assert set((tmp_path / ".cache/cdcpipe").iterdir()) == {first, second}
    assert first != second


def test_the_cache_is_where_the_user_has_it(installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    found = given()
    assert found is not None
    assert found.parent == tmp_path / "elsewhere/cdcpipe"


@pytest.mark.parametrize("master", ["local-cluster[1,1,1024]", "spark://host:7077", "yarn", "k8s://https://host"])
def test_clusters_keep_the_zip(installed: Path, tmp_path: Path, master: str) -> None:
    assert given(master) is None


def test_another_interpreter_keeps_the_zip(installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", "/usr/bin/python3")
    assert given() is None


def test_pyspark_that_only_this_process_finds_keeps_the_zip(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "")
    assert given() is None
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(installed.parent))
    assert given() is not None


def test_a_home_that_the_user_names_stays(installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_HOME", "/opt/spark")
    assert given() == Path("/opt/spark")
    assert os.environ["SPARK_HOME"] == "/opt/spark"


def test_a_cache_that_cannot_be_written(installed: Path, tmp_path: Path) -> None:
    (tmp_path / ".cache").touch()
    assert given() is None


def test_two_processes_make_it_at_once(installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = given()
    assert other is not None
    is_dir, hidden = Path.is_dir, {other}

    def is_dir_later(path: Path) -> bool:
        if path in hidden:
            hidden.remove(path)
            return False
        return is_dir(path)

    monkeypatch.setattr(Path, "is_dir", is_dir_later)
    assert given() == other
    assert list(other.parent.iterdir()) == [other]

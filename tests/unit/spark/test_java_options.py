"""The options of Spark's JVM."""

import tempfile
from pathlib import Path

import pytest

from spark_sink.spark.session import _java_options


def test_java_keeps_temporary_files_where_tmpdir_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Java does not look at it. So a full /tmp, or one without programs (noexec), would end Spark whatever TMPDIR says."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.delenv("TMPDIR", raising=False)
    assert "java.io.tmpdir" not in _java_options()
    directory = tmp_path / 'a "b" c'
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", str(directory))
    assert _java_options().endswith(rf' "-Djava.io.tmpdir={tmp_path}/a \"b\" c"')

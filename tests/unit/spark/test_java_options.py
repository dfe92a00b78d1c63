"""The options of Spark's JVM."""

from pathlib import Path

import pytest

from spark_sink.spark import java_options


def test_java_keeps_temporary_files_in_the_directory_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Java does not look at TMPDIR. So a full /tmp, or one without programs (noexec), would end Spark whatever TMPDIR says."""
    monkeypatch.setattr(java_options, "directory_of_process", lambda: Path('/a "b" c/d'))
    assert java_options.java_options().endswith(r' "-Djava.io.tmpdir=/a \"b\" c/d"')

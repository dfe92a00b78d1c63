"""Paths as patterns of Spark's readers of files."""

import pytest

from spark_sink.spark.sql import only, path_of


@pytest.mark.parametrize("path", ["/w/t", "/w [1]/a%20b", "/w{a,b}/*?", "/w\\x", "s3a://bucket/w[1]"])
def test_a_path_is_the_only_one_that_its_pattern_matches(path: str) -> None:
    pattern = only(path)
    assert path_of(pattern) == path
    for special in "[]{}*?":
        assert pattern.count(special) == pattern.count(f"\\{special}") == path.count(special)

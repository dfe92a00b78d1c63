"""A session that another thread has made is found: Spark tells of the active one only, and that is a thread's."""

from types import SimpleNamespace

import pytest

from spark_sink.spark import given, session
from spark_sink.spark.existing import existing

CONTEXT = object()
MADE = SimpleNamespace(version="4.2.1", conf={}, sparkContext=CONTEXT)
"""A session of the notebook, as far as it is asked here."""


def test_a_session_of_another_thread_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyspark.SparkContext._active_spark_context", CONTEXT)
    monkeypatch.setattr("pyspark.sql.SparkSession.getActiveSession", lambda: None)
    monkeypatch.setattr("pyspark.sql.SparkSession._instantiatedSession", MADE)
    monkeypatch.setattr("pyspark.sql.SparkSession.builder", None)  # it would give the session our settings
    assert existing() is MADE
    assert session.build(format="parquet") is MADE
    assert given.take(None, "parquet", {}) is MADE


def test_a_session_that_was_stopped_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyspark.SparkContext._active_spark_context", None)
    monkeypatch.setattr("pyspark.sql.SparkSession._instantiatedSession", MADE)
    assert existing() is None

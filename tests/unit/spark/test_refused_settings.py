"""Settings with which Spark would skip data, or write other texts or another calendar, are refused wherever they come from."""

import pytest

from cdcpipe.errors import InitError
from spark_sink.spark import given, refused_settings, session
from support.given_sessions import given_session

WRONG = {
    "spark.sql.files.ignoreCorruptFiles": "TRUE",
    "spark.sql.files.ignoreMissingFiles": "true",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "legacy",
    "spark.sql.parquet.int96RebaseModeInWrite": "LEGACY",
    "spark.sql.parser.escapedStringLiterals": "true",
}
RIGHT = {
    "spark.sql.files.ignoreCorruptFiles": "false",
    "spark.sql.files.ignoreMissingFiles": "false",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "EXCEPTION",
    "spark.sql.parquet.int96RebaseModeInWrite": "CORRECTED",
    "spark.sql.parser.escapedStringLiterals": "false",
}


@pytest.mark.parametrize("key", WRONG)
def test_a_session_with_such_a_setting_is_refused(key: str) -> None:
    made = given_session((RIGHT | {key: WRONG[key]}).__getitem__)
    with pytest.raises(InitError, match=f"Spark has the setting {key}={WRONG[key]}: ") as caught:
        session.check(made, "parquet")
    assert "--conf" in str(caught.value.hint)
    made.conf.get = RIGHT.__getitem__
    session.check(made, "parquet")


@pytest.mark.parametrize("key", WRONG)
def test_it_is_refused_before_a_session_is_made(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyspark.SparkContext._active_spark_context", None)  # other tests of this process may have one
    monkeypatch.setattr("pyspark.sql.SparkSession.builder", None)
    with pytest.raises(InitError, match=f"the setting {key}="):
        session.build(format="parquet", conf={key: WRONG[key]})
    with pytest.raises(InitError, match=f"the setting {key}="):
        given.take(None, "parquet", {key: WRONG[key]})
    refused_settings.refuse({}.get)


def test_a_run_refuses_a_given_session_before_there_is_a_slot() -> None:
    made = given_session(WRONG.__getitem__)
    with pytest.raises(InitError, match="ignoreCorruptFiles"):
        given.take(made, "parquet", {})

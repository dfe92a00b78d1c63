"""Settings with a secret are not in the command line of Spark's JVM, which every user of the machine can see."""

import re
from pathlib import Path

import pytest

from spark_sink.spark import jvm, secret_settings
from spark_sink.spark.home import GATEWAY

S3_KEY = {"spark.hadoop.fs.s3a.secret.key": "CANARY"}


def test_the_jvm_starts_without_secrets_in_its_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, said = tmp_path / "bin/spark-submit", tmp_path / "said"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >{said}\nexit 1\n')
    program.chmod(0o755)
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    monkeypatch.delenv(GATEWAY, raising=False)
    monkeypatch.setattr("pyspark.SparkContext._gateway", None)
    monkeypatch.setattr(jvm, "_output", None)
    with pytest.raises(Exception, match="JAVA_GATEWAY_EXITED"):
        jvm.start({"spark.master": "local", "spark.sql.shuffle.partitions": "3"} | S3_KEY, None)
    arguments = said.read_text().splitlines()
    assert "spark.sql.shuffle.partitions=3" in arguments
    assert not [each for each in arguments if "CANARY" in each or "secret" in each]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("spark.authenticate.secret", "CANARY"),
        ("spark.executorEnv.AWS_SESSION_TOKEN", "CANARY"),
        ("spark.hadoop.javax.jdo.option.ConnectionURL", "jdbc:postgresql://h/db?user=r&password=CANARY"),
        ("spark.sql.catalog.shop.uri", "https://r:CANARY@h/"),
    ],
)
def test_a_secret_waits_for_the_session(key: str, value: str) -> None:
    assert secret_settings.for_command_line({"spark.master": "local", key: value}) == {"spark.master": "local"}


@pytest.mark.parametrize(
    "settings",
    [
        {"spark.jars": "/a.jar,s3a://lake/b.jar"} | S3_KEY,
        {"spark.driver.extraJavaOptions": "-Djavax.net.ssl.trustStorePassword=x"},
        {"spark.jars.repositories": "https://r:x@h/"},
        {"spark.kerberos.keytab": "/etc/spark.keytab"},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_what_the_jvm_needs_at_its_start_is_in_its_command_line(settings: dict[str, str]) -> None:
    assert secret_settings.for_command_line(settings) == settings


@pytest.mark.parametrize("jars", ["/a.jar", "file:///a.jar,local:///b.jar"])
def test_jars_on_this_machine_need_no_key(jars: str) -> None:
    assert secret_settings.for_command_line({"spark.jars": jars} | S3_KEY) == {"spark.jars": jars}


@pytest.mark.parametrize(
    "text",
    [
        "spark.hadoop.fs.azure.account.key.lake.dfs.core.windows.net",
        "fs.azure.account.key.lake.dfs.core.windows.net",
        "spark.hadoop.fs.gs.auth.service.account.private.key",
        "spark.hadoop.fs.s3a.bucket.my-lake.encryption.key",
        "fs.s3a.secret.key",
        "spark.ssl.keyPassword",
        "spark.executorEnv.PGPASSFILE",
        "jdbc:postgresql://h/db?user=r&password=CANARY",
        "spark.metrics.conf.*.sink.x.apiKey",
        "https://r:CANARY@h/",
        "https://r:CAN/CANARY@h/",
        "https://r:CAN@CANARY@h/",
        "https://a/,https://ci:CANARY@nexus/r",
        "-Dx=https://r:CANARY@h",
        "mongodb+srv://r:CANARY@h/db",
        "jdbc:mysql://r:CANARY@h/db",
        "s3a://id:CANARY@bucket/w",
    ],
)
def test_spark_hides_what_is_secret(text: str) -> None:
    """In its user interface, which asks for no password, and in event logs. It looks for the pattern in names and in values."""
    assert re.search(secret_settings.HIDDEN_BY_SPARK, text)


@pytest.mark.parametrize(
    "text",
    [
        "spark.sql.shuffle.partitions",
        "spark.kerberos.keytab",
        "/lake/public.keys/changelog",
        "s3a://lake/passengers",
        "abfss://tables@lake.dfs.core.windows.net/keys",
        "https://h:9000/a",
        "key",
    ],
)
def test_spark_shows_what_is_no_secret(text: str) -> None:
    """Among others the properties by which a view of the catalog is recognised: they have the path of a table."""
    assert not re.search(secret_settings.HIDDEN_BY_SPARK, text)

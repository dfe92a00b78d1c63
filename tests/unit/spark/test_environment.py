"""The environment variables of Spark's processes with a local master."""

import locale
import os
import sys

import pytest

from spark_sink.spark.environment import naming_all_paths, stay_on_this_machine
from spark_sink.spark.home import GATEWAY
from spark_sink.spark.settings import general_settings

ADDRESSES = ("SPARK_LOCAL_HOSTNAME", "SPARK_LOCAL_IP")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*ADDRESSES, GATEWAY):
        monkeypatch.setenv(name, "")  # so that the end of the test restores it
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYSPARK_PYTHON", "/opt/python")


def test_spark_listens_at_the_loopback_address_and_has_this_interpreter() -> None:
    """Also its user interface, which does not look at SPARK_LOCAL_HOSTNAME."""
    stay_on_this_machine({})
    assert [os.environ[name] for name in ADDRESSES] == ["127.0.0.1"] * 2
    assert os.environ["PYSPARK_PYTHON"] == sys.executable


@pytest.mark.parametrize("setting", ["spark.driver.host", "spark.driver.bindAddress"])
def test_an_address_in_the_settings_counts(setting: str) -> None:
    stay_on_this_machine({setting: "10.0.0.1"})
    assert not set(ADDRESSES) & os.environ.keys()


@pytest.mark.parametrize("name", ADDRESSES)
def test_an_address_in_the_environment_counts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "10.0.0.1")
    stay_on_this_machine({})
    assert [os.environ[each] for each in ADDRESSES if each in os.environ] == ["10.0.0.1"]


def test_under_spark_submit_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GATEWAY, "1234")
    stay_on_this_machine({})
    assert not set(ADDRESSES) & os.environ.keys()
    assert os.environ["PYSPARK_PYTHON"] == "/opt/python"


def test_the_user_interface_kills_no_jobs() -> None:
    assert general_settings(ui=True)["spark.ui.killEnabled"] == "false"


@pytest.mark.parametrize(
    ("encoding", "before", "inside"),
    [("ANSI_X3.4-1968", "C", "C.UTF-8"), ("ANSI_X3.4-1968", None, "C.UTF-8"), ("UTF-8", "de_DE.UTF-8", "de_DE.UTF-8")],
)
def test_java_can_name_what_python_can_name(
    monkeypatch: pytest.MonkeyPatch, encoding: str, before: str | None, inside: str
) -> None:
    monkeypatch.setattr(locale, "getencoding", lambda: encoding)
    monkeypatch.setenv("LC_ALL", before or "")
    if before is None:
        monkeypatch.delenv("LC_ALL")
    with naming_all_paths():
        assert os.environ["LC_ALL"] == inside
    assert os.environ.get("LC_ALL") == before

"""The reason why Spark did not start, and the option that is to be corrected."""

import os

import pytest

from spark_sink.files.system_hints import hint_in
from spark_sink.spark import jvm, session
from spark_sink.spark.failed_start import failed_start, not_fetched
from spark_sink.spark.failure import reason_of
from support.spark_errors import Py4JError

ENDED = "[JAVA_GATEWAY_EXITED] Java gateway process exited before sending its port number."
MASTER = """WARNING: Using incubator modules: jdk.incubator.vector
Exception in thread "main" org.apache.spark.SparkException: Master must either be yarn or start with spark, k8s, or local
\tat org.apache.spark.deploy.SparkSubmit.error(SparkSubmit.scala:1068)"""
HEAP = """Invalid maximum heap size: -Xmxabc
Error: Could not create the Java Virtual Machine.
Error: A fatal exception has occurred. Program will exit."""

PICKED_UP = "Picked up JAVA_TOOL_OPTIONS: -Dhttps.proxyHost=proxy\nNOTE: Picked up JDK_JAVA_OPTIONS: -Da=b"


@pytest.mark.parametrize(
    ("raised", "said", "settings", "reason", "hint"),
    [
        (ENDED, MASTER, {"spark.master": "locl"}, "Master must either be yarn or start", "correct --master, which is locl: "),
        ("x\n: a.B: Could not parse Master URL: 'local[x]'\n", "", {"spark.master": "local[x]"}, "Could not", "correct --master, "),
        (ENDED, HEAP, {}, "Invalid maximum heap size: -Xmxabc", "correct --conf spark.driver.memory"),
        ("[INVALID] the config \"spark.a.b\" is no 'int'", "", {"spark.a.b": "x"}, "[INVALID]", "correct --conf spark.a.b"),
        (
            "x\n: java.lang.ClassNotFoundException: no.Such\n",
            "",
            {"spark.serializer": "no.Such"},
            "no.Such",
            "--conf spark.serializer",
        ),
        ("Executor memory 5 is too small", "", {"spark.executor.memory": "5"}, "Executor", "correct --conf spark.executor.memory"),
        (ENDED, f"{PICKED_UP}\n{HEAP}", {}, "Invalid maximum heap size: -Xmxabc", "correct --conf spark.driver.memory"),
        (ENDED, f"{PICKED_UP}\nWARNING: noise", {}, "its JVM has ended, and gave no reason", "did the system kill it"),
        (ENDED, "WARNING: noise", {"spark.a": "secret"}, "its JVM has ended,", "do --master and --conf spark.a fit Spark and"),
        (
            ENDED,
            "WARNING: noise",
            {},
            "its JVM has ended, and gave no reason",
            "did the system kill it, for lack of memory (dmesg)?",
        ),
        ("It broke", "", {}, "It broke", "do --master, --conf and --jars fit Spark and this machine?"),
    ],
)
def test_the_hint_names_the_option(raised: str, said: str, settings: dict[str, str], reason: str, hint: str) -> None:
    given = {key: value for key, value in settings.items() if key != "spark.master"}
    lines = said.splitlines() if raised is ENDED else None
    error, has_reason = failed_start(RuntimeError(raised), {"spark.master": "local[2]"} | settings, given, lines)
    assert error.message.startswith(f"Spark did not start: {reason}")
    assert hint in str(error.hint)
    assert "secret" not in str(error.hint)
    assert has_reason == ("WARNING: noise" not in said or said is MASTER)


@pytest.mark.parametrize("reason", ["Error loading java.security file", "java.io.IOException: Too many open files"])
def test_too_few_open_files_are_named(reason: str) -> None:
    error, _ = failed_start(RuntimeError("JAVA_GATEWAY_EXITED"), {"spark.master": "local[2]"}, {}, [f"Error: {reason}"])
    assert "ulimit -n (now " in (error.hint or "")


def test_a_user_id_without_a_name_is_named() -> None:
    said = ['Exception in thread "main" java.io.IOException: Invalid UID, could not determine effective user']
    error, _ = failed_start(RuntimeError("JAVA_GATEWAY_EXITED"), {"spark.master": "local[2]"}, {"spark.jars.ivy": "x"}, said)
    assert str(error.hint).startswith(f"user id {os.geteuid()} has no name on this machine")


def test_a_python_worker_that_was_killed_is_one_line_with_a_hint() -> None:
    said = (
        "An error occurred while calling o1.awaitTermination.\n"
        ": org.apache.spark.SparkException: Job aborted due to stage failure: "
        "Task 1 in stage 4.0 failed 1 times, most recent failure: Lost task 1.0 in stage 4.0 (TID 4) (192.0.2.2 executor driver): "
        "org.apache.spark.SparkException: Python worker exited unexpectedly (crashed). Consider setting "
        "'spark.python.worker.faulthandler.enabled' configuration to 'true' for the better Python traceback.\n\tat X.y(X.scala:1)\n"
        "Caused by: java.net.SocketException: Connection reset\n"
    )
    reason = reason_of(Py4JError(said))
    assert reason == "Python worker exited unexpectedly"
    assert "dmesg" in str(hint_in(reason))


def test_a_full_disk_and_a_home_of_another_spark_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def hint(reason: str) -> str:
        return str(failed_start(RuntimeError(reason), {"spark.master": "local[2]"}, {}, None)[0].hint)

    assert "make room; then start again; Spark's temporary files are in $TMPDIR" in hint("No space left on device")
    missing = "[Errno 2] No such file or directory: '/opt/spark/./bin/spark-submit'"
    monkeypatch.delenv("SPARK_HOME", raising=False)
    assert "SPARK_HOME" not in hint(missing)
    monkeypatch.setenv("SPARK_HOME", "/opt/spark")
    assert hint(missing) == "unset SPARK_HOME, or set it to the directory of a Spark 4.2"


IVY = """:::: WARNINGS
\t\tmodule not found: io.delta#delta-storage;4.4.0
:::: ERRORS
\tServer access error at url https://repo1.maven.org/maven2/io/delta/a.pom (java.net.ConnectException: Connection refused)

\tServer access error at url https://repo1.maven.org/maven2/io/delta/a.jar (java.net.ConnectException: Connection refused)

Exception in thread "main" java.lang.RuntimeException: [unresolved dependency: io.delta#delta-spark_4.2_2.13;4.4.0: not found, \
download failed: a.b#c;1.0!c.jar]
\tat org.apache.spark.util.MavenUtils$.resolveMavenCoordinates(MavenUtils.scala:539)"""


def test_packages_that_were_not_fetched_are_one_line() -> None:
    reason = "repo1.maven.org: ConnectException: Connection refused"
    assert not_fetched(IVY.splitlines()) == f"io.delta:delta-spark_4.2_2.13:4.4.0 and a.b:c:1.0 ({reason})"
    assert not_fetched([line for line in IVY.splitlines() if "ERRORS" in line or "Exception in" in line]) is not None
    assert not_fetched(MASTER.splitlines()) is None


@pytest.mark.parametrize("variable", ["https_proxy", "HTTPS_PROXY", None])
def test_packages_that_were_not_fetched_behind_a_proxy(variable: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Java does not take the proxy from the environment. Its address may have a password, which the hint does not show."""
    for name in ("https_proxy", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv(variable, "http://me:secret@proxy:3128")
    monkeypatch.setattr(jvm, "has_ended", lambda _seconds: True)
    monkeypatch.setattr(jvm, "at_start", IVY.splitlines)
    hint = session._start_error(RuntimeError("no gateway"), {}, {}).hint or ""
    assert ("JAVA_TOOL_OPTIONS=" in hint, "secret" in hint) == (variable is not None, False)

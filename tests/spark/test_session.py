"""The log of the session, and a command's message when a disk is full."""

import gc
import os
import random
import resource
import socket
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyspark
import pytest

from cdcpipe.pgoutput.messages import Insert
from spark_sink.changelog.tables import changelogs_of
from spark_sink.files.temporary import directory_of_process
from spark_sink.pipeline.failures import PipelineError
from spark_sink.pipeline.pipeline import Pipeline
from spark_sink.schema.table import Table
from spark_sink.spark import given, session
from support.cli_process import spark_cli
from support.paths import ROOT
from support.segments import Log, relation
from support.small_pipeline import make_pipeline

pytestmark = pytest.mark.spark

STACK = "Exception in task 0.0 in stage 1.0\norg.apache.spark.SparkException: it\n\tat org.apache.spark.X.run(X.scala:1)"


def logged(spark: Any, appender: str) -> str:
    """Return what this appender of the session's own configuration writes for a failed task."""
    log4j = spark._jvm.org.apache.logging.log4j
    event = (
        log4j.core.impl.Log4jLogEvent.newBuilder()
        .setLoggerName("org.apache.spark.executor.Executor")
        .setLevel(log4j.Level.ERROR)
        .setMessage(log4j.message.SimpleMessage(STACK))
        .setThrown(spark._jvm.java.io.IOException("No space left on device"))
        .build()
    )
    configuration = log4j.LogManager.getContext(False).getConfiguration()
    return configuration.getAppenders().get(appender).getLayout().toSerializable(event)


def test_an_entry_of_the_log_is_one_line(spark: Any) -> None:
    configuration = spark._jvm.org.apache.logging.log4j.LogManager.getContext(False).getConfiguration()
    assert list(configuration.getRootLogger().getAppenders().keySet()) == ["short"]
    line = logged(spark, "short")
    assert line.count("\n") == 1
    assert line.endswith(" ERROR Executor: Exception in task 0.0 in stage 1.0\n")


def test_the_verbose_log_has_the_stacks(spark: Any) -> None:
    text = logged(spark, "full")
    assert STACK in text
    assert "java.io.IOException: No space left on device\n\tat " in text


def test_a_local_executor_is_not_lost_for_want_of_heartbeats(spark: Any) -> None:
    """After a laptop's sleep Spark would count the executor as lost, and end the JVM ten minutes later."""
    limit_ms = spark.sparkContext._jsc.sc().conf().getTimeAsMs("spark.storage.blockManagerHeartbeatTimeoutMs")
    assert limit_ms > 365 * 86_400_000


def test_uploads_to_an_object_store_wait_in_the_directory_of_the_process(spark: Any) -> None:
    """Hadoop's own default is /tmp/hadoop-USER, whatever TMPDIR says. What a killed process left there stayed for ever."""
    hadoop = spark._jvm.org.apache.hadoop
    conf = spark._jsc.hadoopConfiguration()
    for key in ("fs.s3a.buffer.dir", "fs.azure.buffer.dir"):
        file = hadoop.fs.LocalDirAllocator(key).createTmpFileForWrite("block-", 1, conf)
        assert Path(file.getPath()).is_relative_to(directory_of_process())


def test_the_ports_of_a_local_session_ask_for_a_secret(spark: Any) -> None:
    """Else every user of the machine could fetch blocks with values of rows, and the code of tasks with the key of masks."""
    context = spark.sparkContext
    transfer = context._jsc.sc().env().blockManager().blockTransferService()
    names = b"".join(len(name).to_bytes(4) + name for name in (context.applicationId.encode(), b"driver"))
    body = b"\0" + names + (0).to_bytes(4)  # OpenBlocks, without blocks
    request = b"\3" + (7).to_bytes(8) + len(body).to_bytes(4) + body  # RpcRequest 7
    with socket.create_connection((transfer.hostName(), transfer.port()), timeout=60) as client, client.makefile("rb") as answers:
        client.sendall((len(request) + 8).to_bytes(8) + request)
        answer = answers.read(17)
    assert answer[8] == 5, "no RpcFailure"


def test_python_workers_are_shared_and_import_the_installed_pyspark(spark: Any) -> None:
    """Each process that imports pyspark from its zip file compiles it anew; so does each daemon that a session has for itself."""

    def tell(batches: Any) -> Any:
        import os

        import pyarrow as pa
        import pyspark

        for _ in batches:
            yield pa.RecordBatch.from_pydict({"daemon": [os.getppid()], "file": [pyspark.__file__]})

    rows = [
        each.range(1).mapInArrow(tell, "daemon long, file string").collect()
        for each in (spark, session.copy(spark), session.copy(spark))
    ]
    assert rows[1:] == rows[:1] * 2
    assert rows[0][0]["file"] == pyspark.__file__


def test_a_session_of_another_thread_is_used_and_stays_as_it_is(spark: Any) -> None:
    key = "spark.sql.shuffle.partitions"
    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(session.build, conf={key: "77"}).result()
        assert thread.submit(given.take, None, "delta", {}).result() is found
    assert found.sparkContext is spark.sparkContext
    assert found.conf.get(key) == spark.conf.get(key) == "2"


def test_a_pipeline_that_has_ended_is_let_go(spark: Any, tmp_path: Path) -> None:
    """A program that began a run each minute kept all of them, with their queries."""
    log = Log(tmp_path / "staging")
    log.segment([relation(10, "t", ("id", 23)), Insert(None, 10, (b"1",))])
    pipeline = Pipeline(spark, log.root, tmp_path / "warehouse")
    pipeline.process_available()
    found = weakref.ref(pipeline)
    del pipeline
    gc.collect()
    assert found() is None


def test_a_full_disk_is_one_message(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit on the size of this process's files stands for the full disk. The process itself writes a small micro-batch."""
    log = Log(tmp_path / "staging")
    content = random.Random(1).randbytes(100_000).hex().encode()
    log.segment([relation(10, "t", ("id", 23), ("content", 25)), Insert(None, 10, (b"1", content))])
    full = Pipeline(spark, log.root, tmp_path / "warehouse")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # Python would cut off the bytecode of what it imports
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(PipelineError) as caught:
            full.process_available()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "File too large" in caught.value.message
    assert "\n" not in caught.value.message

    pipeline = Pipeline(spark, log.root, tmp_path / "warehouse")
    pipeline.process_available()
    assert [len(row["content"]) for row in changelogs_of(spark, pipeline.warehouse).read(Table("public", "t")).collect()] == [
        200_000
    ]


@pytest.mark.parametrize(
    ("option", "value", "reason", "hint"),
    [
        ("--master", "locl", "Master must either be yarn or start with spark, k8s, or local", "correct --master, which is locl: "),
        ("--conf", "spark.driver.memory=abc", "Invalid maximum heap size: -Xmxabc", "correct --conf spark.driver.memory"),
        ("--conf", "spark.sql.shuffle.partitions=abc", "[INVALID_CONF_VALUE", "correct --conf spark.sql.shuffle.partitions"),
    ],
)
def test_an_option_that_spark_refuses(tmp_path: Path, option: str, value: str, reason: str, hint: str) -> None:
    warehouse = ("--warehouse", str(make_pipeline(tmp_path) / "warehouse"), "--table", "public.fruit")
    said = spark_cli("as-of", *warehouse, "--at", "0/1200", option, value, code=2).stderr.splitlines()
    assert said[-2].startswith(f"cdcpipe-spark: error: Spark did not start: {reason}")
    assert said[-1].startswith(f"cdcpipe-spark: hint: {hint}")
    assert not [line for line in said if line.startswith("\tat ")]


def test_a_logger_is_found_without_a_walk_of_the_stack(spark: Any) -> None:
    factory = spark._jvm.org.apache.logging.log4j.LogManager.getFactory()
    assert factory.getSelector().getClass().getSimpleName() == "BasicContextSelector"


def test_java_writes_where_python_says_whatever_the_locale_is(tmp_path: Path) -> None:
    """Java takes names of files as the locale says: with LC_ALL=C it made ``gr??e`` beside the directory."""
    program = (
        "import sys; from spark_sink import build_session; build_session(format='parquet').range(3).write.parquet(sys.argv[1])"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "größe")]
    done = subprocess.run(command, env=os.environ | {"LC_ALL": "C"}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["größe"]


PROGRAM_OF_A_COMMAND = """
from spark_sink import build_session
from spark_sink.__main__ import invoke

invoke(["--version"])  # what each command does first
print(build_session(format="parquet").range(3).mapInArrow(lambda batches: batches, "id long").count())
"""


def test_the_workers_of_a_command_import_nothing_from_the_current_directory(tmp_path: Path) -> None:
    """It may have files of other programs, of another user, or another version of cdcpipe."""
    (tmp_path / "socket.py").write_text("raise ImportError('not the library')")
    command = [sys.executable, "-P", "-c", PROGRAM_OF_A_COMMAND]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["3"]), done.stderr


PROGRAM_WITHOUT_MEMORY = """
from spark_sink.spark import jvm, session
from spark_sink import build_session

java = build_session(format="parquet")._jvm
handles, methods = java.java.lang.invoke.MethodHandles, java.java.lang.invoke.MethodHandleProxies
for name in ("IllegalStateException", "OutOfMemoryError"):
    assert not jvm.has_ended(0)
    error = getattr(java.java.lang, name)("made")
    failing = handles.throwException(java.java.lang.Void.TYPE, error.getClass()).bindTo(error)
    thread = java.java.lang.Thread(methods.asInterfaceInstance(java.java.lang.Class.forName("java.lang.Runnable"), failing))
    thread.start()
    if name == "IllegalStateException":
        thread.join()
assert jvm.has_ended(60)
print(session.ended_error().message)
"""


def test_a_lack_of_memory_in_any_thread_ends_the_jvm() -> None:
    """Without its scheduler's thread the JVM went on, and all that waited for a job waited for ever."""
    done = subprocess.run([sys.executable, "-c", PROGRAM_WITHOUT_MEMORY], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "Spark's JVM has ended, because Java ran out of memory (OutOfMemoryError)\n"

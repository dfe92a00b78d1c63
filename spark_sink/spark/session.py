"""Builds and checks Spark sessions for change data, with or without Delta Lake. Knows nothing of PostgreSQL, staging and tables.

``build`` starts a session. ``check`` tells whether an existing session (a notebook's) fits.

Delta Lake comes from Maven Central or from a directory of jars. Spark keeps jars from Maven Central in $HOME/.ivy2.5.2, or in
spark.jars.ivy. Only two jars are fetched. Delta's POM lists 100 MB of others, for Delta Kernel and Unity Catalog, which are not
used here.
"""

from __future__ import annotations

import os
import re
import threading
import time
import zipfile
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cdcpipe.errors import CdcpipeError, InitError, InvalidArgumentsError
from spark_sink.files.lock import hold_alone
from spark_sink.files.places import is_local, name
from spark_sink.files.temporary import directory_of_process
from spark_sink.spark import connect, jvm, refused_settings, secret_settings, without_pandas
from spark_sink.spark.environment import prepare_workers, stay_on_this_machine
from spark_sink.spark.failed_start import JVM_ENDED, failed_start, not_fetched
from spark_sink.spark.failure import reason_of
from spark_sink.spark.home import GATEWAY, is_local_master, user_home
from spark_sink.spark.java_home import export_java
from spark_sink.spark.java_options import java_options
from spark_sink.spark.settings import DELTA_CATALOG, DELTA_EXTENSION, DELTA_SETTINGS, LOCAL_SETTINGS, general_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from pyspark.sql import SparkSession


__all__ = [
    "active",
    "build",
    "check",
    "check_jvm",
    "check_reach",
    "copy",
    "ended_error",
    "find_jars",
    "is_stopped",
    "own",
    "stop",
]

_NEEDS_DELTA = {"delta": True, "parquet": False}
"""By table format (warehouse/formats.py), whether a session has to have Delta Lake."""

DELTA_VERSION = "4.4.0"
# Each minor release of Spark has its own build of Delta. Spark 4 has Scala 2.13.
DELTA_JARS = (f"delta-spark_4.2_2.13-{DELTA_VERSION}.jar", f"delta-storage-{DELTA_VERSION}.jar")
DELTA_PACKAGES = f"io.delta:delta-spark_4.2_2.13:{DELTA_VERSION},io.delta:delta-storage:{DELTA_VERSION}"
# Ivy patterns that exclude every dependency of the two jars.
DELTA_EXCLUDES = "com.*:*,org.*:*,javax.*:*,commons-*:*,io.airlift:*,io.unitycatalog:*,io.delta:delta-kernel*"
# The patterns if the user's packages are resolved at the same time: they exclude only dependencies that nobody else needs.
DELTA_EXCLUDES_AMONG_OTHERS = "org.scala-lang:*,io.unitycatalog:*,io.delta:delta-kernel*"

_NO_DELTA_HINT = (
    f"give a directory with {' and '.join(DELTA_JARS)} as --jars DIR, let this machine reach Maven Central "
    "(repo1.maven.org), or use --format parquet, which needs no jar"
)
_NO_PACKAGES_HINT = (
    "correct --conf spark.jars.packages, let this machine reach the packages' repository, or give the jars by --jars DIR"
)
_PROXY_HINT = "; Java ignores https_proxy: set JAVA_TOOL_OPTIONS='-Dhttps.proxyHost=HOST -Dhttps.proxyPort=PORT'"
_IVY_DEADLINE_S, _IVY_PAUSE_S = 600.0, 0.2
_DEFAULT_MASTER = "local[2]"
_building: Final = threading.RLock()
_UPLOADS = "spark.hadoop.hadoop.tmp.dir"
"""Where Hadoop keeps what it sends to S3 and Azure until it is sent. By default /tmp/hadoop-USER, which nobody clears."""


def build(
    *,
    app_name: str = "cdcpipe",
    master: str | None = None,
    format: str = "delta",  # noqa: A002 - Spark's own word for it
    conf: Mapping[str, str] | None = None,
    jars_dir: str | os.PathLike[str] | None = None,
    ui: bool = False,
    on_step: Callable[[str], None] | None = None,
    locks: Iterable[Path] = (),
    on_made: Callable[[SparkSession], object] | None = None,
) -> SparkSession:
    """Start a session, or return the session of this process if there is one and it passes ``check``. Thread-safe.

    ``conf`` overrides the settings made here; its Java options are added to ours. ``master`` is ``local[2]`` by default. Under
    spark-submit, its master and its settings apply instead, and its jars must contain Delta Lake. ``on_step`` gets texts for people
    about what is being done. ``locks`` are lock files: what this process holds of them when it is killed, its JVM holds until its
    own end. ``on_made`` gets the session if it was made here, and fits: nobody else stops it. It is called last, before another
    thread can find the session. Raises InitError if Java, pyspark or Delta Lake is missing.
    """
    try:
        from spark_sink.spark.existing import existing
    except ImportError as ex:
        raise InitError("pyspark is not installed", hint="pip install 'cdcpipe[spark]'") from ex
    with _building:  # a second thread waits, and finds the session then
        spark = existing()
        if spark is not None:
            check(spark, format)
            return spark
        check_jvm(format)
        settings, conf = _settings_to_start(app_name, master, format, dict(conf or {}), jars_dir, ui=ui)
        return _start(settings, conf, format, on_step or (lambda _step: None), locks, on_made or (lambda _spark: None))


def _settings_to_start(
    app_name: str,
    master: str | None,
    format: str,  # noqa: A002
    conf: dict[str, str],
    jars_dir: str | os.PathLike[str] | None,
    *,
    ui: bool,
) -> tuple[dict[str, str], dict[str, str]]:
    """Return all settings of a new session, and the user's ``conf`` with what ours adds to it."""
    settings = general_settings(ui=ui)
    if _needs_delta(format):
        settings |= DELTA_SETTINGS
    if GATEWAY in os.environ:
        settings |= _submitted()
        master = master or settings.get("spark.master")
    else:
        settings |= _jar_settings(format, jars_dir, conf.get("spark.jars.ivy"))
        _join_jars(settings, conf)
        if "spark.driver.extraJavaOptions" in conf:
            conf["spark.driver.extraJavaOptions"] = f"{java_options()} {conf['spark.driver.extraJavaOptions']}"
        export_java()
    settings |= conf
    refused_settings.refuse(settings.get)
    settings = {"spark.app.name": app_name, "spark.master": master or _DEFAULT_MASTER} | settings
    if is_local_master(settings["spark.master"]):
        settings = LOCAL_SETTINGS | {_UPLOADS: str(directory_of_process() / "hadoop")} | settings
        stay_on_this_machine(settings)
    return settings, conf


def _start(
    settings: dict[str, str],
    conf: Mapping[str, str],
    format: str,  # noqa: A002
    on_step: Callable[[str], None],
    locks: Iterable[Path],
    on_made: Callable[[SparkSession], object],
) -> SparkSession:
    from pyspark.sql import SparkSession

    from spark_sink.spark.existing import existing

    prepare_workers(settings)
    on_step("fetching Spark's packages" if "spark.jars.packages" in settings else "starting Spark")
    without_pandas.apply()
    try:
        with _alone_in_ivy(settings):
            jvm.start(settings, on_step, locks)
        on_step("starting Spark")
        # The builder does not tell whose session it returns. Without its lock, others find ours before `on_made` has it.
        with SparkSession.Builder._lock:  # noqa: SLF001
            spark = existing()  # the program may have made one while the JVM started
            if spark is None:
                builder = SparkSession.builder
                for key, value in _with_pattern(settings).items():
                    builder = builder.config(key, value)
                spark = builder.getOrCreate()
                _check_new(spark, format)
                _note_ready(spark)
                on_made(spark)
                return spark
        check(spark, format)
        _note_ready(spark)
    except CdcpipeError:
        raise
    except Exception as ex:
        raise _start_error(ex, settings, conf) from ex
    return spark


def _with_pattern(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the settings, with the pattern of what Spark hides if there is no other one. Call this when the JVM runs.

    The JVM has read spark-defaults.conf then. On its command line, our pattern would count before one in this file.
    """
    from pyspark import SparkConf

    ours = {} if SparkConf().contains(secret_settings.PATTERN) else {secret_settings.PATTERN: secret_settings.HIDDEN_BY_SPARK}
    return ours | dict(settings)


def _note_ready(spark: SparkSession) -> None:
    """Show what Java writes from now on. What was held back at the start says nothing any more."""
    jvm.log_lost_connections(spark.sparkContext)
    if (output := jvm.output()) is not None:
        output.session_is_ready()


def _start_error(ex: Exception, settings: Mapping[str, str], given: Mapping[str, str]) -> InitError:
    """Return the error to raise for an exception at the start of Spark. Shows what the JVM wrote if that may say more."""
    has_ended = JVM_ENDED in str(ex) or jvm.has_ended(jvm.END_S)
    if has_ended and (missing := not_fetched(jvm.at_start())) is not None:
        hint = _NO_DELTA_HINT if "io.delta:" in missing else _NO_PACKAGES_HINT
        if "https_proxy" in map(str.lower, os.environ):
            hint += _PROXY_HINT
        return InitError(f"Spark did not start, because it could not fetch {missing}", hint=f"{hint}; -v shows where Spark looked")
    error, has_reason = failed_start(ex, settings, given, jvm.at_start() if has_ended else None)
    if not has_reason:
        jvm.show_held()
    return error


def _check_new(spark: SparkSession, format: str) -> None:  # noqa: A002
    """Check a session that was made here; stop it if it does not fit. Otherwise each later attempt would take it, and fail, too.

    It may have settings that nobody gave: those of spark-defaults.conf.
    """
    try:
        check(spark, format)
    except Exception:
        stop(spark)
        raise


def check_jvm(format: str) -> None:  # noqa: A002
    """Raise InitError if no session that this process makes can write tables in ``format``."""
    connect.refuse_chosen()
    if _needs_delta(format) and jvm.lacks(DELTA_CATALOG):
        raise InitError(
            "the first Spark session of this process had no Delta Lake, and Spark can't add it later",
            hint="restart the program, or the notebook's kernel, and call spark_sink.build_session() before Spark is used",
        )


def check(spark: SparkSession, format: str) -> None:  # noqa: A002
    """Raise InitError if ``spark`` was stopped, can't write ``format``, or has settings that would change or skip values."""
    connect.refuse(spark)
    needs_delta = _needs_delta(format)
    _check_not_stopped(spark)
    if not spark.version.startswith("4.2."):
        raise InitError(
            f"this is Spark {spark.version}; cdcpipe needs Spark 4.2", hint="run it with Spark 4.2: pip install 'cdcpipe[spark]'"
        )
    refused_settings.refuse(spark.conf.get)
    if not needs_delta:
        return
    extensions = str(spark.conf.get("spark.sql.extensions", "") or "")
    catalog = spark.conf.get("spark.sql.catalog.spark_catalog", "")
    has_classes = spark._jvm.org.apache.spark.util.Utils.classIsLoadable(DELTA_CATALOG)  # noqa: SLF001 - Spark only warns
    if DELTA_EXTENSION not in extensions or catalog != DELTA_CATALOG or not has_classes:
        raise InitError(
            "this Spark session has no Delta Lake",
            hint=f"start it with spark.sql.extensions={DELTA_EXTENSION} and "
            f"spark.sql.catalog.spark_catalog={DELTA_CATALOG} and the packages {DELTA_PACKAGES} (spark-submit --packages), "
            "let spark_sink.build_session() make it, or use the format parquet",
        )


def _check_not_stopped(spark: SparkSession) -> None:
    if is_stopped(spark):
        # pyspark keeps a session whose application the JVM has stopped, and offers it as the one of the process.
        hint = "make another one" if _was_stopped_here(spark) else "call its stop(), and make another one"
        raise InitError("this Spark session was stopped", hint=hint)


def is_stopped(spark: SparkSession) -> bool:
    """Tell whether the application of a session was stopped. Settings and version can be asked all the same."""
    return _was_stopped_here(spark) or bool(spark.sparkContext._jsc.sc().isStopped())  # noqa: SLF001 - nothing else tells


def stop(spark: SparkSession) -> None:
    """Stop the application of a session, unless its JVM has ended, or pyspark has stopped it.

    With a second stop() pyspark would forget the session that was made in between. The process could use and make none then.
    Other threads that look for a session, here or with Spark's builder, wait meanwhile: pyspark shows the dying one to the end.
    """
    from pyspark.sql import SparkSession

    if not jvm.has_ended(0) and not _was_stopped_here(spark):
        with SparkSession.Builder._lock:  # noqa: SLF001 - `existing` and the builder take it
            spark.stop()


def _was_stopped_here(spark: SparkSession) -> bool:
    return spark.sparkContext._jsc is None  # noqa: SLF001 - pyspark's own stop() removes it


def _needs_delta(format: str) -> bool:  # noqa: A002
    if format not in _NEEDS_DELTA:
        raise InvalidArgumentsError(f"unknown table format {format!r}: choose one of {', '.join(_NEEDS_DELTA)}")
    return _NEEDS_DELTA[format]


def check_reach(spark: SparkSession, place: Path) -> None:
    """Raise InitError if Spark lacks the jars or the settings to reach the object store of a warehouse."""
    if is_local(place):
        return
    path = spark._jvm.org.apache.hadoop.fs.Path(name(place))  # noqa: SLF001 - Hadoop has no Python
    try:
        path.getFileSystem(spark._jsparkSession.sessionState().newHadoopConf())  # noqa: SLF001
    except Exception as ex:
        # For a malformed key, the message of ABFS contains the key.
        said = re.sub(r'key ="[^"]*"', "its key", reason_of(ex))
        raise InitError(
            f"Spark can't reach {name(place)}: {said}",
            hint="it needs the jars of that store's Hadoop connector, with --conf spark.jars.packages=… or in --jars, and the "
            "settings of the connection: docs/spark/object-stores.md",
        ) from ex


@contextmanager
def active(spark: SparkSession) -> Iterator[None]:
    """Make ``spark`` the active session of this thread."""
    sessions = spark._jvm.org.apache.spark.sql.classic.SparkSession  # noqa: SLF001
    before = sessions.getActiveSession()
    sessions.setActiveSession(spark._jsparkSession)  # noqa: SLF001
    try:
        yield
    finally:
        if before.isDefined():
            sessions.setActiveSession(before.get())
        else:
            sessions.clearActiveSession()


def own(spark: SparkSession) -> SparkSession:
    """Return a copy of the user's session, in which a run works.

    There the run's settings change no commit of the user, and the user's cells change nothing in the run: the current catalog,
    temporary views, queries in ``streams``. The sessions share Spark's own catalog and the cache.

    Raises InitError if the session was stopped: its program may have done so since ``check``, while the run waited for its slot.
    """
    _check_not_stopped(spark)
    # A session makes its catalogs when it first needs them. Delta's keeps the session that was the active one at that moment, and
    # works with the settings of that one.
    with active(spark):
        current = spark.catalog.currentCatalog()
    made = copy(spark)
    with active(made):
        made.catalog.setCurrentCatalog(current)
    return made


def copy(spark: SparkSession) -> SparkSession:
    """Return another session of the same application, with a copy of the settings. Its current catalog is the default one."""
    return type(spark)(spark.sparkContext, spark._jsparkSession.cloneSession())  # noqa: SLF001 - newSession() has not these settings


def _submitted() -> dict[str, str]:
    """Return the settings of the spark-submit that runs this program: from its command line and its spark-defaults.conf."""
    from pyspark import SparkConf, SparkContext

    SparkContext._ensure_initialized()  # noqa: SLF001 - spark-submit's JVM runs already and has them
    return dict(SparkConf().getAll())


def _jar_settings(
    format: str,  # noqa: A002
    jars_dir: str | os.PathLike[str] | None,
    ivy_dir: str | None = None,
) -> dict[str, str]:
    """Return the settings for jars: from ``jars_dir``; without it, Delta Lake comes from Ivy's folder or Maven Central.

    The settings name Ivy's folder explicitly. Java does not use ``$HOME``, so Spark's default may differ from the folder that this
    function looks into.
    """
    if jars_dir is not None:
        jars = _jars(Path(jars_dir))
        wanted = ("delta-spark_4.2_2.13-", "delta-storage-") if _needs_delta(format) else ()
        missing = [name for name in wanted if not any(name in jar for jar in jars)]
        if missing:
            raise InitError(f"no {' and no '.join(name + '*.jar' for name in missing)} in {jars_dir}", hint=_NO_DELTA_HINT)
        return {"spark.jars": ",".join(jars)}
    if not _needs_delta(format):
        return {}
    ivy = _ivy_folder(ivy_dir)
    # Ivy would find them here, too, but it takes a second and prints two dozen lines.
    cached = [ivy / "jars" / f"io.delta_{name}" for name in DELTA_JARS]
    if all(zipfile.is_zipfile(jar) for jar in cached):
        return {"spark.jars": ",".join(map(str, cached)), "spark.jars.ivy": str(ivy)}
    return {"spark.jars.packages": DELTA_PACKAGES, "spark.jars.excludes": DELTA_EXCLUDES, "spark.jars.ivy": str(ivy)}


def find_jars(
    format: str,  # noqa: A002
    jars_dir: str | os.PathLike[str] | None,
    conf: Mapping[str, str],
) -> list[str] | None:
    """Return the jars on this machine that a session gets, None if it fetches Delta Lake's; raise InitError if some are missing."""
    if GATEWAY in os.environ:
        return []  # they are spark-submit's
    settings = _jar_settings(format, jars_dir, conf.get("spark.jars.ivy"))
    if "spark.jars.packages" in settings:
        return None
    return [jar for jar in settings.get("spark.jars", "").split(",") if jar]


def _ivy_folder(named: str | None) -> Path:
    """Return the folder in which Ivy keeps jars, and create it. ``named`` is Spark's setting spark.jars.ivy."""
    ivy = Path(named) if named else user_home() / ".ivy2.5.2"
    try:
        (ivy / "jars").mkdir(parents=True, exist_ok=True)
    except OSError as ex:
        raise InitError(
            f"cannot keep Spark's packages in {ivy}: {ex.strerror}",
            hint="set HOME to a directory of this user, name one with --conf spark.jars.ivy=DIR, or give the jars with --jars",
        ) from ex
    return ivy


@contextmanager
def _alone_in_ivy(settings: Mapping[str, str], deadline_s: float = _IVY_DEADLINE_S) -> Iterator[None]:
    """Let one process at a time fetch packages into Ivy's folder.

    Ivy does not lock the folder: two sessions that fetch the same jars into it at once see each other's half-written files, and
    fail. Does nothing if there is nothing to fetch. Raises InitError if another process still fetches after ``deadline_s`` seconds.
    """
    if "spark.jars.packages" not in settings or GATEWAY in os.environ:
        yield
        return
    lock = _ivy_folder(settings.get("spark.jars.ivy")) / "cdcpipe.lock"
    with ExitStack() as held:
        ends = time.monotonic() + deadline_s
        while not held.enter_context(hold_alone(lock)):
            held.close()
            if time.monotonic() > ends:
                raise InitError(
                    f"another process has been fetching Spark's packages into {lock.parent} for {deadline_s:.0f} s",
                    hint="end it, or name another folder with --conf spark.jars.ivy=DIR",
                )
            time.sleep(_IVY_PAUSE_S)
        yield


def _join_jars(settings: dict[str, str], conf: dict[str, str]) -> None:
    """Add our jars, or Delta Lake's packages, to the jars or packages in the user's ``conf``."""
    for key in {"spark.jars", "spark.jars.packages"} & settings.keys() & conf.keys():
        conf[key] += f",{settings[key]}"
        if key == "spark.jars.packages":
            excludes = conf.get("spark.jars.excludes")
            conf["spark.jars.excludes"] = ",".join(filter(None, [excludes, DELTA_EXCLUDES_AMONG_OTHERS]))


def _jars(directory: Path) -> list[str]:
    """Return the jars in ``directory``. Raises InvalidArgumentsError without it, InitError for a jar that Spark could not read."""
    if not directory.is_dir():
        raise InvalidArgumentsError(f"no such directory: {directory}", hint=_NO_DELTA_HINT)
    jars = sorted(str(path) for path in directory.resolve().glob("*.jar"))
    if unusable := next((jar for jar in jars if not zipfile.is_zipfile(jar)), None):
        raise InitError(
            f"the jar {unusable} is missing, damaged or not readable", hint="copy it there again, or take it out of the directory"
        )
    return jars


def ended_error() -> CdcpipeError:
    """Return the error to raise when Spark's JVM has ended while a command needed it."""
    if jvm.ran_out_of_memory():
        return CdcpipeError(
            "Spark's JVM has ended, because Java ran out of memory (OutOfMemoryError)",
            hint="start again; nothing is lost. Give Java more memory: --conf spark.driver.memory",
        )
    return CdcpipeError(
        "Spark's JVM has ended while it was needed",
        hint="start again; nothing is lost. If the system killed it for lack of memory (dmesg), give the machine or the container"
        " more, or Java less: --conf spark.driver.memory. If OutOfMemoryError stands above, give Java more",
    )

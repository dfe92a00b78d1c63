"""Explains why Spark did not start: one line with the reason, and a hint that names the option whose value Spark refuses.

    failed_start(ex, {"spark.master": "locl"}, {}, said)
    Spark did not start: Master must either be yarn or start with spark, k8s, or local
    hint: correct --master, which is locl: it takes local[N], yarn, spark://HOST:PORT or k8s://HOST:PORT

The reason is in the exception, or in the lines of the JVM's stderr if the JVM ended before this process could speak to it.
"""

from __future__ import annotations

import errno
import os
import re
import tempfile
from typing import TYPE_CHECKING, Final

from cdcpipe.errors import InitError
from cdcpipe.limits import limit_hint
from spark_sink.files.system_hints import hint_in
from spark_sink.spark.failure import text_of
from spark_sink.spark.home import HOME_HINT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["failed_start", "not_fetched"]

JVM_ENDED: Final = "JAVA_GATEWAY_EXITED"
"""In the text of pyspark's error if the JVM ended before it had sent its port."""

_UNCAUGHT: Final = re.compile(r'^Exception in thread "main" (?:[\w$]+\.)+([\w$]+)(?:: (.*))?$')
_NOISE: Final = re.compile(
    r"(?:NOTE: )?Picked up |WARNING: |\s+at |\t|:: |\d{4}-\d\d-\d\d |Error occurred during init"
    r"|Error: (?:Could not create the Java Virtual Machine|A fatal exception has occurred)"
)
"""Lines of the JVM's stderr that give no reason."""
_NOT_FETCHED: Final = re.compile(r"(?:unresolved dependency|download failed): ([^#\s]+)#([^;\s]+);([^:!,\s\]]+)")
_NO_ACCESS: Final = re.compile(r"\s*Server access error at url https?://([^/\s]+)\S* \((?:[\w$]+\.)*([\w$]+(?:: .*)?)\)")
_HEAP: Final = re.compile(r"-Xm[xs]|heap size|heap space|reserve enough space|allocate memory", re.IGNORECASE)
_OPEN_FILES: Final = re.compile(r"Too many open files|Error loading java\.security file")
"""With too few open files, the JVM opens Spark's some 300 jars, and then cannot open a file of its own."""
_NO_USER: Final = re.compile(r"could not determine effective user|invalid null input: name")
"""Hadoop finds no name for the user id of the process."""
_MASTERS: Final = "it takes local[N], yarn, spark://HOST:PORT or k8s://HOST:PORT"


def reason_in(lines: Sequence[str]) -> str | None:
    """Return the reason why a JVM ended, from what it wrote to its stderr; None if the lines do not give one."""
    for line in lines:
        if (found := _UNCAUGHT.match(line)) is not None:
            return found[2] or found[1]
    return next((line.removeprefix("Error: ") for line in lines if line.strip() and not _NOISE.match(line)), None)


def not_fetched(lines: Sequence[str]) -> str | None:
    """Return which packages Spark could not fetch, and why, from what the JVM wrote to its stderr; None if it fetched all.

    The report of Ivy, which fetches them, has a hundred lines.
    """
    packages = [
        ":".join(found.groups()) for line in lines if line.startswith("Exception in") for found in _NOT_FETCHED.finditer(line)
    ]
    if not packages:
        return None
    reasons = ", ".join(dict.fromkeys(f"{found[1]}: {found[2]}" for found in map(_NO_ACCESS.match, lines) if found is not None))
    return f"{' and '.join(packages)}{reasons and f' ({reasons})'}"


def failed_start(
    ex: BaseException, settings: Mapping[str, str], given: Mapping[str, str], said: Sequence[str] | None
) -> tuple[InitError, bool]:
    """Return the error to raise for an exception at the start of Spark, and whether it has the reason.

    ``settings`` are those of the session, ``given`` those of ``--conf`` among them, and ``said`` has the lines that the JVM wrote
    before its end; None if it has not ended.
    """
    reason = text_of(ex) if said is None else reason_in(said)
    hint = _hint(reason or "", settings["spark.master"], given)
    if reason is None:
        hint = f"did the system kill it, for lack of memory (dmesg)? Then give it more, and start again. If not: {hint}"
    return InitError(f"Spark did not start: {reason or 'its JVM has ended, and gave no reason'}", hint=hint), reason is not None


def _hint(reason: str, master: str, given: Mapping[str, str]) -> str:
    """Return a hint with the option that is to be corrected, if the reason tells which. Values of settings may be secret."""
    if _OPEN_FILES.search(reason):
        limit = limit_hint(OSError(errno.EMFILE, reason))
        return f"{limit}, 1024 are enough; if that is not it, can this user read the files of Java?"
    if _NO_USER.search(reason):
        return (
            f"user id {os.geteuid()} has no name on this machine, and Hadoop needs one: add the user (in a container: to the"
            " /etc/passwd of its image), or start this as a user who has a name"
        )
    if (home := os.environ.get("SPARK_HOME")) and home in reason:
        return HOME_HINT
    if (found := hint_in(reason)) is not None:
        return f"{found}; Spark's temporary files are in $TMPDIR, now {tempfile.gettempdir()}"
    if re.search(r"\bmaster\b", reason, re.IGNORECASE) or master in reason:
        return f"correct --master, which is {master}: {_MASTERS}"
    named = [key for key in given if key in reason]
    if not named and _HEAP.search(reason):
        named = ["spark.driver.memory"]
    if not named:
        named = [key for key, value in given.items() if value and re.search(rf"(?<!\w){re.escape(value)}(?!\w)", reason)]
    if not named and "memory" in reason.lower():
        named = [key for key in given if "memory" in key]
    if named:
        return f"correct --conf {named[0]}"
    options = f"--master and --conf {' and '.join(sorted(given))}" if given else "--master, --conf and --jars"
    return f"do {options} fit Spark and this machine? -v shows all that Spark says"

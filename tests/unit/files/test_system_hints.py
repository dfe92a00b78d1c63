"""The hint for an error of a disk whose words Spark or a Python worker repeats."""

import pytest

from spark_sink.files.system_hints import hint_in
from spark_sink.pipeline.failures import PipelineError, own_error
from support.spark_errors import Py4JError


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("[Errno 28] Error writing bytes to file. Detail: [errno 28] No space left on device", "make room"),
        ("java.io.IOException: Disk quota exceeded", "quota"),
        ("/mnt/x: Read-only file system", "mounted read-only"),
        ("/mnt/x (Permission denied)", "as the owner"),
        ("OSError: [Errno 18] Invalid cross-device link: '/lake/_cdcpipe/snapshot/1' -> '/lake/changelog/t'", "one file system"),
        (
            "java.lang.UnsatisfiedLinkError: /tmp/libzstd-jni-1.5.7-7.so: failed to map segment from shared object",
            "set TMPDIR to one that is not",
        ),
    ],
)
def test_an_error_of_a_disk_has_its_hint_whoever_repeats_it(text: str, hint: str):
    assert hint in (hint_in(text) or "")
    error = own_error(Py4JError(text))
    assert isinstance(error, PipelineError)
    assert hint in (error.hint or "")


def test_other_errors_have_none():
    assert hint_in("permission denied for table t") is None
    assert hint_in("File not found") is None

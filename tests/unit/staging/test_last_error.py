"""The last error of a command that uses a staging directory."""

import json
import os
from pathlib import Path

from cdcpipe.errors import CdcpipeError, SlotDoesNotExistError
from spark_sink.staging import last_error
from spark_sink.staging.lock import lock


def test_only_the_owner_of_the_directory_records_its_error(tmp_path: Path) -> None:
    fd = lock(tmp_path)
    last_error.note(tmp_path, "run", CdcpipeError("mine"))
    owner = json.loads((tmp_path / "lock").read_text())
    (tmp_path / "lock").write_text(json.dumps(owner | {"pid": owner["pid"] + 1}))
    last_error.note(tmp_path, "run", CdcpipeError("of one that was refused"))
    last_error.clear(tmp_path)
    found = last_error.read(tmp_path)
    assert found is not None
    assert found["message"] == "mine"
    os.close(fd)
    last_error.clear(tmp_path)
    assert last_error.read(tmp_path) is None


def test_the_last_error_is_kept(tmp_path: Path) -> None:
    last_error.note(tmp_path / "nowhere", "run", ValueError("x"))
    assert not (tmp_path / "nowhere").exists()
    assert last_error.read(tmp_path) is None
    last_error.note(tmp_path, "run", ValueError("a row's value"))
    found = last_error.read(tmp_path)
    assert found is not None
    assert (found["message"], found["exit_code"]) == ("unexpected ValueError", 7)
    last_error.note(tmp_path, "land", SlotDoesNotExistError("no slot", hint="make one"))
    found = last_error.read(tmp_path)
    assert found is not None
    assert (found["command"], found["message"], found["hint"], found["exit_code"]) == ("land", "no slot", "make one", 8)

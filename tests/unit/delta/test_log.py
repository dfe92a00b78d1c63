"""The log of a Delta table, replayed without Spark."""

import json
import os
import shutil
import time
from pathlib import Path
from random import Random
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_sink.delta import checkpoints
from spark_sink.delta import log as delta_log
from spark_sink.delta.log import LogCache, TableLog, read_table
from spark_sink.files import places
from support.delta_log import added, commit


def test_a_log_is_replayed(tmp_path: Path) -> None:
    log = tmp_path / "_delta_log"
    assert read_table(tmp_path) is None
    commit(log, 0, {"commitInfo": {"timestamp": 1000}}, {"metaData": {}}, added("a", 10), added("b", 5))
    first = read_table(tmp_path)
    assert first == delta_log.TableState(version=0, lsn=None, written_ms=1000, rows=15, sizes=(10, 10))
    vector = {"storageType": "u", "pathOrInlineDv": "x", "offset": 1, "sizeInBytes": 34, "cardinality": 4}
    commit(
        log,
        1,
        {"commitInfo": {"timestamp": 2000}},
        {"txn": {"appId": "cdcpipe", "version": 77}},
        {"txn": {"appId": "somebody", "version": 99}},
        {"remove": {"path": "a"}},
        added("a", 10, vector=vector),
    )
    assert read_table(tmp_path, first) == delta_log.TableState(1, 77, 2000, 11, (10, 10))
    commit(log, 2, {"remove": {"path": "a", "deletionVector": vector}}, added("c", None))
    state = read_table(tmp_path)
    assert state is not None
    assert (state.files, state.rows, state.lsn) == (2, None, 77)
    assert read_table(tmp_path, state) is state
    (log / f"{3:020d}.json").write_text("{")
    with pytest.raises(ValueError, match="Expecting"):
        read_table(tmp_path)


def state_of(log: TableLog) -> tuple[object, ...]:
    return (log.version, log.lsn, log.written_ms, log.metadata, log.protocol, log.clustering, sorted(map(str, log.files)))


def random_actions(random: Random, files: list[str], number: int) -> list[dict[str, object]]:
    """Return the actions of a commit that adds a file, and perhaps removes one or changes what the table is."""
    actions: list[dict[str, object]] = [{"commitInfo": {"timestamp": number}}]
    if random.random() < 0.5:
        actions.append({"txn": {"appId": "cdcpipe", "version": number}})
    if random.random() < 0.2:
        actions.append({"metaData": {"configuration": {"number": str(number)}}})
    if files and random.random() < 0.5:
        actions.append({"remove": {"path": files.pop(random.randrange(len(files)))}})
    files.append(f"file-{number}")
    return [*actions, added(files[-1], number)]


def write_checkpoint(log: Path, version: int) -> None:
    """Write a checkpoint of a version, and remove all that is before it, as the clean-up of a log does."""
    known = TableLog(log.parent).refresh()
    actions = [{"metaData": known.metadata}, *({"add": file} for file in known.files)]
    if known.lsn is not None:
        actions.append({"txn": {"appId": "cdcpipe", "version": known.lsn}})
    name = f"{version:020d}.checkpoint.{uuid4()}.json"
    (log / name).write_text("".join(json.dumps(action) + "\n" for action in actions))
    (log / "_last_checkpoint").write_text(json.dumps({"version": version, "size": len(actions)}))
    for other in log.iterdir():
        if other.name[:20].isdecimal() and int(other.name[:20]) < version:
            other.unlink()


@pytest.mark.parametrize("seed", range(20))
def test_a_continued_log_is_what_a_new_reader_reads(tmp_path: Path, seed: int) -> None:
    random, table = Random(seed), tmp_path / "table"
    log, known = table / "_delta_log", TableLog(table)
    files = list[str]()
    for version in range(60):
        if random.random() < 0.05:
            # Another table in its place, with as many commits.
            shutil.rmtree(table, ignore_errors=True)
            files.clear()
            for earlier in range(version):
                commit(log, earlier, *random_actions(random, files, 1000 * version + earlier))
        commit(log, version, *random_actions(random, files, version))
        if random.random() < 0.1:
            write_checkpoint(log, version)
        if random.random() < 0.5:
            before = known.files
            seen = sorted(map(str, before))
            assert state_of(known.refresh()) == state_of(TableLog(table).refresh()), version
            assert sorted(map(str, before)) == seen  # the files that somebody got earlier stay what they were
    shutil.rmtree(table)
    assert state_of(known.refresh()) == state_of(TableLog(table))


def test_a_cached_log_reads_only_new_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, logs, read = tmp_path / "_delta_log", LogCache(), list[str]()
    read_lines = places.read_lines
    monkeypatch.setattr(places, "read_lines", lambda path: read.append(path.name) or read_lines(path))
    for version in range(5):
        commit(log, version, added(f"file-{version}", 1))

    def newest() -> int:
        read.clear()
        with logs.newest(tmp_path) as known:
            return len(known.files)

    assert newest() == len(read) == 5
    commit(log, 5, added("file-5", 1))
    assert newest() == 6
    assert read == [f"{4:020d}.json", f"{5:020d}.json"]


def test_a_log_is_read_though_a_list_lacks_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """POSIX leaves open whether readdir returns a file that is created meanwhile, so a list may have only the second of two."""
    log, missing = tmp_path / "_delta_log", f"{1:020d}.json"
    for version in range(3):
        commit(log, version, added(f"file-{version}", 1))
    list_names = places.list_names
    monkeypatch.setattr(places, "list_names", lambda path: [name for name in list_names(path) if name != missing])
    found = TableLog(tmp_path).refresh()
    assert (found.version, len(found.files)) == (2, 3)
    (log / missing).unlink()
    with pytest.raises(ValueError, match=rf"lacks a commit .*/{missing}"):
        TableLog(tmp_path).refresh()


def test_a_cached_log_is_read_whole_after_an_error(tmp_path: Path) -> None:
    logs = LogCache()
    commit(tmp_path / "_delta_log", 0, added("file", 1))
    with logs.newest(tmp_path) as first:
        pass
    with pytest.raises(LookupError), logs.newest(tmp_path):
        raise LookupError
    with logs.newest(tmp_path) as anew:
        assert anew is not first
        assert state_of(anew) == state_of(first)


def test_a_cached_log_belongs_to_one_reader(tmp_path: Path) -> None:
    logs = LogCache()
    commit(tmp_path / "_delta_log", 0, added("file", 1))
    with logs.newest(tmp_path) as first, logs.newest(tmp_path) as second:
        assert first is not second


def test_a_cache_forgets_the_logs_that_were_not_read_for_the_longest_time(tmp_path: Path) -> None:
    logs = LogCache(most_files=4)
    for name, count in (("a", 2), ("b", 2), ("c", 2), ("large", 5)):
        commit(tmp_path / name / "_delta_log", 0, *(added(f"file-{number}", 1) for number in range(count)))

    def read(name: str) -> TableLog:
        with logs.newest(tmp_path / name) as log:
            return log

    first = {name: read(name) for name in "ab"}
    assert read("a") is first["a"]
    read("large")  # too large to be kept: the others stay
    assert read("b") is first["b"]
    read("c")
    assert read("b") is first["b"]
    assert read("a") is not first["a"]


REMOVED = {"path": "removed", "deletionTimestamp": 1, "dataChange": False}


def write_parquet_checkpoint(log: Path, actions: list[dict[str, object]], hint: dict[str, int], version: int = 0) -> None:
    kinds = sorted({kind for action in actions for kind in action})
    rows = [{kind: action.get(kind) for kind in kinds} for action in actions]
    pq.write_table(pa.Table.from_pylist(rows), log / f"{version:020d}.checkpoint.parquet")
    (log / "_last_checkpoint").write_text(json.dumps({"version": version, "size": len(actions), **hint}))


def test_what_a_checkpoint_tells_of_removed_files_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a day with a commit a second there are 86,400 of them."""
    log = tmp_path / "_delta_log"
    commit(log, 0, added("file", 7))
    found = [added("file", 7), {"metaData": {"id": "x"}}, *({"remove": REMOVED} for _ in range(2000))]
    write_parquet_checkpoint(log, found, {"numOfAddFiles": 1})
    said, tell = list[object](), checkpoints._said
    monkeypatch.setattr(checkpoints, "_said", lambda body: said.append(body) or tell(body))
    known = TableLog(tmp_path).refresh()
    assert ([file["path"] for file in known.files], known.metadata) == (["file"], {"id": "x"})
    assert len(said) == 2
    assert delta_log.is_small(tmp_path)  # for Delta, too, the table itself is small
    write_parquet_checkpoint(log, found, {})
    assert not delta_log.is_small(tmp_path)  # an older checkpoint does not tell how many of the actions are files


def test_a_checkpoint_has_all_properties_of_a_table(tmp_path: Path) -> None:
    """Only copies of other fields are left out: fields of a file whose names end in _parsed. A property may end so, too."""
    log, properties = tmp_path / "_delta_log", {"team.is_parsed": "true", "a": "b"}
    file = added("file", 7)
    commit(log, 0, file)
    parsed = {"add": {**file["add"], "stats_parsed": {"numRecords": 7}, "partitionValues_parsed": {"a": 1}}}
    write_parquet_checkpoint(log, [parsed, {"metaData": {"id": "x", "name": None, "configuration": properties}}], {})
    known = TableLog(tmp_path).refresh()
    assert known.metadata == {"id": "x", "configuration": properties}
    assert [{name for name in each if name.endswith("_parsed")} for each in known.files] == [set()]


@pytest.mark.parametrize(("actions", "enough"), [(2, 200), (40_000, 200), (60_000, 300), (1_000_000, 1000)])
def test_a_large_checkpoint_is_written_after_more_commits(tmp_path: Path, actions: int, enough: int) -> None:
    log = tmp_path / "_delta_log"
    commit(log, 0, added("file", 7))
    write_parquet_checkpoint(log, [added("file", 7)], {"size": actions})
    for version in range(1, enough):
        commit(log, version)
    assert not delta_log.is_long(tmp_path)
    commit(log, enough)
    assert delta_log.is_long(tmp_path)


def test_a_log_is_not_shortened_early_where_new_files_look_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "_delta_log"
    for number in range(2):
        commit(log, number, added(str(number), 7))
    write_parquet_checkpoint(log, [{"metaData": {"id": "x"}}], {}, version=1)
    true_time, ahead_s = time.time, 7200.0
    monkeypatch.setattr(time, "time", lambda: true_time() + ahead_s)
    assert delta_log.shorten(tmp_path, 3600.0) == 0
    ahead_s = 0.0
    os.utime(log / f"{1:020d}.checkpoint.parquet", (0, 0))
    assert delta_log.shorten(tmp_path, 3600.0) == 1


def test_a_log_that_drop_feature_protects_is_not_shortened(tmp_path: Path) -> None:
    log = tmp_path / "_delta_log"
    protocol = {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": [], "writerFeatures": ["checkpointProtection"]}
    for number in range(2):
        commit(log, number, added(str(number), 7))
    commit(log, 2, {"protocol": protocol})
    write_parquet_checkpoint(log, [{"metaData": {"id": "x"}}], {}, version=1)
    os.utime(log / f"{1:020d}.checkpoint.parquet", (0, 0))
    assert delta_log.shorten(tmp_path, 3600.0) == 0


def test_a_log_does_without_the_commit_of_restore_once_a_property_says_the_same(tmp_path: Path) -> None:
    """A history that was set back stays so. Its log was never shortened again."""
    log, properties = tmp_path / "_delta_log", {"cdcpipe.restored": "true"}
    commit(log, 0, {"commitInfo": {"operation": "MERGE", "engineInfo": "cdcpipe"}}, {"metaData": {"id": "x"}})
    commit(log, 1, {"commitInfo": {"operation": "RESTORE"}})
    metadata = {"metaData": {"id": "x", "configuration": properties}}
    commit(log, 2, {"commitInfo": {"operation": "SET TBLPROPERTIES"}}, metadata)
    write_parquet_checkpoint(log, [metadata], {}, version=2)
    os.utime(log / f"{2:020d}.checkpoint.parquet", (0, 0))
    assert delta_log.shorten(tmp_path, 3600.0) == 2
    assert TableLog(tmp_path).refresh().metadata["configuration"] == properties


def test_a_log_keeps_the_commit_that_says_that_the_table_was_set_back(tmp_path: Path) -> None:
    """A checkpoint has the position, but no operations. So the table would count as complete."""
    log, place = tmp_path / "_delta_log", {"txn": {"appId": "cdcpipe", "version": 100}}
    commit(log, 0, {"commitInfo": {"operation": "MERGE", "engineInfo": "cdcpipe"}}, {"metaData": {"id": "x"}}, place)
    commit(log, 1, {"commitInfo": {"operation": "RESTORE"}})
    commit(log, 2, {"commitInfo": {"operation": "OPTIMIZE"}})
    write_parquet_checkpoint(log, [{"metaData": {"id": "x"}}, place], {}, version=2)
    os.utime(log / f"{2:020d}.checkpoint.parquet", (0, 0))
    assert delta_log.shorten(tmp_path, 3600.0) == 0
    assert delta_log.table_end(tmp_path) == (100, True)
    commit(log, 3, {"commitInfo": {"operation": "MERGE", "engineInfo": "cdcpipe"}}, place)
    assert delta_log.shorten(tmp_path, 3600.0) == 2
    assert delta_log.table_end(tmp_path) == (100, False)


def test_a_log_keeps_the_commits_that_say_that_a_restore_was_undone(tmp_path: Path) -> None:
    """With only the last RESTORE, the table would count as set back again, and the version to set it to would be gone."""
    log, place = tmp_path / "_delta_log", {"txn": {"appId": "cdcpipe", "version": 100}}
    for number in range(2):
        commit(log, number, {"commitInfo": {"operation": "WRITE", "engineInfo": "cdcpipe"}}, {"metaData": {"id": "x"}}, place)
    for number, version in (2, 0), (3, 1):
        commit(log, number, {"commitInfo": {"operation": "RESTORE", "operationParameters": {"version": version}}})
    write_parquet_checkpoint(log, [{"metaData": {"id": "x"}}, place], {}, version=3)
    os.utime(log / f"{3:020d}.checkpoint.parquet", (0, 0))
    assert delta_log.table_end(tmp_path) == (100, False)
    assert delta_log.shorten(tmp_path, 3600.0) == 0
    assert delta_log.table_end(tmp_path) == (100, False)
    commit(log, 4, {"commitInfo": {"operation": "WRITE", "engineInfo": "cdcpipe"}}, place)
    assert delta_log.shorten(tmp_path, 3600.0) == 3
    assert delta_log.table_end(tmp_path) == (100, False)


@pytest.mark.parametrize(
    ("restores", "is_restored"),
    [
        ([0], True),
        ([0, 2], False),  # to the version before the first RESTORE
        ([0, 1], False),  # what another program has committed since is not ours
        ([0, 0], True),
        ([0, 2, 0], True),
        ([0, 2, 3], True),
        ([0, 3], True),
        ([0, None], True),
    ],
)
def test_a_restore_can_undo_another_one(tmp_path: Path, restores: list[int | None], *, is_restored: bool) -> None:
    log = tmp_path / "_delta_log"
    for number in range(2):
        commit(log, number, {"commitInfo": {"operation": "MERGE"}}, {"txn": {"appId": "cdcpipe", "version": 100 + number}})
    commit(log, 2, {"commitInfo": {"operation": "OPTIMIZE"}})
    for number, version in enumerate(restores, 3):
        commit(
            log, number, {"commitInfo": {"operation": "RESTORE", "operationParameters": {"version": version, "timestamp": None}}}
        )
    assert delta_log.table_end(tmp_path) == (101, is_restored)

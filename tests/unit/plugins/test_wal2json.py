"""Options of the output plugin wal2json."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from cdcpipe.errors import InvalidArgumentsError
from cdcpipe.pgoutput.messages import UNCHANGED_TOAST, Delete, LogicalMessage, Truncate, Update
from cdcpipe.plugins import load
from cdcpipe.plugins.catalog import NoCatalogError
from cdcpipe.plugins.renderer import Renderer
from cdcpipe.plugins.wal2json.version1 import Wal2Json1
from support.captures import BEGIN, COMMIT, relation, row
from support.pgoutput_build import build
from support.recorder import nothing


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"include-xid": "1"}, "no option 'include-xid'"),
        ({"include_xids": "1"}, "no option 'include_xids'"),
        ({"needs_column_facts": "1"}, "no option"),
        ({"include-unchanged-toast": "1"}, "was removed from it"),
        ({"partition-root": "1"}, "can't be honoured"),
        ({"include-xids": "maybe"}, "could not parse value 'maybe'"),
        ({"include-xids": ""}, "could not parse value ''"),
        ({"include-xids": "o"}, "could not parse value 'o'"),
        ({"format-version": "3"}, "could not parse value '3'"),
        ({"format-version": "0"}, "could not parse value '0'"),
        ({"format-version": "two"}, "could not parse value 'two'"),
        ({"actions": "insert,merge"}, "could not parse value 'merge'"),
        ({"actions": "insert,,delete"}, "could not parse"),
        ({"actions": "insert delete"}, "could not parse"),
        ({"filter-tables": "t"}, "could not parse value 't'"),
        ({"add-tables": "public.t,"}, "could not parse"),
        ({"add-tables": ",public.t"}, "could not parse"),
    ],
)
def test_options_that_are_refused(options, message):
    with pytest.raises(InvalidArgumentsError, match=message):
        load("wal2json", options, nothing)


@pytest.mark.parametrize("text", ["1", "on", "ON", "t", "tr", "true", "y", "yes", None])
def test_options_that_say_yes(text):
    plugin = load("wal2json", {"include-xids": text, "include-lsn": "of"}, nothing)
    assert isinstance(plugin, Wal2Json1)
    assert plugin._settings.include_xids
    assert not plugin._settings.include_lsn


def test_the_format_version_is_1_unless_asked_for():
    assert type(load("wal2json", {}, nothing)).__name__ == "Wal2Json1"
    assert type(load("wal2json", {"format-version": None}, nothing)).__name__ == "Wal2Json2"


@pytest.mark.parametrize(
    "last",
    [
        row(2),
        Update(None, 16385, None, None, (b"1", UNCHANGED_TOAST)),  # not by a compiled function
        Truncate(None, 0, (16385,)),
        LogicalMessage(None, 1, 0x300, "p", b"x"),
    ],
    ids=lambda last: type(last).__name__,
)
def test_the_last_record_of_a_transaction_has_its_end(last):
    """Without records for the commit, feedback on the last record is what confirms the transaction."""
    written = []
    plugin = load("wal2json", {"format-version": "2", "include-transaction": "0"}, nothing)
    renderer = Renderer(plugin, lambda lsn, record: written.append((lsn, record)))
    for wal_start, message in ((0x100, BEGIN), (0, relation()), (0x200, row(1)), (0x300, last), (0x930, COMMIT)):
        renderer.feed(wal_start, build(message))
    assert [lsn for lsn, _ in written] == [0x200, 0x930]
    # A transaction without a commit has no end: its records have their own positions.
    for wal_start, message in ((0x1000, BEGIN), (0x1100, row(1))):
        renderer.feed(wal_start, build(message))
    renderer.close()
    assert [lsn for lsn, _ in written] == [0x200, 0x930, 0x1100]


def identities(version, table, *changes, query=nothing):
    """Return for each change the columns and values that identify its old row."""
    written = []
    renderer = Renderer(load("wal2json", {"format-version": version}, query), lambda lsn, record: written.append(record))
    # Twice: the first row compiles the function that renders the second one.
    for message in (BEGIN, table, *changes, *changes, COMMIT):
        renderer.feed(0x930, build(message))
    renderer.close()
    if version == "1":
        keys = [change["oldkeys"] for change in json.loads(written[0])["change"]]
        found = [dict(zip(key["keynames"], key["keyvalues"], strict=True)) for key in keys]
    else:
        found = [{each["name"]: each["value"] for each in json.loads(record)["identity"]} for record in written[1:-1]]
    assert found[: len(changes)] == found[len(changes) :]
    return found[: len(changes)]


@pytest.mark.parametrize("flags", [(1, 0), (0, 0), (0, 1)])
@pytest.mark.parametrize("version", ["1", "2"])
def test_an_old_key_has_what_the_server_sent(version, flags):
    """With publish_via_partition_root the flags are the root's, and the old key is the partition's."""
    columns = tuple(replace(column, flags=flag) for column, flag in zip(relation().columns, flags, strict=True))
    keys = (b"1", b"x"), (b"1", None), (None, b"x")
    changes = [Update(None, 16385, key, None, (b"1", new)) for key in keys for new in (b"y", UNCHANGED_TOAST, None)]
    changes += [Delete(None, 16385, key, None) for key in keys]
    whole, id_, v = {"id": 1, "v": "x"}, {"id": 1}, {"v": "x"}
    updated = [whole] * 3 + [id_] * 3 + [v] * 3
    assert identities(version, replace(relation(), columns=columns), *changes) == [*updated, whole, id_, v]


@pytest.mark.parametrize("identity", ["d", "f"])
@pytest.mark.parametrize("version", ["1", "2"])
def test_an_update_without_an_old_row_has_the_key_of_the_partitions(version, identity, caplog):
    """A root without a key, or with REPLICA IDENTITY FULL, does not tell the key of its partitions."""
    columns = tuple(replace(column, flags=int(identity == "f")) for column in relation().columns)
    root = replace(relation(), replica_identity=identity, columns=columns)
    asked = []

    def query(sql):
        asked.append(sql)
        return [(None,), ('["id", "v"]',), ('["unpublished", "id"]',)]

    def no_catalog(sql):
        raise NoCatalogError

    updates = [Update(None, 16385, None, None, (b"1", new)) for new in (b"y", UNCHANGED_TOAST, None)]
    assert identities(version, root, *updates, query=query) == [{"id": 1}] * 3
    assert len(asked) == 1
    assert not caplog.messages
    assert identities(version, root, *updates, query=lambda sql: [('["id"]',), ('["v"]',)]) == [{}] * 3
    with pytest.raises(NoCatalogError, match=r'the key of the partitions of "public"\."t"'):
        identities(version, root, *updates, query=no_catalog)
    (said,) = caplog.messages
    assert said.startswith('"public"."t": its partitions have no key in common')

"""Options of the output plugin wal2json."""

from __future__ import annotations

import json

import pytest

from cdcpipe.errors import InvalidArgumentsError
from cdcpipe.pgoutput.messages import UNCHANGED_TOAST, LogicalMessage, Truncate, Update
from cdcpipe.plugins import load
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


@pytest.mark.parametrize("version", ["1", "2"])
def test_an_old_key_has_the_columns_of_the_identity(version):
    """With publish_via_partition_root and a partition that has REPLICA IDENTITY FULL, the old key is a whole row."""
    written = []
    renderer = Renderer(load("wal2json", {"format-version": version}, nothing), lambda lsn, record: written.append(record))
    updates = [Update(None, 16385, (b"1", old), None, (b"1", new)) for old in (b"x", None) for new in (b"y", UNCHANGED_TOAST, None)]
    for message in (BEGIN, relation(), *updates, COMMIT):
        renderer.feed(0x930, build(message))
    if version == "1":
        found = [change["oldkeys"] for change in json.loads(written[0])["change"]]
        assert found == [{"keynames": ["id"], "keytypes": ["integer"], "keyvalues": [1]}] * len(updates)
    else:
        identities = [json.loads(record)["identity"] for record in written[1:-1]]
        assert identities == [[{"name": "id", "type": "integer", "value": 1}]] * len(updates)

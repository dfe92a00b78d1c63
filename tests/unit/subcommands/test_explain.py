"""A capture explained: each field of each message with its name."""

import contextlib
import re
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recording import DATA

from cdcpipe.errors import ProtocolError
from cdcpipe.pgoutput.decode import NAMES, decode
from cdcpipe.pgoutput.messages import (
    UNCHANGED_TOAST,
    Begin,
    Binary,
    Column,
    Commit,
    Insert,
    LogicalMessage,
    Message,
    Relation,
    StreamAbort,
    StreamStart,
    StreamStop,
    Truncate,
    Type,
    Update,
)
from cdcpipe.subcommands.decode import Captures
from cdcpipe.subcommands.explain import Explainer
from support import pgoutput_build
from support.captures import BEGIN, capture, explained, row
from support.pgoutput_build import build
from support.pgoutput_stream import record

# ruff: noqa: ISC004 - a text of several lines beside its message
EXPLAINED = [
    (
        Begin(0x10000ABCD, 848_659_320_123_400, 7),
        "Begin (B)\n    final_lsn: 1/ABCD\n    commit_time: 2026-11-22 10:42:00.1234+00\n    xid: 7\n",
    ),
    (
        Type(None, 20001, "public", "mood"),
        "Type (Y)\n    type_id: 20001\n    namespace: 'public'\n    name: 'mood'\n",
    ),
    (
        Relation(
            None,
            16385,
            "Odd schema",
            "t",
            "i",
            (Column(1, "id", 1700, 655366), Column(0, "Ta b\nle", 20001, -1), Column(0, "u", 5, -1)),
        ),
        "Relation (R)\n    relation_id: 16385\n    namespace: 'Odd schema'\n    name: 't'\n"
        "    replica_identity: i (index)\n"
        "    columns: 3\n        id: type_id 1700 (numeric(10,2)), type_modifier 655366, flags 1, key\n"
        '        "Ta b\\nle": type_id 20001 (public.mood), type_modifier -1, flags 0\n'
        "        u: type_id 5, type_modifier -1, flags 0\n",
    ),
    (
        Update(None, 16385, (b"1", None, None), None, (Binary(b"\0\xff"), b"a'b\\\x1b[31m\xe9\n\xc3\xa9", UNCHANGED_TOAST)),
        "Update (U)\n    relation_id: 16385 (\"Odd schema\".t)\n    key: 3 columns\n        id: '1'\n"
        '        "Ta b\\nle": not sent, it is not part of the key\n'
        "        u: not sent, it is not part of the key\n    new: 3 columns\n"
        "        id: x'00ff'\n        \"Ta b\\nle\": 'a\\'b\\\\\\x1b[31m\\xe9\\né'\n        u: UNCHANGED_TOAST\n",
    ),
    (
        Insert(None, 5, (b"", None)),
        "Insert (I)\n    relation_id: 5 (not described before)\n    new: 2 columns\n        column 1: ''\n        column 2: NULL\n",
    ),
    (
        Insert(None, 16385, (b"x",)),
        "Insert (I)\n    relation_id: 16385 (\"Odd schema\".t)\n    new: 1 columns\n        column 1: 'x'\n",
    ),
    (
        Truncate(None, 3, (16385, 5)),
        'Truncate (T)\n    flags: 3 (cascade, restart identity)\n    relation_ids: 2\n        16385 ("Odd schema".t)\n'
        "        5 (not described before)\n",
    ),
    (
        LogicalMessage(None, 1, 255, "a\u202eb", b"\0\xff"),
        "Message (M)\n    flags: 1 (transactional)\n    lsn: 0/FF\n    prefix: 'a\\u202eb'\n    content: x'00ff'\n",
    ),
    (
        LogicalMessage(None, 0, 255, "\U000e0001\x85", b"text\0"),
        "Message (M)\n    flags: 0 (not transactional)\n    lsn: 0/FF\n    prefix: '\\U000e0001\\u0085'\n"
        "    content: 'text\\x00'\n",
    ),
    (
        Commit(0, 1, 2, 1 << 62),
        "Commit (C)\n    flags: 0\n    commit_lsn: 0/1\n    end_lsn: 0/2\n"
        "    commit_time: 4611686018427387904 microseconds since 2000\n",
    ),
    (StreamStart(7, True), "Stream Start (S)\n    xid: 7\n    first_segment: yes\n"),
    (Insert(8, 5, ()), "Insert (I)\n    xid: 8\n    relation_id: 5 (not described before)\n    new: 0 columns\n"),
    (StreamStop(), "Stream Stop (E)\n"),
    (StreamAbort(7, 8, None, None), "Stream Abort (A)\n    xid: 7\n    subxid: 8\n"),
    (
        StreamAbort(7, 8, 9, 0),
        "Stream Abort (A)\n    xid: 7\n    subxid: 8\n    abort_lsn: 0/9\n    abort_time: 2000-01-01 00:00:00+00\n",
    ),
]


def test_each_field_by_its_name(tmp_path: Path) -> None:
    data = b"".join(record(build(message), 0x2_0000_00AB) for message, _ in EXPLAINED)
    text, error = explained(tmp_path, data)
    assert error is None
    pos = 0
    expected = ""
    for message, lines in EXPLAINED:
        expected += f"byte {pos}, LSN 2/AB: " + lines.replace("\n", f", {len(build(message))} bytes\n", 1)
        pos += len(record(build(message), 0x2_0000_00AB))
    assert text == expected


@pytest.mark.parametrize("path", sorted(DATA.glob("pg*/*.cdc")), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_recorded_message_is_explained(path: Path, tmp_path: Path) -> None:
    text, error = explained(tmp_path, path.read_bytes())
    assert error is None
    blocks = re.split(r"^(?=byte )", text, flags=re.MULTILINE)[1:]
    records = list(Captures([str(path)], lambda: None))
    assert len(blocks) == len(records)
    in_stream = False
    for block, (lsn, data) in zip(blocks, records, strict=True):
        message = decode(data, in_stream=in_stream, streaming_parallel=None)
        if isinstance(message, StreamStart | StreamStop):
            in_stream = isinstance(message, StreamStart)
        head, *lines = block.splitlines()
        assert re.fullmatch(
            rf"byte \d+, LSN {lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}: {NAMES[chr(data[0])]} \(.\), {len(data)} bytes", head
        )
        assert "not described before" not in block
        names = {line.strip().partition(":")[0] for line in lines if line[4] != " "}
        assert names == {field.name.removesuffix("_us") for field in fields(message) if getattr(message, field.name) is not None}
        assert all(line.isprintable() for line in lines)


@given(st.lists(pgoutput_build.changes(st.none()) | pgoutput_build.controls, max_size=4))
def test_whatever_a_message_holds_a_terminal_can_show_it(messages: list[Message]) -> None:
    explainer = Explainer()
    for message in messages:
        with contextlib.suppress(ProtocolError):  # after a Stream Start, one without its xid is none
            text = explainer.explain(0, 0, build(message))
            assert text.endswith("\n")
            assert all(line.isprintable() for line in text[:-1].split("\n"))


def test_explaining_goes_on_up_to_the_damage(tmp_path: Path) -> None:
    text, error = explained(tmp_path, capture(BEGIN, row(1), b"X"))
    assert text.count("bytes\n") == 2
    assert isinstance(error, ProtocolError)
    assert re.search(r"explained\.cdc, byte 63 \(kind 0x58, LSN 0/300\): .* no message has kind 0x58", error.message)

"""Binary values for an output plugin, which sees text only."""

from __future__ import annotations

import pytest

from cdcpipe.errors import CdcpipeError, InvalidArgumentsError, ProtocolError
from cdcpipe.pgoutput.binary import row_to_text
from cdcpipe.pgoutput.messages import Begin, Binary, Column, Insert, Relation, Type, Update
from cdcpipe.plugins.base import OutputPlugin
from cdcpipe.plugins.catalog import NoCatalogError
from cdcpipe.plugins.renderer import Renderer
from cdcpipe.types.binary.decoder import UnknownTypeError, ValueDecoder
from cdcpipe.types.shape import Kind, Shape
from support import pgoutput_build


def test_what_find_says_is_kept_until_forgotten():
    asked = []

    def find(type_id):
        asked.append(type_id)
        return {1: Shape(Kind.ENUM), 2: Shape(Kind.DOMAIN, 23), 3: lambda data: data[::-1]}.get(type_id)

    types = ValueDecoder(find)
    for _ in range(2):
        assert types.to_text(1, b"ok") == b"ok"
        assert types.to_text(2, b"\0\0\0\7") == b"7"
        assert types.to_text(3, b"abc") == b"cba"
    assert asked == [1, 2, 3]
    types.forget()
    assert types.to_text(1, b"ok") == b"ok"
    with pytest.raises(UnknownTypeError):
        types.to_text(4, b"")
    assert asked == [1, 2, 3, 1, 4]


class Shown(OutputPlugin):
    """Writes rows in Python's notation."""

    name = "shown"

    def change(self, txn, relation, change, lsn):
        self.output.write(lsn, repr((getattr(change, "old", None), change.new)).encode())


def render(query, *messages):
    records = []
    renderer = Renderer(Shown({}, query), lambda lsn, data: records.append(data.decode()))
    for message in messages:
        renderer.feed(1, pgoutput_build.build(message))
    return records


BEGIN = Begin(100, 5, 7)


def table(*type_ids: int) -> Relation:
    return Relation(None, 16385, "public", "t", "f", tuple(Column(1, f"c{n}", type_id, -1) for n, type_id in enumerate(type_ids)))


def offline(sql):
    raise NoCatalogError


def test_plugins_see_text_only():
    row = (Binary(b"\0\0\0\7"), b"text", None)
    assert render(offline, BEGIN, table(23, 25, 23), Insert(None, 16385, row)) == ["(None, (b'7', b'text', None))"]
    assert render(offline, BEGIN, table(23, 25, 23), Update(None, 16385, None, row, row)) == [
        "((b'7', b'text', None), (b'7', b'text', None))"
    ]


def test_a_text_is_no_longer_binary():
    """Otherwise it would be equal to no text."""
    (value,) = row_to_text(table(25), (Binary(b"x"),))
    assert type(value) is bytes
    assert value == b"x"


def test_errors_name_table_column_and_what_to_do():
    with pytest.raises(
        ProtocolError, match=r"column 'c1' of table 'public\.t' came in binary form: .* 3 bytes are too few or too many"
    ):
        render(offline, BEGIN, table(25, 23), Insert(None, 16385, (b"x", Binary(b"123"))))
    with pytest.raises(UnknownTypeError, match=r"column 'c0' of table 'public\.t' .* OID 16400 is not built in") as caught:
        render(lambda sql: [], BEGIN, table(16400), Insert(None, 16385, (Binary(b"123"),)))
    assert "'binary'" in str(caught.value.hint)
    with pytest.raises(InvalidArgumentsError, match=r"column 'c0' of table 'public\.t' .*there is no server to ask"):
        render(offline, BEGIN, table(16400), Insert(None, 16385, (Binary(b"123"),)))


def test_without_a_server_a_domain_is_known_by_what_the_stream_says():
    change = Insert(None, 16385, (Binary(b"\0\0\0\7"),))
    assert render(offline, Type(None, 16400, "pg_catalog", "int4"), BEGIN, table(16400), change) == ["(None, (b'7',))"]


def test_a_type_that_is_described_again_is_asked_for_again():
    rows = iter([[("e", None, None, None, None, None, None)], [("d", None, "23", None, None, None, None)]])
    type_, change = Type(None, 16400, "public", "x"), Insert(None, 16385, (Binary(b"\0\0\0\7"),))
    shown = render(lambda sql: next(rows), type_, BEGIN, table(16400), change, change, type_, change)
    assert shown == ["(None, (b'\\x00\\x00\\x00\\x07',))"] * 2 + ["(None, (b'7',))"]


def test_row_to_text():
    relation = table(20, 25)
    assert row_to_text(relation, (Binary(b"\0" * 8), b"x")) == (b"0", b"x")
    with pytest.raises(CdcpipeError, match=r"column 'c0' of table 'public\.t'"):
        row_to_text(relation, (Binary(b""), b"x"))

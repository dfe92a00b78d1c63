"""Values in binary form that no server would send give a text or an error."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdcpipe.errors import ProtocolError
from cdcpipe.types.binary import reading
from cdcpipe.types.binary.decoder import UnknownTypeError, to_text
from cdcpipe.types.table import TYPES
from support.binary_values import is_built_in


def test_types_whose_bytes_need_a_catalog():
    for type_id, word in ((790, "lc_monetary"), (2205, "regclass"), (24, "regproc"), (791, "lc_monetary"), (1034, "aclitem")):
        with pytest.raises(UnknownTypeError, match=word):
            to_text(type_id, b"\0" * 8)
        assert not is_built_in(type_id)
    with pytest.raises(UnknownTypeError, match="OID 16400 is not built in"):
        to_text(16400, b"")


KNOWN = sorted(type_id for type_id in TYPES if is_built_in(type_id))


@settings(max_examples=1000)
@given(
    st.sampled_from(KNOWN),
    st.binary(max_size=80) | st.lists(st.sampled_from(b"\0\0\0\0\1\2\3\4\x17\x19\xff"), max_size=60).map(bytes),
)
def test_any_bytes_give_text_or_an_error(type_id, data):
    try:
        text = to_text(type_id, data)
    except (ProtocolError, UnknownTypeError):
        return
    assert isinstance(text, bytes)


def record(type_id: int, value: bytes) -> bytes:
    return struct.pack(">iIi", 1, type_id, len(value)) + value


def test_records_within_records_end_somewhere():
    """Each level doubles the quotes inside it. So a few hundred bytes could fill the memory."""
    value = record(25, b"x")
    for _ in range(15):
        value = record(2249, value)
    assert len(to_text(2249, value)) < 1 << 20
    for _ in range(5000):
        value = record(2249, value)
    with pytest.raises(ProtocolError, match="nest more than 16 deep"):
        to_text(2249, value)
    assert to_text(2249, record(25, b"x")) == b"(x)"  # what was nested is forgotten


@pytest.mark.parametrize("is_left_deep", [True, False])
def test_a_long_chain_of_operators_is_quick(is_left_deep):
    """No recursion, and no copy of the text for each operator."""
    count = 100_000
    operand, operator = b"\1\0\0a\0", b"\2\2"
    items = operator * count + operand * (count + 1) if is_left_deep else (operator + operand) * count + operand
    data = struct.pack(">i", 2 * count + 1) + items
    if not is_left_deep:
        # Right operand first: operator, operand, and the chain as the left one.
        assert to_text(3615, data) == b" & ".join([b"'a'"] * (count + 1))
    else:
        assert to_text(3615, data) == b" & ".join([b"'a'"] * (count + 1))


def test_texts_end_where_the_servers_would(monkeypatch):
    monkeypatch.setattr(reading, "MAX_TEXT_BYTES", 100_000)
    large = struct.pack(">HhHHH", 1, 10_000, 0, 0, 1)  # 1e40000
    elements = (struct.pack(">i", len(large)) + large) * 3
    data = struct.pack(">iiIii", 1, 0, 1700, 3, 1) + elements
    with pytest.raises(ProtocolError, match="more than 100000 bytes"):
        to_text(1231, data)


@pytest.mark.parametrize(
    ("type_id", "data"),
    [
        (16, b"\2"), (16, b""), (21, b"\0"), (23, b"\0" * 5), (1082, struct.pack(">i", 2**31 - 2)), (1082, struct.pack(">i",
        -(2**31) + 1)),
        (1083, struct.pack(">q", -1)), (1083, struct.pack(">q", 86_400_000_001)), (1114, struct.pack(">q", 2**63 - 2)),
        (1266, struct.pack(">qi", 0, 57_600)), (1560, struct.pack(">i", 9) + b"\0"), (1560, struct.pack(">i", -1)),
        (1700, struct.pack(">HhHHH", 1, 0, 0, 0, 10_000)), (1700, struct.pack(">HhHH", 0, 0, 0x8000, 0)),
        (1700, struct.pack(">HhHH", 0, 0, 0, 0x4000)), (1700, struct.pack(">HhHH", 2, 0, 0, 0)), (869, b"\4\x20\0\4abcd"), (869,
        b"\2\x21\0\4abcd"),
        (2950, b"\0" * 15), (3802, b"\2{}"), (3802, b""), (3904, b"\x20"), (3904, b"\x00" + struct.pack(">i", -1)), (3904, b"\1x"),
        (1007, struct.pack(">iiI", 7, 0, 23)), (1007, struct.pack(">iiI", 0, 0, 25)), (1007, struct.pack(">iiIii", 1, 0, 23,
        2**31 - 1, 1)),
        (1007, struct.pack(">iiIii", 1, 0, 23, -1, 1)), (1007, struct.pack(">iiIiii", 1, 0, 23, 1, 2**31 - 1, -1)),
        (22, struct.pack(">iiIiii", 1, 0, 21, 1, 0, -1)), (3615, struct.pack(">i", 1) + b"\2\1"), (3615, struct.pack(">i",
        1) + b"\3"),
        (3615, struct.pack(">i", 2) + b"\1\0\0a\0\1\0\0a\0"), (3614, struct.pack(">i", 1) + b"abc"), (3614, struct.pack(">i",
        1) + b"a\0\0\1"),
        (604, struct.pack(">i", -1)), (604, struct.pack(">i", 2**30)), (5038, struct.pack(">iqq", -1, 0, 0)), (829, b"\0" * 8),
        (2249, struct.pack(">i", -1)), (2249, struct.pack(">i", 2**30)), (4451, struct.pack(">i", 2**30)), (18, b"ab"),
    ],
)  # fmt: skip
def test_malformed_values(type_id, data):
    with pytest.raises(ProtocolError, match="malformed value in binary form"):
        to_text(type_id, data)

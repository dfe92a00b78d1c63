"""The scan of many headers at once finds the same boundaries as the loop over records."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cdcpipe.errors import ProtocolError
from cdcpipe.pipe.framing import encode_header, scan_records
from spark_sink.staging import scan as record_scan
from spark_sink.staging.scan import scan


@pytest.fixture(autouse=True, scope="module")
def few_bytes_are_many():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record_scan, "_LEAST_BYTES", 0)
        yield


def encode(records: list[tuple[int, bytes]]) -> bytes:
    return b"".join(encode_header(lsn, len(record)) + record for lsn, record in records)


RECORDS = st.lists(
    st.tuples(
        st.integers(0, (1 << 64) - 1),
        st.one_of(
            st.binary(max_size=40),
            st.lists(st.sampled_from([b"w 0/0 3\n", b"\n", b"7\n", b" 12\n", b"w ", b"0", b"x"]), max_size=8).map(b"".join),
        ),
    ),
    max_size=12,
)


@given(RECORDS, st.binary(max_size=10), st.integers(0, 300))
@example([(1, b"w 0/0 5\nforged 1\n"), (2, b"3\n3\n"), (3, b""), (4, b"\n")], b"", 0)
@example([(0, b"x" * 1234567)], b"", 0)
def test_what_the_loop_finds(records: list[tuple[int, bytes]], before: bytes, cut: int) -> None:
    data = before + encode(records)
    data = data[: max(len(data) - cut, len(before))]
    starts, ends, next_pos = scan(data, len(before))
    assert (starts.tolist(), ends.tolist(), next_pos) == scan_records(data, len(before))


@given(st.binary(max_size=80))
def test_any_bytes_are_records_or_a_protocol_error(data: bytes) -> None:
    try:
        expected = scan_records(data)
    except ProtocolError:
        return
    starts, ends, next_pos = scan(data)
    assert (starts.tolist(), ends.tolist(), next_pos) == expected


@pytest.mark.parametrize(
    "line",
    [b"x 0/0 1", b"w 0/0", b"w 0/0 -1", b"w 1", b"w  1", b"w 0/0 1 ", b"w 0/0 1x", b"W 0/0 1", b"w 0/0 99999999999", b"1", b""],
)
@pytest.mark.parametrize("count", [0, 1, 20])
def test_not_a_header(line: bytes, count: int) -> None:
    good = encode([(n, b"record %d\n" % n) for n in range(count)])
    for following in (good, b"x" * 40, b""):
        data = good + line + b"\n" + following
        with pytest.raises(ProtocolError, match="not a record header"):
            scan_records(data)
        with pytest.raises(ProtocolError, match="not a record header"):
            scan(data)


def test_a_header_that_is_not_whole_is_waited_for() -> None:
    data = encode([(n, b"abc") for n in range(1000)])
    starts, _, next_pos = scan(data + b"w 0/1")
    assert (len(starts), next_pos) == (1000, len(data))

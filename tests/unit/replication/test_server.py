"""Where the last record of the WAL ends."""

import pytest

from cdcpipe.lsn import LSN
from cdcpipe.replication.server import last_end

SEGMENT = 16 << 20


@pytest.mark.parametrize(
    ("insert_lsn", "expected"),
    [
        ("0/E23E018", "0/E23E000"),  # after the header of a page
        ("0/E23E020", "0/E23E020"),  # the last 8 bytes of a record are on this page
        ("0/E23E028", "0/E23E028"),
        ("0/E23E100", "0/E23E100"),
        ("0/F000028", "0/F000000"),  # after the header of a segment's first page
        ("0/F000030", "0/F000030"),
        ("0/F100018", "0/F100000"),  # a page within a segment
        ("0/F100028", "0/F100028"),
    ],
)
def test_the_end_of_the_last_record(insert_lsn: str, expected: str) -> None:
    assert last_end(LSN.parse(insert_lsn), 8192, SEGMENT) == LSN.parse(expected)


def test_other_sizes_of_segments_and_pages() -> None:
    assert last_end(LSN.parse("0/F100028"), 8192, 1 << 20) == LSN.parse("0/F100000")
    assert last_end(LSN.parse("0/F002018"), 16384, SEGMENT) == LSN.parse("0/F002018")

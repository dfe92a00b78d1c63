"""Times and positions as users write them."""

from datetime import UTC, datetime
from typing import Any

import pytest

from cdcpipe.lsn import LSN
from spark_sink.replica.as_of import parse_at
from spark_sink.staging.log import Position


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("0/171F388", LSN(0x171F388)),
        ("2:0/171F388", Position(2, 0x171F388)),
        ("2026-03-01", datetime(2026, 3, 1, tzinfo=UTC)),
        ("2026-03-01 12:30:00.5", datetime(2026, 3, 1, 12, 30, 0, 500000, tzinfo=UTC)),
        ("2026-03-01T12:30:00.000001+01:00", datetime(2026, 3, 1, 11, 30, 0, 1, tzinfo=UTC)),
    ],
)
def test_moments(text: str, at: Any) -> None:
    assert parse_at(text) == at
    assert type(parse_at(text)) is type(at)

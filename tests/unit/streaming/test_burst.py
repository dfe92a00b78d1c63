"""When records are left to gather in the socket."""

from types import SimpleNamespace
from typing import Any

from cdcpipe.streaming.burst import BULK_BYTES_PER_S, BULK_MEMORY_S, BULK_WAIT_S, LOW_WATER_BYTES, Burst


def socket(*, has_mark: bool, gathered: bool = False) -> Any:
    """Stand in for a walsender, which writes down what it is asked."""
    asked: list[object] = []

    def set_low_water_mark(size: int) -> bool:
        asked.append(size)
        return has_mark

    def gather(*_: float) -> bool:
        asked.append("gather")
        return gathered

    return SimpleNamespace(asked=asked, set_low_water_mark=set_low_water_mark, gather=gather)


def fast(seconds: float) -> int:
    return int(BULK_BYTES_PER_S * seconds * 2)


def test_a_burst_lasts_until_the_rate_was_low_for_a_while() -> None:
    walsender = socket(has_mark=True)
    burst = Burst(walsender, 0.0)
    assert (burst.gather(5.0), burst.is_holding_back) == (5.0, False)
    burst.measure(fast(0.01), 0.01)
    assert (burst.gather(5.0), burst.is_holding_back) == (BULK_WAIT_S, True)
    burst.measure(0, 0.01 + BULK_MEMORY_S / 2)
    assert (burst.gather(5.0), burst.is_holding_back) == (BULK_WAIT_S, True)
    burst.measure(0, 0.02 + BULK_MEMORY_S)
    assert (burst.gather(5.0), burst.is_holding_back) == (5.0, False)
    assert walsender.asked == [LOW_WATER_BYTES, 1]


def test_without_a_mark_records_gather_in_a_burst_alone() -> None:
    for gathered, timeout_s in ((False, 5.0), (True, 0.0)):
        walsender = socket(has_mark=False, gathered=gathered)
        burst = Burst(walsender, 0.0)
        assert burst.gather(5.0) == 5.0
        burst.measure(fast(0.01), 0.01)
        assert (burst.gather(5.0), burst.is_holding_back) == (timeout_s, gathered)
        burst.measure(0, 0.02 + BULK_MEMORY_S)
        assert (burst.gather(5.0), burst.is_holding_back) == (5.0, False)
        assert walsender.asked == [LOW_WATER_BYTES, "gather"]

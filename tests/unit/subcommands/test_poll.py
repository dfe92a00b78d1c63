"""What poll mode says of a slot for which it waits."""

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cdcpipe.config import PollConfig
from cdcpipe.errors import SlotInUseError
from cdcpipe.replication.slots import Slot
from cdcpipe.subcommands import poll
from support.slots import SLOT

COPY = replace(SLOT, active=True, active_pid=7, temporary=True, failover=True, synced=True, in_recovery=True)


@pytest.mark.parametrize(
    ("slot", "is_warned", "hint"),
    [
        (COPY, True, "let the slot's consumer at the primary go on"),
        (replace(COPY, temporary=False), False, "promote this standby"),
        (replace(COPY, temporary=False, synced=False), False, "stop that consumer"),
    ],
)
def test_a_copy_that_a_promotion_would_lose_is_a_warning(
    slot: Slot, is_warned: bool, hint: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(poll, "find_slot", lambda *_, **__: slot)
    with pytest.raises(SlotInUseError) as caught, caplog.at_level(logging.INFO):
        poll.wait_until_free(cast("Any", SimpleNamespace(database="shop")), "shop", PollConfig(0.0, 1.0))
    assert hint in str(caught.value.hint)
    (record,) = caplog.records
    assert (record.levelno == logging.WARNING) == is_warned == ("a promotion now would lose the slot" in caught.value.message)

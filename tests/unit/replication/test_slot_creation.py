"""What is refused before a slot, and the publications made before it, are created."""

from types import SimpleNamespace
from typing import Any

import pytest

from cdcpipe import sqlstate
from cdcpipe.errors import InitError, ServerError
from cdcpipe.replication.slot_creation import NewSlot, check_creatable, create_slot


def server(room: int) -> Any:
    return SimpleNamespace(execute=lambda _: [(str(room), "10")])


def test_a_server_without_a_free_slot() -> None:
    check_creatable(server(1), "shop_cdc")
    with pytest.raises(InitError, match="'shop_cdc' could not be created: all 10 replication slots are in use") as caught:
        check_creatable(server(0), "shop_cdc")
    assert "raise max_replication_slots" in str(caught.value.hint)


@pytest.mark.parametrize("name", ["Shop", "shop-cdc", "shop cdc", "süd", "shop\n", ""])
def test_a_name_that_the_server_refuses(name: str) -> None:
    with pytest.raises(InitError, match="could not be created: its name has other characters"):
        check_creatable(server(1), name)


@pytest.mark.parametrize(
    ("state", "message", "is_on_standby", "hint"),
    [
        (sqlstate.FEATURE_NOT_SUPPORTED, "logical decoding cannot be used while in recovery", True, "PostgreSQL 16 or newer"),
        (
            sqlstate.NOT_IN_PREREQUISITE_STATE,
            "logical decoding on standby requires wal_level",
            True,
            "on the primary: ALTER SYSTEM",
        ),
        (sqlstate.NOT_IN_PREREQUISITE_STATE, "anything else", True, None),
        (sqlstate.NOT_IN_PREREQUISITE_STATE, "logical decoding requires wal_level", False, None),
    ],
)
def test_what_a_standby_lacks(state: str, message: str, is_on_standby: bool, hint: str | None) -> None:
    def refuse(*_: object, **__: object) -> Any:
        raise ServerError(message, sqlstate=state)

    with pytest.raises(InitError, match=message) as caught:
        create_slot(SimpleNamespace(execute=refuse), NewSlot("s", "pgoutput", False, is_on_standby, None))
    assert caught.value.hint is None if hint is None else hint in (caught.value.hint or "")

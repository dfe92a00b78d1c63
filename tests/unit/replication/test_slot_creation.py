"""What is refused before a slot, and the publications made before it, are created."""

from types import SimpleNamespace
from typing import Any

import pytest

from cdcpipe.errors import InitError
from cdcpipe.replication.slot_creation import check_creatable


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

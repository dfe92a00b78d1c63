"""What `table_parts` asks. tests/system/test_prepare.py has the answers, from real servers."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from cdcpipe.replication.table_parts import table_parts


@pytest.mark.parametrize("version", [140000, 180000])
def test_no_look_needs_md5(version: int) -> None:
    """A server in FIPS mode refuses it, so no look would succeed."""
    asked: list[str] = []
    table_parts(cast("Any", SimpleNamespace(server_version=version, execute=lambda sql, **_: asked.append(sql) or [])), ["p"])
    assert asked
    assert "md5" not in asked[0].lower()

"""What ``cdcpipe ddl status`` says of the server. tests/server/test_ddl_capture.py has the rest, on real servers."""

from __future__ import annotations

import re
from typing import Any, cast

import pytest

from cdcpipe.subcommands import ddl


class Settings:
    """A server that answers with its settings to what it is asked for them, and with nothing to other questions."""

    def __init__(self, **values: str | None) -> None:
        self.values = values

    def execute(self, sql: str) -> list[tuple[str | None, ...]]:
        names = re.findall(r"current_setting\('(\w+)'|(pg_is_in_recovery)\(\)", sql)
        return [tuple(self.values.get(setting or function) for setting, function in names)]


@pytest.mark.parametrize(
    ("level", "effective", "in_recovery", "expected"),
    [
        ("logical", None, "f", None),
        ("replica", None, "f", ("wal_level is replica", "set wal_level = logical in postgresql.conf")),
        ("replica", "replica", "f", None),
        ("minimal", "minimal", "f", ("wal_level is minimal", "set wal_level = logical in postgresql.conf")),
        ("logical", "replica", "t", ("the primary of this standby", "on the primary, which needs a restart")),
        ("replica", "logical", "t", None),
    ],
)
def test_a_server_without_logical_decoding(
    level: str, effective: str | None, in_recovery: str, expected: tuple[str, str] | None
) -> None:
    server = Settings(wal_level=level, effective_wal_level=effective, pg_is_in_recovery=in_recovery)
    verdicts = list(ddl._examine_server(cast("Any", server)))
    if expected is None:
        assert verdicts == []
    else:
        (verdict,) = verdicts
        message, fix = expected
        assert message in verdict.message
        assert verdict.fix is not None
        assert fix in verdict.fix

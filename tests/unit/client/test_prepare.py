"""How the client reads the output of `cdcpipe prepare`."""

import json

import pytest

from cdcpipe.errors import (
    CdcpipeError,
)
from spark_sink.client.prepare import Prepared


def test_what_prepare_prints():
    text = json.dumps(
        {
            "server_version": 180004,
            "system_id": "7",
            "timeline": 1,
            "database": "db",
            "wal_lsn": "0/200",
            "slot": {"confirmed_flush_lsn": "0/100", "created": False},
            "timeline_history": [{"timeline": 1, "end_lsn": "0/80"}],
            "tables": [{"schema": "public", "name": "t", "primary_key": ["id"]}],
        }
    )
    prepared = Prepared.parse(text.encode())
    assert (prepared.slot_created, prepared.timeline_history) == (False, ((1, 0x80),))
    assert (prepared.wal_lsn, prepared.confirmed_flush_lsn, prepared.tables[0]["name"]) == (0x200, 0x100, "t")
    for broken in ("", "[]", "{}", text.replace("0/200", "x"), text.replace("confirmed", "c")):
        with pytest.raises(CdcpipeError, match="prepare"):
            Prepared.parse(broken.encode())

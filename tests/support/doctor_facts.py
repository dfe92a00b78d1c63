"""The facts that the doctor's checks judge, made without a server, and the comparison of a check's verdicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from cdcpipe.doctor.facts import Asked, Facts, Partition, Publication, Role, Server, Table
from cdcpipe.doctor.findings import Verdict
from cdcpipe.lsn import LSN
from cdcpipe.replication.slots import Slot
from cdcpipe.replication.tables import PublishedTable, TableColumn
from support.slots import SLOT

MB, GB = 1 << 20, 1 << 30

SETTINGS = {
    "wal_level": "logical",
    "max_replication_slots": "10",
    "max_wal_senders": "10",
    "max_slot_wal_keep_size": "-1",
    "wal_sender_timeout": "60000",
}


def server(settings: Mapping[str, str] | None = None, **changes: Any) -> Server:
    known: dict[str, Any] = {
        "address": "here:5432",
        "version": 180004,
        "version_text": "18.4",
        "database": "shop",
        "encoding": "UTF8",
        "is_standby": False,
        "settings": SETTINGS | dict(settings or {}),
        "wal_lsn": LSN(100 * GB),
        "slots": (),
        "walsenders": 0,
        "has_dbname": None,
        "clock_ahead_s": 0.0,
    }
    return Server(**known | changes)


def slot(**changes: Any) -> Slot:
    place = {"name": "s", "restart_lsn": LSN(100 * GB - MB), "confirmed_flush_lsn": LSN(100 * GB)}
    return replace(SLOT, **place | changes)


def physical(name: str, pid: int | None = 7, **changes: Any) -> Slot:
    return slot(name=name, slot_type="physical", plugin=None, database=None, active_pid=pid, **changes)


def table(name: str = "t", *, columns: str = "id v", **changes: Any) -> Table:
    """Return a table with the primary key id. ``published`` has changes to its PublishedTable."""
    published: dict[str, Any] = {
        "schema": "public",
        "name": name,
        "relation_id": 1,
        "replica_identity": "d",
        "primary_key": ("id",),
        "has_deferrable_key": False,
        "identity": ("id",),
        "refused": (),
        "columns": tuple(TableColumn(column, number, 23, -1, None, False) for number, column in enumerate(columns.split(), 1)),
    } | changes.pop("published", {})
    known: dict[str, Any] = {
        "published": PublishedTable(**published),
        "unreadable": (),
        "hides_rows": False,
        "is_owned": True,
        "size_bytes": 8192,
        "identity": ("id",),
        "partitions": (Partition("public", name, published["replica_identity"], ("id",)),),
    }
    return Table(**known | changes)


ROLE = Role("cdc", is_superuser=False, can_replicate=True, sees_others=True, can_create=True)
ALL = frozenset({"insert", "update", "delete", "truncate"})
PUBLICATION = Publication("p", all_tables=False, schemas=(), operations=ALL)
ASKED = Asked("s", publications=("p",))
NEW = Asked("s", publications=("p",), create=True)


def facts(**changes: Any) -> Facts:
    known: dict[str, Any] = {"asked": ASKED, "server": server(slots=(slot(),)), "role": ROLE, "publications": (PUBLICATION,)}
    return Facts(**known | changes)


def on(settings: Mapping[str, str] | None = None, **changes: Any) -> Facts:
    """Return facts with a slot on a server with these settings and properties."""
    return facts(server=server(settings, **{"slots": (slot(),)} | changes))


def said(check: Callable[[Facts], Iterator[Verdict]], given: Facts) -> list[tuple[str, str]]:
    """Return the level and the whole text of each verdict."""
    found = list(check(given))
    for verdict in found:
        # What is not in order says why that matters, and what to do.
        assert (verdict.level == "ok") == (verdict.why is None) == (verdict.fix is None), verdict
        assert verdict.message
        assert not any("\n" in text for text in (verdict.message, verdict.why or "", verdict.fix or ""))
    return [(verdict.level, f"{verdict.subject}: {verdict.message}: {verdict.why}. {verdict.fix}") for verdict in found]


def judge(check: Callable[[Facts], Iterator[Verdict]], given: Facts, *expected: str) -> None:
    """Check the verdicts. Each of ``expected`` is a level and parts of the verdict's text in their order, with … between them."""
    found = said(check, given)
    assert len(found) == len(expected), found
    for (level, text), wanted in zip(found, expected, strict=True):
        wanted_level, _, words = wanted.partition(" ")
        assert level == wanted_level, found
        position = 0
        for part in words.split("…"):
            position = text.find(part.strip(), position)
            assert position >= 0, (part, text)

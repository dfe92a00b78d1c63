"""Short notations for tests: a table's columns in the stream and in the catalog, and the versions of a key."""

from typing import Any

from cdcpipe.pgoutput.messages import Relation
from spark_sink.schema.table import Version
from support.oids import INT4
from support.segments import relation

ID, CODE, NONE = ("id",), ("code",), ()


def version(end_lsn: int, ordinal: int, key: tuple[str, ...], relation_id: int = 1) -> Version:
    return Version(end_lsn, ordinal, relation_id, key, key)


def table(columns: str) -> Relation:
    """Return a description of the columns in ``columns``: "name" or "name:type id". Ignores "=number", which `catalog` reads."""
    pairs = [column.partition("=")[0].partition(":") for column in columns.split()]
    return relation(1, "t", *((name, int(kind or INT4)) for name, _, kind in pairs))


def catalog(columns: str) -> list[dict[str, Any]]:
    """Return the catalog's facts about columns "name=number". "name=number!" is filled; "name=number'text" has text in old rows."""
    found = []
    for column, text in zip(table(columns).columns, columns.split(), strict=True):
        number, _, missing = text.partition("=")[2].partition("'")
        facts = {"number": int(number.rstrip("!")), "missing": missing or None, "is_filled": number.endswith("!")}
        found.append({"name": column.name, "type_id": column.type_id, "type_modifier": -1, **facts})
    return found

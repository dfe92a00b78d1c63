"""The message about published tables without a key."""

from typing import Any

from spark_sink.client.keyless import has_key, keyless_text, warnings_of

BOTH = ["UPDATE", "DELETE"]


def table(
    name: str,
    *key: str,
    identity: str = "d",
    refused: list[str] | None = None,
    is_deferrable: bool = False,
    columns: str = "id",
    generated: str = "",
) -> dict[str, Any]:
    return {
        "schema": "public",
        "name": name,
        "primary_key": key,
        "replica_identity": identity,
        "unpublished_key": [name for name in key if name not in columns.split()],
        "columns": [{"name": name} for name in columns.split()],
        "refused": refused or [],
        "unpublished_generated": generated.split(),
        "has_deferrable_key": is_deferrable,
    }


def test_a_table_is_named_once_with_all_that_it_means() -> None:
    tables = [table("b", refused=BOTH), table("keyed", "id"), table("a", refused=BOTH), table("i", identity="i")]
    (text,) = warnings_of(tables)
    assert text == (
        "tables without a primary key get a changelog and no replica, and the server refuses UPDATE and DELETE on them: public.a, "
        "public.b; for a replica give each a primary key; run --heal then copies it, or cdcpipe-spark snapshot --table"
    )


def test_refused_tables_and_tables_without_replica_can_differ() -> None:
    nothing = table("nothing", "id", identity="n", refused=["DELETE"])
    deferrable = table("late", identity="f", is_deferrable=True)
    full = table("full", identity="f")
    of_full, of_deferrable, of_nothing = (text.partition(";")[0] for text in warnings_of([nothing, full, deferrable]))
    assert of_full == "tables without a primary key get a changelog and no replica: public.full"
    assert of_deferrable.startswith("tables with a deferrable primary key, which two rows may share")
    assert of_deferrable.endswith("get a changelog and no replica: public.late")
    assert of_nothing == "the server refuses DELETE on tables without a usable replica identity: public.nothing"
    assert keyless_text(["public.full"]).startswith(of_full)


def test_a_key_that_is_published_in_part() -> None:
    tables = [table("t", "id", "g"), table("i", "id", "g", identity="i"), table("f", "id", "g", identity="f"), table("ok", "id")]
    (text,) = warnings_of(tables)
    assert text == (
        "tables with a key of which a column is not published get a changelog and no replica: public.f, public.i, public.t; "
        "for a replica publish all columns of the key, or let REPLICA IDENTITY USING INDEX name a unique index on published columns"
        " (before PostgreSQL 18 no publication has a generated column)"
        "; run --heal then copies it, or cdcpipe-spark snapshot --table"
    )
    assert [has_key(each) for each in tables] == [False, False, False, True]


def test_a_key_that_the_user_gave_is_one() -> None:
    assert warnings_of([table("full", identity="f")], keyed={"public.full": ["id"]}) == []
    (text,) = warnings_of([table("default", refused=BOTH)], keyed={"public.default"})
    assert "no replica" not in text
    assert "refuses UPDATE and DELETE" in text


def test_a_replica_identity_with_generated_columns_that_are_not_published() -> None:
    """REPLICA IDENTITY FULL is no remedy: it has these columns, too."""
    full = table("full", "id", identity="f", refused=BOTH, generated="g")
    [text] = warnings_of([full])
    assert text == (
        "the server refuses UPDATE and DELETE on tables without a usable replica identity: public.full;"
        " ALTER TABLE … REPLICA IDENTITY DEFAULT where there is a primary key, otherwise USING INDEX"
        " (generated columns that are not published keep it from being FULL)"
    )
    [text] = warnings_of([table("log", identity="f", refused=BOTH, generated="g")])
    assert "give each a primary key without generated columns, and ALTER TABLE … REPLICA IDENTITY DEFAULT; run --heal" in text

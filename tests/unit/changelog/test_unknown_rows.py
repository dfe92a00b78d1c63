"""Which tables need a copy of their rows after captured DDL."""

import pytest

from cdcpipe.masks import NO_MASKS, Masks
from spark_sink.changelog.unknown_rows import tables_with_unknown_rows
from spark_sink.schema.ddl import Descriptions
from spark_sink.schema.names import Names
from spark_sink.schema.table import Place, Table
from spark_sink.source.ddl import Ddl
from support.ddl_messages import ddl, described


def reasons(*messages: Ddl, known: tuple[Ddl, ...] = (), masks: Masks = NO_MASKS) -> list[tuple[str, int, str]]:
    descriptions = Descriptions()
    for each in (*known, *messages):
        descriptions.add(each.place, each.message)

    def tables_with(types: frozenset[int], _place: Place, _names: Names) -> list[Table]:
        return [Table("public", name) for name, type_id in (("t", 700), ("u", 701), ("v", 23)) if type_id in types]

    found = tables_with_unknown_rows(messages, descriptions, Names(), tables_with, masks)
    return [(str(table), lsn, reason) for table, lsn, reason in found]


@pytest.mark.parametrize(
    ("why", "statement", "needs"),
    [
        (["default"], "alter table t add c float default random()", True),
        (["type"], "alter table t alter a type bigint", False),
        (["type"], "  ALTER\nTABLE t ALTER a TYPE bigint ; ", False),
        (["type"], "alter table t alter a type int using a * 2", True),
        (["type"], "ALTER TABLE t ALTER a TYPE int\nUSING(a * 2)", True),
        (["type"], "alter table t alter using_it type bigint", False),
        (["type"], "alter table t alter a type bigint; select f()", True),
        (["type"], "do $$ begin execute x; end $$", True),
        (["type"], "select migrate()", True),
        (["type"], None, True),
        (["type", "default"], "alter table t add c float default random()", True),
        (["persistence"], "alter table t set logged", True),
        (["access method"], "alter table t set access method heap2", False),
        ([], None, False),
    ],
)
def test_rewrites(why: list[str], statement: str | None, needs: bool) -> None:
    found = reasons(rewrite(why, statement), ddl(10, 2, described("a:20=1")), known=(ddl(5, 0, described("a:23=1")),))
    assert [each[:2] for each in found] == ([("public.t", 10)] if needs else [])


@pytest.mark.parametrize(("length", "needs"), [(9_999, False), (10_000, True)])
def test_a_text_that_is_cut_is_no_whole_statement(length: int, needs: bool) -> None:
    """The event triggers cut a text. The USING of the statement, or its ATTACH, may stand behind the cut."""
    known, told = ddl(5, 0, described("a:23=1")), ddl(10, 2, described("a:20=1"))
    assert bool(reasons(rewrite(["type"], "alter table t alter a type bigint".ljust(length)), told, known=(known,))) == needs
    attach = ddl(10, 0, PART, statement="alter table p rename to q".ljust(length))
    assert bool(reasons(attach, known=(ddl(5, 0, ROOT, MIDDLE),))) == needs
    same = ddl(10, 0, tag="ALTER TYPE", statement="alter type mood add value 'x'".ljust(length), types=[{"oid": 700, "array": 701}])
    assert bool(reasons(same)) == needs


def rewrite(why: list[str], statement: str | None) -> Ddl:
    rewritten = {"oid": 1, "schema": "public", "name": "t", "reasons": why}
    return ddl(10, 2, kind="rewrite", statement=statement, rewritten=rewritten)


@pytest.mark.parametrize(
    ("before", "after", "needs"),
    [
        ("a:23=1", "a:23=1", False),
        ("a:21=1 b:700=2 c:1043=3", "b:701=2 c:25=3 a:20=4", False),
        ("a:114=1", "a:3802=1", True),  # json and jsonb are texts in Spark
        ("a:1042=1", "a:25=1", True),
        ("a:1082=1", "a:1114=1", True),  # the text of a date before the year 1
        ("a:23=1 b:114=2", "a:20=1 b:3802=2", True),
        ("a:23=1", "", True),
        ("", "a:23=1", True),
    ],
)
def test_casts_without_using(before: str, after: str, needs: bool) -> None:
    """A cast that is known to keep the values is no reason. Columns are compared by number."""
    known = (ddl(5, 0, described(before)),) if before else ()
    told = (ddl(10, 2, described(after)),) if after else ()
    later = ddl(20, 0, described("a:3802=1"), tag="CREATE INDEX") if after else ddl(20, 0, described("x=1", relation_id=2))
    found = reasons(rewrite(["type"], "alter table t alter a type x"), *told, later, known=known)
    assert found == ([("public.t", 10, "ALTER TABLE computed the values of a column anew")] if needs else [])


@pytest.mark.parametrize(
    ("mask", "needs"), [({"public.t.n": "hash"}, True), ({"public.t.n": "null"}, False), ({"public.t.other": "hash"}, False)]
)
def test_a_cast_that_keeps_numbers_does_not_keep_the_hashes_of_their_texts(mask: dict[str, str], needs: bool) -> None:
    """0.1 as a real is 0.10000000149011612 as a double precision."""
    before, after = (described(f"n:{type_id}=1 other:23=2") for type_id in (700, 701))
    told = ddl(10, 2, after)
    found = reasons(rewrite(["type"], "alter table t alter n type x"), told, known=(ddl(5, 0, before),), masks=Masks.of(mask))
    assert [each[:2] for each in found] == ([("public.t", 10)] if needs else [])


def test_a_description_that_is_older_than_its_place_does_not_tell_what_a_cast_changes() -> None:
    """A transaction with an older snapshot describes the table without the column that another one has added before."""
    known = (ddl(5, 0, described("a:23=1")), ddl(6, 0, described("a:23=1 c:1114=2")), ddl(7, 0, described("a:23=1"), tag="COMMENT"))
    cast = rewrite(["type"], "alter table t alter c type date"), ddl(10, 2, described("a:23=1 c:1082=2"))
    for are_together in (True, False):  # in one micro-batch, or not
        found = reasons(*known, *cast) if are_together else reasons(*cast, known=known)
        assert [each[:2] for each in found] == [("public.t", 10)]


ROOT = described("id=1", relation_id=1, name="root")
MIDDLE = described("id=1", relation_id=2, name="middle", parent=(1, "root"))
ALONE = described("id=1", relation_id=3, name="p")
PART = described("id=1", relation_id=3, name="p", parent=(2, "middle"))


def test_partitions_that_are_attached() -> None:
    known = (ddl(5, 0, ROOT, MIDDLE, ALONE, kind="installed"),)
    attach, detach = ddl(10, 0, PART), ddl(20, 0, ALONE)
    attached = [(name, 10, "public.p was attached to it") for name in ("public.middle", "public.root")]
    assert reasons(attach, known=known) == attached
    assert reasons(detach, known=(*known, attach)) == []
    # Detached and attached again: nobody knows what was done to its rows meanwhile.
    assert [each[1] for each in reasons(attach, detach, ddl(30, 0, PART), known=known)] == [10, 10, 30, 30]


def test_partitions_that_stay_where_they_are() -> None:
    known = (ddl(5, 0, ROOT, MIDDLE, PART, kind="installed"),)
    assert reasons(ddl(10, 0, PART, MIDDLE, ROOT), known=known) == []
    # A new partition is empty.
    assert reasons(ddl(10, 0, PART, tag="CREATE TABLE")) == []
    # So is one under another name, and one of a root that was renamed.
    moved = described("id=1", relation_id=2, name="centre", parent=(1, "trunk"))
    assert reasons(ddl(10, 0, moved), known=known) == []
    alone = ddl(10, 0, PART | {"name": "q"}, statement="alter table p rename to q")
    assert reasons(alone, known=(ddl(5, 0, ROOT, MIDDLE),)) == []
    # A partition that was not described before may have been attached.
    assert [each[0] for each in reasons(ddl(10, 0, PART), known=(ddl(5, 0, ROOT, MIDDLE),))] == ["public.middle", "public.root"]


def test_a_description_that_is_older_than_its_place_does_not_tell_what_is_attached() -> None:
    """Its transaction may have detached the partition, or have a snapshot from before it was attached: the next statement tells."""
    columns = described("id=1 c=2")["columns"]
    known = (ddl(5, 0, ROOT, MIDDLE, PART | {"columns": columns}, kind="installed"),)
    older, now = ddl(10, 0, ALONE), PART | {"columns": columns}
    assert reasons(older, ddl(20, 0, now, statement="alter table p alter id set not null"), known=known) == []
    attached = reasons(older, ddl(20, 0, now, statement="alter table middle attach partition p default"), known=known)
    assert [each[:2] for each in attached] == [("public.middle", 20), ("public.root", 20)]
    # It may also be that of the command that attaches the partition.
    alone = (ddl(5, 0, ROOT, MIDDLE, ALONE | {"columns": columns}, kind="installed"),)
    assert [each[0] for each in reasons(ddl(10, 0, PART), known=alone)] == ["public.middle", "public.root"]


def rewritten(why: str, statement: str, relation_id: int = 3, name: str = "p") -> Ddl:
    where = {"oid": relation_id, "schema": "public", "name": name, "reasons": [why]}
    return ddl(10, 0, kind="rewrite", statement=statement, rewritten=where)


def test_rows_of_a_partition_are_rows_of_the_tables_that_it_is_a_partition_of() -> None:
    """PostgreSQL rewrites the partitions: the root, which may be what is published, has no rows of its own."""
    known = (ddl(5, 0, ROOT, MIDDLE, PART, kind="installed"),)
    using = "alter table root alter id type int using id * 100"
    also = rewritten("type", using, 4, "q")
    after = ddl(10, 0, ROOT, MIDDLE, PART, PART | {"oid": 4, "name": "q"}, statement=using)
    anew = "ALTER TABLE computed the values of a column anew"
    found = reasons(rewritten("type", using), also, after, known=known)
    assert found == [(f"public.{name}", 10, anew) for name in ("p", "middle", "root", "q")]
    found = reasons(rewritten("default", "alter table root add c float default random()"), after, known=known)
    assert [each[0] for each in found] == ["public.p", "public.middle", "public.root"]
    # Rows that were loaded into an unlogged partition are in no stream. It is described with the CREATE TABLE, or now.
    logged = "ALTER TABLE made its partition public.p logged: what was changed before is not in the stream"
    statement = "alter table p set logged"
    for described_first in (known, (ddl(5, 0, ROOT, MIDDLE, kind="installed"),)):
        found = reasons(rewritten("persistence", statement), ddl(10, 0, PART, statement=statement), known=described_first)
        assert found[1:] == [(f"public.{name}", 10, logged) for name in ("middle", "root")]
    # Once detached, it has rows of its own.
    assert len(reasons(rewritten("default", using), ddl(10, 0, ALONE), known=(*known, ddl(8, 0, ALONE)))) == 1


@pytest.mark.parametrize(
    ("mask", "needs"), [({}, []), ({"public.root.id": "hash"}, ["public.root"]), ({"public.p.id": "hash"}, ["public.p"])]
)
@pytest.mark.parametrize("is_root_known", [True, False])
def test_a_cast_of_a_partitioned_table_without_using(mask: dict[str, str], needs: list[str], is_root_known: bool) -> None:
    """The masks are those of the table that is published. What is known of the whole table tells what its partition was, too."""
    root, part = (described(f"id:{kind}=1", name="root") for kind in (700, 701)), described("id:701=2", relation_id=3, name="p")
    before, after = root
    part["partition_of"] = {"oid": 1, "schema": "public", "name": "root"}
    as_it_was = described("id:700=2", relation_id=3, name="p", parent=(1, "root"))
    known = (ddl(5, 0, *([before] if is_root_known else []), as_it_was, kind="installed"),)
    found = reasons(
        rewritten("type", "alter table root alter id type float8"), ddl(10, 0, after, part), known=known, masks=Masks.of(mask)
    )
    assert [each[0] for each in found] == needs


@pytest.mark.parametrize(
    ("statement", "needs"),
    [
        ("alter type mood add value 'new' before 'ok'", False),
        ("ALTER TYPE mood RENAME TO other;", False),
        ("ALTER TYPE public . mood\nOWNER TO x", False),
        ('alter type shop."Mood ""x"" of day" set schema other', False),
        ("alter type mood rename value 'ok' to 'fine'", True),
        # The words of another command, in a label or a name.
        ("alter type mood rename value 'add value' to 'add_value'", True),
        ("alter type mood rename value 'ok' to 'set schema'", True),
        ('alter type "add value" rename value $$rename to$$ to $$x$$', True),
        ('alter type "add value to" rename attribute "owner to" to b', True),
        ("alter type rename rename value 'ok' to 'fine'", True),
        ("alter type pair add attribute c int", True),
        ("alter type mood add value 'x'; alter type mood rename value 'ok' to 'fine'", True),
        (None, True),
    ],
)
def test_types_whose_values_have_other_texts(statement: str | None, needs: bool) -> None:
    types = [{"oid": 700, "array": 701}, {"oid": 800, "array": None}]
    found = reasons(ddl(10, 0, tag="ALTER TYPE", statement=statement, types=types))
    assert found == ([(f"public.{name}", 10, "ALTER TYPE changed the texts of values") for name in "tu"] if needs else [])

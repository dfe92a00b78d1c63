"""The same SQL on every server gives the same records, which are those of the real plugins on 15 where these exist.

LSNs, transaction ids, times and object ids differ between servers, so they are left out.
"""

from __future__ import annotations

import pytest

from support import decoding_records, wal2json_records
from support.logical_stream import Both
from support.random_sql import VALUES, RandomSQL
from support.seeds import SEED
from support.wal2json_records import V1, V2

EVERYWHERE = {name: values for name, values in VALUES.items() if name != "xml"}
"""Not every build of the server has libxml."""


MORE = {"include-pk": "1", "include-not-null": "1", "include-default": "1", "include-column-positions": "1"}
WAL2JSON = [V1 | MORE, V2 | MORE, V1 | {"pretty-print": "1", "include-typmod": "0"}, V2 | {"include-domain-data-type": "1"}]
TEST_DECODING = [{"include-xids": "0"}]


def work(both: Both) -> None:
    print(f"CDCPIPE_TEST_SEED={SEED}")
    both.run(
        """
        create schema w; create type w.mood as enum ('ok', 'not "ok"'); create domain price as numeric(8,2);
        create type pair as (a int, b text);
        create table "T t" (id int primary key, m w.mood, p price default 1.5, a w.mood[], c pair);
        create table "no key" (a int); alter table "no key" replica identity full
        """
    )
    with both.database.connect() as other:
        random_work = RandomSQL(SEED, EVERYWHERE, [both.run, other.execute], is_plain=True)
        random_work.prepare()
        both.begin()
        random_work.work(40)
    both.run(
        """
        insert into "T t" values (1, 'ok', 2.5, '{ok,"not \\"ok\\""}', (1, 'x"y')); insert into "T t" values (2);
        update "T t" set id = id + 5; delete from "T t"; insert into "no key" values (1), (1), (null);
        update "no key" set a = 2; delete from "no key"; truncate "T t", "no key"
        """
    )


@pytest.fixture(scope="module")
def on15(pg15):
    """Return the records of the real plugins."""
    records = {}
    for plugin, option_sets in (("wal2json", WAL2JSON), ("test_decoding", TEST_DECODING)):
        with pg15.database() as database:
            both = Both(database, plugin)
            work(both)
            for options in option_sets:
                theirs = wal2json_records.without_stray_commas(both.theirs(options))
                records[plugin, str(options)] = (
                    [record for group in wal2json_records.without_empty(theirs, options) for _, record in group]
                    if plugin == "wal2json"
                    else [record for _, record in decoding_records.without_empty(theirs)]
                )
            both.connection.close()
    return records


def test_records(pg, on15):
    with pg.database() as database:
        both = Both(database, "pgoutput")
        work(both)
        raw = both.raw()
        for options in WAL2JSON:
            ours = [record for _, record in wal2json_records.render(options, raw, both.query)]
            assert ours == on15["wal2json", str(options)]
        for options in TEST_DECODING:
            ours = [record for _, record in decoding_records.render(both, options, {})]
            assert ours == on15["test_decoding", str(options)]
        both.connection.close()

"""Lists in the code that come from a server's catalogs are the same on today's servers."""

import postgres

from cdcpipe.plugins.keywords import KEYWORDS
from cdcpipe.types.names import format_built_in_type
from cdcpipe.types.pg_type import PG_TYPES


def test_quoted_are_the_keywords_of_the_newest_server(pg: postgres.Cluster) -> None:
    with pg.connect() as connection:
        words = {word for (word,) in connection.execute("select word from pg_get_keywords() where catcode <> 'U'")}
    assert words <= KEYWORDS
    if pg.version_num >= 180000:
        assert words == KEYWORDS


TYPMODS = [
    *[(type_, typmod) for type_ in (1042, 1043, 1015, 1014) for typmod in (-1, 4, 5, 14, 10485764)],
    *[(1700, ((p << 16) | (s & 0x7FF)) + 4) for p, s in ((12, 2), (5, -2), (3, 5), (1000, 1000), (1000, -1000), (1, 0))],
    *[(type_, typmod) for type_ in (1083, 1114, 1184, 1266, 1185, 1115) for typmod in (-1, 0, 3, 6)],
    *[(type_, typmod) for type_ in (1560, 1562, 1561, 1563) for typmod in (-1, 1, 5, 64)],
    *[
        (1186, (fields << 16) | precision)
        for fields in (4, 2, 8, 1024, 2048, 4096, 6, 1032, 3080, 7176, 3072, 7168, 6144, 0x7FFF)
        for precision in (0xFFFF, 0, 3, 6)
    ],
    (1187, 0x7FFF0003),
    (1231, (8 << 16) + 2 + 4),
]


def test_type_names_are_the_servers(pg):
    with pg.connect() as connection:
        oids = [(oid, -1) for (oid,) in connection.execute("select oid::int8 from pg_type where oid < 10000").fetchall()]
        for type_id, typmod in [*oids, *TYPMODS]:
            (expected,) = connection.execute("select format_type(%s::oid, %s::int4)", [type_id, typmod]).fetchone()
            assert format_built_in_type(type_id, typmod) == expected, (type_id, typmod)
        for name, type_id in connection.execute("select typname::text, oid::int8 from pg_type where oid < 10000"):
            assert PG_TYPES[type_id].name == name
    assert format_built_in_type(16384, -1) is None

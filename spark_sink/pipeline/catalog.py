"""Gives the tables of a warehouse names in a database of the session's catalog. Any catalog of Spark will do.

| in the warehouse | in the database |
|---|---|
| the replica of shop.orders | shop__orders |
| its changelog | shop__orders__changelog |
| its history, as a table or a view | shop__orders__history |
| the logical messages | _cdc_message |
| the versions of the tables' schemas | _cdc_schema_history |
| the captured DDL | _cdc_ddl |

Catalogs accept letters, digits and underscores, and some ignore case. So names are in lower case, and an underscore replaces any
other character. If two tables get the same name, that is an error. A name that is already in use for something else is an error,
too. (The names of tables contain two underscores in a row; the last three names above do not.)

A table can have a view that shows its json and jsonb columns as VARIANT: ``shop__orders_variant`` is such a view of
``shop__orders``. The view is created again when the table's json columns change; other new columns appear in it without that.
Names of tables take precedence: if a view's name is already in use, a warning is logged and there is no view.
history_views.py keeps the views with the tables' histories, by the same rule.

If a table goes on under another name (schema/names.py), it gets the new name here, and its old name is dropped. Many tables may
have had one name, such as that of today's table, if it is renamed each night. So each name is looked up once for all of them, and
only for tables that were renamed since the last look. If the warehouse was moved, its names and views are made anew.

With Delta Lake, each name is an external table: the catalog holds its location, and the table holds everything else. A Parquet
changelog is a view that reads its directory. A Parquet replica has no name here, because SQL cannot compute it
(`register_views` in replica/current.py makes a temporary view of it).
"""

from __future__ import annotations

import logging
import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql.types import ArrayType

from cdcpipe.errors import InvalidArgumentsError
from spark_sink.changelog.tables import changelogs_of
from spark_sink.files import places
from spark_sink.pipeline.history_views import HISTORY_OF, HistoryViews, is_at, look_up, place_property
from spark_sink.schema.table import DDL, MESSAGES, SCHEMA_HISTORY, Table
from spark_sink.schema.types import is_json, json_fields
from spark_sink.spark.sql import literal, only, path_of, quote
from spark_sink.warehouse.errors import WarehouseError
from spark_sink.warehouse.formats import VIEW
from spark_sink.warehouse.warehouse import Warehouse

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructField

    from cdcpipe.pgoutput.messages import Relation
    from spark_sink.changelog.schema_history import SchemaHistory
    from spark_sink.schema.names import Naming

__all__ = ["CatalogDatabase", "check_options", "parse_database"]

_logger = logging.getLogger(__name__)

_OTHER = re.compile("[^a-z0-9_]")
_OURS = {
    MESSAGES: "the changelog of logical messages",
    SCHEMA_HISTORY: "the history of the tables' schemas",
    DDL: "the captured DDL",
}


_CHANGELOG, _HISTORY = "__changelog", "__history"
_VARIANT = "_variant"
_VARIANT_OF = "cdcpipe.variant_of"
"""The property of a view that names its table."""
_PARQUET_OF = re.compile("FROM parquet.`(.*)` WITH")
"""The part of a view's text that names the directory of a Parquet changelog."""


def parse_database(text: str) -> tuple[str, ...]:
    """Read ``database`` or ``catalog.database``; raise InvalidArgumentsError for anything else."""
    parts = tuple(text.split("."))
    if not all(parts) or len(parts) > 2:
        raise InvalidArgumentsError(f"--catalog-database takes DATABASE or CATALOG.DATABASE, not {text!r}")
    return parts


def check_options(database: str | None, *, json_variants: bool, history: str) -> None:
    """Raise InvalidArgumentsError for a wrong name of a database, and for views without a database to make them in."""
    if database is not None:
        parse_database(database)
    elif json_variants or history == VIEW:
        option = "--json variant" if json_variants else "--history view"
        raise InvalidArgumentsError(f"{option} makes views in the catalog", hint="name a database there: --catalog-database")


class CatalogDatabase:
    """Gives the tables of a warehouse names in a database, and remembers which tables have one. Thread-safe.

    With ``schemas``, a table that has json columns in its newest schema also gets a view that shows them as VARIANT. With
    ``history_views``, a table with a key also gets a view with its history. Without the one or the other, such views of an earlier
    run are dropped, because nobody keeps them right.
    """

    def __init__(
        self,
        spark: SparkSession,
        database: str,
        warehouse: Warehouse,
        schemas: SchemaHistory | None = None,
        *,
        history_views: bool = False,
    ) -> None:
        """Create the database if it does not exist."""
        self._spark = spark
        self._parts = parse_database(database)
        self._warehouse = warehouse
        self._lock = threading.Lock()
        self._owners: dict[str, str] = {}
        self._registered: dict[str, Path] = {}
        self._called: dict[Table, Table] = {}
        """The tables that were renamed, as they are called now. A merge that began before may know an older name."""
        self._followed: frozenset[Naming] = frozenset()
        """The namings for which `rename` has dropped the old names."""
        self._schemas = schemas
        self._has_history_views = history_views
        self._history_views = HistoryViews(spark, warehouse)
        self._variants: dict[str, tuple[str, ...]] = {}
        """For each table's name, the json columns that its view was created for."""
        name = self._quoted()
        if not spark.catalog.databaseExists(name):
            spark.sql(f"CREATE DATABASE IF NOT EXISTS {name}")
        if len(self._parts) == 1 and spark.conf.get("spark.sql.catalogImplementation", "in-memory") == "in-memory":
            _logger.warning("this session's catalog is in memory: names in %s are gone with the session", database)

    def rename(self) -> None:
        """Drop the old names of all tables that were renamed since the last call. `register` gives them their new names."""
        names = self._warehouse.recorded_names()
        with self._lock:
            renamed = {naming.home for naming in names.namings if naming not in self._followed}
            self._called.update({naming.home: names.shown(naming.home) for naming in names.namings})
            views: dict[str, list[Table]] = {}
            left: dict[str, tuple[set[str], list[Path]]] = {}
            for former in (replace(home, called=former) for home in renamed for former in names.former(home)):
                views.setdefault(_name_of(former) + _HISTORY, []).append(former)
                for owner, name, path in self._entries(former):
                    owners, paths = left.setdefault(name, (set(), []))
                    owners.add(owner)
                    paths.append(path)
            for view, tables in views.items():
                self._history_views.drop(tables, self._quoted(view))
            for name, (owners, paths) in left.items():
                self._drop(name, paths)
                if self._owners.get(name) in owners:  # of a table that is not there yet
                    del self._owners[name]
            self._followed = frozenset(names.namings)

    def register(self, tables: Iterable[Table]) -> None:
        """Name the changelogs and replicas of these tables that exist and have no name yet.

        Raises WarehouseError if a name is already in use.
        """
        with self._lock:
            called = [self._called.get(table, table) for table in tables]
            entries = [(table, *entry) for table in called for entry in self._entries(table)]
            for table, owner, name, path in entries:
                self._claim(name, owner)
                if self._registered.get(name) != path and self._warehouse.format.exists(path):
                    self._drop_moved(owner, name, path)
                    if name.endswith(_VARIANT) and self._is_variant(name, self._warehouse.root):
                        self._spark.sql(f"DROP VIEW {self._quoted(name)}")
                        if self._schemas is not None:
                            self._tell_taken(name)
                    if name.endswith(_HISTORY) and HISTORY_OF in self._history_views.properties(self._quoted(name)):
                        self._spark.sql(f"DROP VIEW {self._quoted(name)}")
                        self._history_views.forget()
                    self._name(owner, name, path)
                    self._registered[name] = path
                    if self._schemas is None:
                        self._drop_variants(name, path)
                    if name.endswith(_CHANGELOG) and not self._has_history_views:
                        self._history_views.drop([table], self._quoted(name.removesuffix(_CHANGELOG) + _HISTORY))
            if self._has_history_views:
                for table, _, name, path in entries:
                    if self._registered.get(name) == path == self._warehouse.changelog(table) and table not in _OURS:
                        self._history_views.show(table, self._quoted(name), self._quoted(name.removesuffix(_CHANGELOG) + _HISTORY))
            if self._schemas is not None:
                for table, _, name, path in entries:
                    if name in self._registered and table not in _OURS:
                        self._show_variants(name, path, self._schemas.newest(table))

    def withdraw_histories(self, tables: Iterable[Table]) -> None:
        """Drop the views with the histories of these tables, because their versions or columns change.

        Call this before the changes are committed. After `forget_histories`, `register` makes the views again.
        """
        if self._has_history_views:
            with self._lock:
                for table in tables:
                    called = self._called.get(table, table)
                    self._history_views.drop([called], self._quoted(_name_of(called) + _HISTORY))

    def forget_histories(self, tables: Iterable[Table] | None = None) -> None:
        """Let `register` look whether the views with the histories of these tables, or of all tables, still fit."""
        with self._lock:
            self._history_views.forget(tables)

    def _claim(self, name: str, owner: str) -> None:
        other = self._owners.setdefault(name, owner)
        if other != owner:
            raise WarehouseError(
                f"{other} and {owner} would both be {self._text(name)} in the catalog",
                hint="if both still get changes, start run without --catalog-database; otherwise remove the one that gets none"
                " (docs/spark/change.md, Remove a table): its files, and its names in the catalog",
            )

    def _entries(self, table: Table) -> Iterator[tuple[str, str, Path]]:
        """Yield for each changelog and replica that a table may have: a description, its name in the database, its path."""
        if table in _OURS:
            yield _OURS[table], table.name, self._warehouse.changelog(table)
            return
        name = _name_of(table)
        yield f"the changelog of {table}", f"{name}{_CHANGELOG}", self._warehouse.changelog(table)
        if self._warehouse.format.keeps_replicas:
            yield f"the replica of {table}", name, self._warehouse.replica(table)
        if self._warehouse.keeps_history:
            yield f"the history of {table}", f"{name}{_HISTORY}", self._warehouse.history(table)

    def _name(self, owner: str, name: str, path: Path) -> None:
        quoted = self._quoted(name)
        self._spark.sql(changelogs_of(self._spark, self._warehouse).naming_sql(quoted, path))
        # IF NOT EXISTS leaves alone anything that already has the name.
        found = self._described(name)
        if not _is_of(found, path):
            raise self._taken(owner, name, _location(found))

    def _taken(self, owner: str, name: str, location: str) -> WarehouseError:
        return WarehouseError(
            f"{self._text(name)} in the catalog is not {owner}, but something else{location and f', at {location}'}",
            hint="drop it, or give another --catalog-database",
        )

    def _drop_moved(self, owner: str, name: str, path: Path) -> None:
        """Drop a name, and the views beside it, of the place from which the table at ``path`` was moved with its warehouse."""
        former = self._gone(name)
        if former is None:
            return
        if not is_at(former, path):
            raise self._taken(owner, name, former)
        self._drop_left(name, former)

    def _drop_left(self, name: str, former: str) -> None:
        """Drop a name, and the views beside it, of a table that was at the place ``former``, where nothing is any more."""
        for view, of in ((f"{name}{_VARIANT}", _VARIANT_OF), (name.removesuffix(_CHANGELOG) + _HISTORY, HISTORY_OF)):
            if self._history_views.properties(self._quoted(view)).get(of) == former:
                self._spark.sql(f"DROP VIEW {self._quoted(view)}")
        self._spark.sql(f"DROP {'TABLE' if self._warehouse.format.keeps_replicas else 'VIEW'} {self._quoted(name)}")

    def _gone(self, name: str) -> str | None:
        """Return the place of the table with this name if nothing is there any more; None if something is, or for no such name."""
        is_there, left = look_up(self._spark, self._quoted(name))
        if left is not None or not is_there or self._warehouse.format.keeps_replicas:
            return left
        found = _PARQUET_OF.search(self._described(name).get("View Text", ""))
        place = None if found is None else path_of(found[1])
        return None if place is None or self._warehouse.format.exists(Path(place)) else place

    def _drop(self, name: str, paths: Sequence[Path]) -> None:
        """Drop a name, and that of the view beside it, if they are names of a table at one of ``paths``, or of its former place."""
        former = self._gone(name)
        if former is not None:
            if not any(is_at(former, path) for path in paths):
                return
            self._drop_left(name, former)
        elif self._is_there(name):
            found = self._described(name)
            path = next((path for path in paths if _is_of(found, path)), None)
            if path is None:
                return
            self._drop_variants(name, path)
            self._spark.sql(f"DROP {'VIEW' if found.get('Type') == 'VIEW' else 'TABLE'} {self._quoted(name)}")
        else:
            return
        for known in (self._registered, self._owners, self._variants):
            known.pop(name, None)

    def _described(self, name: str) -> dict[str, str]:
        rows = self._spark.sql(f"DESCRIBE TABLE EXTENDED {self._quoted(name)}").collect()
        return {row["col_name"]: row["data_type"] for row in rows}

    def _show_variants(self, name: str, path: Path, relation: Relation | None) -> None:
        """Create the view with a table's json as VARIANT, if the table has json columns and no up-to-date view.

        Drops the view of a table that has none any more: its text would parse what is no json, or name a column that is gone.
        """
        relation = None if relation is None else self._warehouse.typed(relation)  # masked json is no json any more
        wanted = () if relation is None else tuple(column.name for column in relation.columns if is_json(column))
        if relation is None or self._variants.get(name) == wanted:
            return
        if not wanted:
            self._drop_variants(name, path)
            self._variants[name] = wanted
            return
        view, columns = f"{name}{_VARIANT}", self._spark.table(self._quoted(name)).schema
        fields = json_fields(columns, relation)
        is_taken = view in self._owners or (self._is_there(view) and not self._is_variant(view, path))
        if is_taken:
            self._tell_taken(view)
        elif fields:
            names = [quote(field.name) for field in fields]
            parsed = [f"{_parsed(field)} AS {quoted}" for field, quoted in zip(fields, names, strict=True)]
            others = [f"* EXCEPT ({', '.join(names)})"] if len(fields) < len(columns) else []
            of = literal(place_property(path))
            self._spark.sql(
                f"CREATE OR REPLACE VIEW {self._quoted(view)} TBLPROPERTIES ('{_VARIANT_OF}' = {of}) "
                f"WITH SCHEMA EVOLUTION AS SELECT {', '.join(others + parsed)} FROM {self._quoted(name)}"
            )
        if is_taken or len(fields) == len(wanted):  # a replica gets its columns later than its changelog
            self._variants[name] = wanted

    def _drop_variants(self, name: str, path: Path) -> None:
        """Drop the view with the json of the table at ``path``, if there is one."""
        view = f"{name}{_VARIANT}"
        if self._is_variant(view, path):
            self._spark.sql(f"DROP VIEW {self._quoted(view)}")

    def _tell_taken(self, view: str) -> None:
        name = view.removesuffix(_VARIANT)
        _logger.warning(
            "%s in the catalog is something else: %s has no view with VARIANT columns", self._text(view), self._text(name)
        )

    def _is_there(self, name: str) -> bool:
        return look_up(self._spark, self._quoted(name))[0]

    def _is_variant(self, name: str, path: Path) -> bool:
        """Tell whether this is a view that this class created, of the table at ``path`` or of a table below it."""
        found = self._history_views.properties(self._quoted(name))
        return _VARIANT_OF in found and f"{found[_VARIANT_OF]}/".startswith(f"{places.name(path)}/")

    def _quoted(self, *name: str) -> str:
        return ".".join(map(quote, (*self._parts, *name)))

    def _text(self, name: str) -> str:
        return ".".join((*self._parts, name))


def _name_of(table: Table) -> str:
    """Return the name of a table's replica in the database."""
    now = table.now
    number = f"~{now.number}" if now.number else ""
    return _OTHER.sub("_", f"{now.schema}__{now.name}{number}".lower())


def _location(described: Mapping[str, str]) -> str:
    return str(described.get("Location", "")).removeprefix("file:")


def _is_of(described: Mapping[str, str], path: Path) -> bool:
    """Tell whether a description in the catalog is that of the table at ``path``."""
    return _location(described) == places.name(path) or quote(only(str(path))) in str(described.get("View Text", ""))


def _parsed(field: StructField) -> str:
    """Return the SQL expression of a json column as VARIANT.

    Uses parse_json, because try_parse_json returns NULL for text that it cannot parse.
    """
    name = quote(field.name)
    return f"transform({name}, element -> parse_json(element))" if isinstance(field.dataType, ArrayType) else f"parse_json({name})"

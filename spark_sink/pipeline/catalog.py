"""Gives the tables of a warehouse names in a database of the session's catalog. Any catalog of Spark will do.

| in the warehouse | in the database |
|---|---|
| the replica of shop.orders | shop__orders |
| its changelog | shop__orders__changelog |
| the logical messages | _cdc_message |
| the versions of the tables' schemas | _cdc_schema_history |
| the captured DDL | _cdc_ddl |

Catalogs accept letters, digits and underscores, and some ignore case. So names are in lower case, and an underscore replaces any
other character. If two tables get the same name, that is an error. A name that is already in use for something else is an error,
too. (The names of tables contain two underscores in a row; the last two names above do not.)

A table can have a view that shows its json and jsonb columns as VARIANT: ``shop__orders_variant`` is such a view of
``shop__orders``. The view is created again when the table's json columns change; other new columns appear in it without that.
Names of tables take precedence: if a view's name is already in use, a warning is logged and there is no view.

With Delta Lake, each name is an external table: the catalog holds its location, and the table holds everything else. A Parquet
changelog is a view that reads its directory. A Parquet replica has no name here, because SQL cannot compute it
(replica.register_views).
"""

from __future__ import annotations

import logging
import re
import threading
from typing import TYPE_CHECKING

from pyspark.sql.types import ArrayType

from cdcpipe.errors import InvalidArgumentsError
from spark_sink.changelog.tables import changelogs_of
from spark_sink.files import places
from spark_sink.schema.table import DDL, MESSAGES, SCHEMA_HISTORY, Table
from spark_sink.schema.types import is_json, json_fields
from spark_sink.spark.sql import literal, quote
from spark_sink.warehouse.warehouse import Warehouse, WarehouseError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructField

    from cdcpipe.pgoutput.messages import Relation
    from spark_sink.changelog.history import SchemaHistory

__all__ = ["CatalogDatabase", "parse_database"]

_logger = logging.getLogger(__name__)

_OTHER = re.compile("[^a-z0-9_]")
_OURS = {
    MESSAGES: "the changelog of logical messages",
    SCHEMA_HISTORY: "the history of the tables' schemas",
    DDL: "the captured DDL",
}


_VARIANT = "_variant"
_VARIANT_OF = "cdcpipe.variant_of"
"""The property of a view that names its table."""


def parse_database(text: str) -> tuple[str, ...]:
    """Read ``database`` or ``catalog.database``; raise InvalidArgumentsError for anything else."""
    parts = tuple(text.split("."))
    if not all(parts) or len(parts) > 2:
        raise InvalidArgumentsError(f"--catalog-database takes DATABASE or CATALOG.DATABASE, not {text!r}")
    return parts


class CatalogDatabase:
    """Gives the tables of a warehouse names in a database, and remembers which tables have one. Thread-safe.

    With ``history``, a table that has json columns in its newest schema also gets a view.
    """

    def __init__(
        self,
        spark: SparkSession,
        database: str,
        warehouse: Warehouse,
        history: SchemaHistory | None = None,
    ) -> None:
        """Create the database if it does not exist."""
        self._spark = spark
        self._parts = parse_database(database)
        self._warehouse = warehouse
        self._lock = threading.Lock()
        self._owners: dict[str, str] = {}
        self._registered: set[str] = set()
        self._history = history
        self._variants: dict[str, tuple[str, ...]] = {}
        """For each table's name, the json columns that its view was created for."""
        name = self._quoted()
        if not spark.catalog.databaseExists(name):
            spark.sql(f"CREATE DATABASE IF NOT EXISTS {name}")
        if len(self._parts) == 1 and spark.conf.get("spark.sql.catalogImplementation", "in-memory") == "in-memory":
            _logger.warning("this session's catalog is in memory: names in %s are gone with the session", database)

    def register(self, tables: Iterable[Table]) -> None:
        """Name the changelogs and replicas of these tables that exist and have no name yet.

        Raises WarehouseError if a name is already in use.
        """
        entries = [(table, *entry) for table in tables for entry in self._entries(table)]
        with self._lock:
            for _, owner, name, path in entries:
                self._claim(name, owner)
                if name not in self._registered and self._warehouse.format.exists(path):
                    if self._history is not None and self._is_variant(name, self._warehouse.root):
                        self._spark.sql(f"DROP VIEW {self._quoted(name)}")
                        self._tell_taken(name)
                    self._name(owner, name, path)
                    self._registered.add(name)
            if self._history is not None:
                for table, _, name, path in entries:
                    if name in self._registered and table not in _OURS:
                        self._show_variants(name, path, self._history.newest(table))

    def _claim(self, name: str, owner: str) -> None:
        other = self._owners.setdefault(name, owner)
        if other != owner:
            raise WarehouseError(
                f"{other} and {owner} would both be {self._text(name)} in the catalog",
                hint="leave one of the tables out of the publication or rename it, or run without --catalog-database",
            )

    def _entries(self, table: Table) -> Iterator[tuple[str, str, Path]]:
        """Yield for each changelog and replica that a table may have: a description, its name in the database, its path."""
        if table in _OURS:
            yield _OURS[table], table.name, self._warehouse.changelog(table)
            return
        name = _OTHER.sub("_", f"{table.schema}__{table.name}".lower())
        yield f"the changelog of {table}", f"{name}__changelog", self._warehouse.changelog(table)
        if self._warehouse.format.keeps_replicas:
            yield f"the replica of {table}", name, self._warehouse.replica(table)

    def _name(self, owner: str, name: str, path: Path) -> None:
        quoted = self._quoted(name)
        self._spark.sql(changelogs_of(self._spark, self._warehouse).naming_sql(quoted, path))
        # IF NOT EXISTS leaves alone anything that already has the name.
        found = {row["col_name"]: row["data_type"] for row in self._spark.sql(f"DESCRIBE TABLE EXTENDED {quoted}").collect()}
        location = str(found.get("Location", "")).removeprefix("file:")
        if location != places.name(path) and quote(str(path)) not in str(found.get("View Text", "")):
            raise WarehouseError(
                f"{self._text(name)} in the catalog is not {owner}, but something else{location and f', at {location}'}",
                hint="drop it, or give another --catalog-database",
            )

    def _show_variants(self, name: str, path: Path, relation: Relation | None) -> None:
        """Create the view with a table's json as VARIANT, if the table has json columns and no up-to-date view."""
        wanted = () if relation is None else tuple(column.name for column in relation.columns if is_json(column))
        if relation is None or not wanted or self._variants.get(name) == wanted:
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
            of = literal(places.name(path))
            self._spark.sql(
                f"CREATE OR REPLACE VIEW {self._quoted(view)} TBLPROPERTIES ('{_VARIANT_OF}' = {of}) "
                f"WITH SCHEMA EVOLUTION AS SELECT {', '.join(others + parsed)} FROM {self._quoted(name)}"
            )
        if is_taken or len(fields) == len(wanted):  # a replica gets its columns later than its changelog
            self._variants[name] = wanted

    def _tell_taken(self, view: str) -> None:
        name = view.removesuffix(_VARIANT)
        _logger.warning(
            "%s in the catalog is something else: %s has no view with VARIANT columns", self._text(view), self._text(name)
        )

    def _is_there(self, name: str) -> bool:
        return bool(self._spark.catalog.tableExists(self._quoted(name)))

    def _is_variant(self, name: str, path: Path) -> bool:
        """Tell whether this is a view that this class created, of the table at ``path`` or of a table below it."""
        if not self._is_there(name):
            return False
        found = {row["key"]: row["value"] for row in self._spark.sql(f"SHOW TBLPROPERTIES {self._quoted(name)}").collect()}
        return _VARIANT_OF in found and f"{found[_VARIANT_OF]}/".startswith(f"{places.name(path)}/")

    def _quoted(self, *name: str) -> str:
        return ".".join(map(quote, (*self._parts, *name)))

    def _text(self, name: str) -> str:
        return ".".join((*self._parts, name))


def _parsed(field: StructField) -> str:
    """Return the SQL expression of a json column as VARIANT.

    Uses parse_json, because try_parse_json returns NULL for text that it cannot parse.
    """
    name = quote(field.name)
    return f"transform({name}, element -> parse_json(element))" if isinstance(field.dataType, ArrayType) else f"parse_json({name})"

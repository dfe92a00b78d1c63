"""`cdcpipe doctor` as a command: its exit codes, its lines, its JSON. tests/server/test_doctor.py tests its findings."""

import json
import re

import postgres

from cdcpipe.doctor.findings import parse
from cdcpipe.subcommands.doctor import CHECKS, CONNECTION
from spark_sink.doctor.pipeline_doctor import CHECKS as PIPELINE_CHECKS
from support.cli_process import run_cli
from support.paths import ROOT

PAGE = (ROOT / "docs/operations/doctor.md").read_text()


def test_lines_json_and_exit_codes(database: postgres.Database) -> None:
    with database.connect() as connection:
        connection.execute("create table fruit (id int primary key)")
    asked = ("doctor", "-d", database.dsn, "-S", "doctor_cmd", "--publication", "shop")
    code, stdout, stderr = run_cli(*asked, "-c")
    lines = stdout.decode().splitlines()
    assert (code, stderr) == (0, "")
    assert re.fullmatch(r"errors: 0, warnings: \d+, ok: \d+", lines[-1])
    assert any(re.fullmatch(r"ok +slot\.state +slot 'doctor_cmd' is not there: -c makes it", line) for line in lines)

    code, stdout, stderr = run_cli(*asked, "--json")
    found = json.loads(stdout)
    assert (code, stderr) == (1, "")
    assert {finding.check for finding in parse(found) if finding.level == "error"} == {"slot.state", "publications.there"}
    with database.connect() as connection:
        (system_id,) = connection.execute("select system_identifier::text from pg_control_system()").fetchone() or ("",)
    assert found["server"] | {"wal_bytes_per_second": 0} == {
        "version": database.cluster.version_num,
        "system_id": system_id,
        "timeline": 1,
        "is_standby": False,
        "slot_exists": False,
        "confirmed_flush_lsn": None,
        "wal_bytes_per_second": 0,
        "tables": 0,
        "table_bytes": 0,
    }

    code, stdout, _ = run_cli(*asked, "-c", "--quick", "--json")
    found = json.loads(stdout)
    assert code == 0
    assert [found["server"][key] for key in ("wal_bytes_per_second", "tables", "table_bytes")] == [None] * 3
    assert not {finding.check for finding in parse(found) if finding.check.startswith(("tables", "publications"))}

    _, stdout, _ = run_cli("doctor", "-d", database.dsn, "-S", "doctor_cmd", "--json")
    found = json.loads(stdout)
    assert [found["server"][key] for key in ("tables", "table_bytes")] == [None] * 2


def test_a_server_that_is_not_there_is_a_finding() -> None:
    code, stdout, stderr = run_cli("doctor", "-h", "/nowhere", "-S", "s", "--json")
    found = json.loads(stdout)
    assert (code, stderr, found["server"]) == (1, "", None)
    [finding] = parse(found)
    assert (finding.level, finding.check) == ("error", "server.connection")
    assert finding.fix


def test_a_wrong_option_prints_no_findings() -> None:
    for wrong in (["-d", "postgresql://u:secret@h/db"], ["--table", "fruit"], ["--nonsense"]):
        code, stdout, stderr = run_cli("doctor", "-S", "s", *wrong)
        assert (code, stdout) == (1, b"")
        assert "secret" not in stderr


def test_the_page_names_every_check() -> None:
    documented = {
        name for row in re.findall(r"^\| (`[a-z]+\.[^|]*) \|", PAGE, re.MULTILINE) for name in re.findall(r"`([a-z_.]+)`", row)
    }
    assert documented == {CONNECTION, *CHECKS, *PIPELINE_CHECKS}

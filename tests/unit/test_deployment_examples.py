"""The unit of systemd, the compose file, the Kubernetes manifests: valid for their own checkers, and with options that exist."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from compose_spec import PyCompose

from support.forked_commands import ForkedCommands
from support.paths import ROOT

EXAMPLES = ROOT / "examples"
UNIT = (EXAMPLES / "systemd/cdcpipe-spark@.service").read_text()
COMPOSE = (EXAMPLES / "compose/compose.yml").read_text()
MANIFESTS: list[dict[str, Any]] = list(yaml.safe_load_all((EXAMPLES / "kubernetes/cdcpipe-spark.yml").read_text()))
BY_KIND = {manifest["kind"]: manifest for manifest in MANIFESTS}


def check_configuration(text: str, name: str, tmp_path: Path, commands: ForkedCommands) -> dict[str, str]:
    """Check a configuration by `config show run`, and return the options that it sets."""
    file = tmp_path / name
    file.write_text(text)
    ended = commands.cdcpipe_spark("config", "show", "run", "--config", str(file))
    assert ended.code == 0, ended.stderr
    assert "required" not in ended.stdout
    return dict(re.findall(rf"^([\w-]+) = (.*?) +# {re.escape(str(file))}", ended.stdout, re.MULTILINE))


# --- systemd ---


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd-analyze")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "cdcpipe-spark@shop.service"
    unit.write_text(UNIT.replace("/opt/cdcpipe/bin/cdcpipe-spark", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    unit.write_text(UNIT.replace("WatchdogSec", "WatchDogSec"))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    assert "WatchDogSec" in done.stderr


def test_the_unit_has_what_the_program_does() -> None:
    settings = dict(re.findall(r"^(\w+)=(.*)$", UNIT, re.MULTILINE))
    assert settings["Type"] == "notify"
    assert settings["WatchdogSec"]
    assert settings["ExecStart"] == "/opt/cdcpipe/bin/cdcpipe-spark run --config /etc/cdcpipe/%i.toml --log-format json"
    assert settings["KillMode"] == "mixed"
    assert settings["OOMPolicy"] == "continue"  # by default, a process that is killed for lack of memory is a stop in order
    # A database that is away for an hour must not end the service for good; a wrong option does.
    assert (settings["Restart"], settings["StartLimitIntervalSec"]) == ("on-failure", "0")
    assert settings["RestartPreventExitStatus"] == "1"


# --- compose ---


def test_the_compose_file_is_valid() -> None:
    found = PyCompose.from_yaml(COMPOSE)
    found.validate()
    assert set(found.service_names()) == {"postgres", "store", "bucket", "cdcpipe-spark", "prometheus", "grafana"}
    with pytest.raises(ValueError, match="imge"):
        PyCompose.from_yaml(COMPOSE.replace("image:", "imge:", 1))


def test_what_the_compose_file_names_is_there() -> None:
    found = yaml.safe_load(COMPOSE)
    here = EXAMPLES / "compose"
    for service in found["services"].values():
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert (here / source).resolve().exists() if source.startswith(".") else source in found["volumes"], volume
        for config in service.get("configs", ()):
            assert config["source"] in found["configs"]
        assert {*service.get("depends_on", ())} <= {*found["services"]}
    for config in found["configs"].values():
        assert "content" in config or (here / config["file"]).exists()
    build = found["services"]["cdcpipe-spark"]["build"]
    assert (here / build["context"] / build["dockerfile"]).resolve() == EXAMPLES / "Containerfile"
    prometheus = yaml.safe_load((here / "prometheus.yml").read_text())
    assert prometheus["rule_files"] == ["alerts.yml"]
    assert prometheus["scrape_configs"][0]["static_configs"][0]["targets"] == ["cdcpipe-spark:9187"]


def test_the_configuration_of_compose(tmp_path: Path, commands: ForkedCommands) -> None:
    found = check_configuration((EXAMPLES / "compose/shop.toml").read_text(), "shop.toml", tmp_path, commands)
    assert found["metrics"] == '"0.0.0.0:9187"'
    assert found["create-slot"] == "true"
    services = yaml.safe_load(COMPOSE)["services"]
    assert found["dbname"] == f'"{services["postgres"]["environment"]["POSTGRES_DB"]}"'


def test_what_the_container_copies_is_there() -> None:
    text = (EXAMPLES / "Containerfile").read_text()
    copied = [source for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE) for source in line.split()[:-1]]
    assert {"cdcpipe", "cli", "spark_sink", "pyproject.toml"} <= {*copied}
    assert [source for source in copied if not (ROOT / source).exists()] == []


# --- Kubernetes ---


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda manifest: manifest["kind"])
def test_a_manifest_is_valid(manifest: dict[str, Any]) -> None:
    kubernetes_validate.validate(manifest, "1.33", strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest | {"metdata": {}}, "1.33", strict=True)


def test_the_manifests_belong_together(tmp_path: Path, commands: ForkedCommands) -> None:
    text = BY_KIND["ConfigMap"]["data"]["shop.toml"]
    found = check_configuration(text, "shop.toml", tmp_path, commands)
    spec = BY_KIND["StatefulSet"]["spec"]
    pod = spec["template"]["spec"]
    container = pod["containers"][0]
    assert spec["replicas"] == 1
    assert spec["serviceName"] == BY_KIND["Service"]["metadata"]["name"]
    assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"] == BY_KIND["Service"]["spec"]["selector"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    volumes = {volume["name"] for volume in pod["volumes"]} | {claim["metadata"]["name"] for claim in spec["volumeClaimTemplates"]}
    assert {*mounts} == volumes
    assert container["args"] == ["run", "--config", f"{mounts['config']}/shop.toml"]
    assert found["staging"].strip('"').startswith(mounts["state"])
    assert found["metrics"] == f'"0.0.0.0:{container["ports"][0]["containerPort"]}"'
    assert pod["enableServiceLinks"] is False

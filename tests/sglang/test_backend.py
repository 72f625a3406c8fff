"""The backend by itself, on SGLang's real pools: latents, faults in each method, what it refuses."""

from __future__ import annotations

import inspect
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo, MLABufferInfo
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import AsymmetricMHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.storage import StorageBackendFactory
from sglang.srt.mem_cache.utils import get_hash_str, storage_namespace_seed
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from lmcache_core.config import Config, CpuConfig
from lmcache_core.connectors.sglang import HiCacheBackend
from lmcache_core.connectors.sglang.backend import _as_bytes
from lmcache_core.errors import ConfigError, LayoutError
from lmcache_core.keys import page_keys
from lmcache_core.node import Node
from lmcache_core.service.server import NodeServer
from tests.node.kv import until
from tests.sglang.engine import extra_config, prompt
from tests.sglang.models import make_model

LAYOUTS = ("layer_first", "page_first", "page_first_direct")
KEYS = [key.hex() for key in page_keys(prompt(1, 16 * 12), 16)]


@pytest.fixture(autouse=True)
def arguments() -> None:
    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", page_size=16))


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[dict[str, Any]]:
    with Node(Config(64, 16, CpuConfig(capacity=64 << 20))) as made:
        made.servers.append(NodeServer(made, str(tmp_path / "s")))
        yield {"connect": str(tmp_path / "s")}


def latents(layout: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    device = MLATokenToKVPool(
        size=512,
        page_size=16,
        dtype=dtype,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        layer_num=3,
        device="cpu",
        enable_memory_saver=False,
    )
    info = device.get_device_pool_infos()[0].buffer_info
    assert isinstance(info, MLABufferInfo)
    pool = MLATokenToKVPoolHost(
        info,
        1.0,
        0,
        16,
        layout,
        device_capacity_tokens=device.size,
        start_layer=0,
        end_layer=3,
        target_layer_num=3,
        layer_shard_enabled=False,
    )
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape).to(dtype))
    return pool


def storage(cache: Any, rank: int = 0, ranks: int = 1, **options: Any) -> HiCacheStorageConfig:
    return HiCacheStorageConfig(
        tp_rank=rank,
        tp_size=ranks,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=True,
        enable_storage_metrics=True,
        is_page_first_layout=False,
        model_name="m",
        extra_config=extra_config(cache, **{"weights_id": "test", **options}),
    )


@pytest.fixture
def make(cache: dict[str, Any]) -> Iterator[Callable[..., Any]]:
    """Backends, each made and attached as SGLang does it."""
    made: list[Any] = []

    def attach(pool: Any, **more: Any) -> Any:
        backend = StorageBackendFactory.create_backend("dynamic", storage(cache, **more), pool)
        made.append(backend)
        backend.register_mem_pool_host(pool)
        backend.register_mem_host_pool_v2(pool, "kv")
        backend.on_host_pools_registered()
        return backend

    yield attach
    for each in made:
        each.close()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("stored", "read"), list(itertools.product((True, False), repeat=2)))
def test_latents_are_the_same_in_another_rank(make: Callable[..., Any], layout: str, stored: bool, read: bool) -> None:
    first, second = latents(layout), latents(layout)
    writer, reader = make(first, rank=0, ranks=2), make(second, rank=1, ranks=2)
    places, others = first.alloc(12 * 16), second.alloc(14 * 16)[32:]
    pages = [first.get_data_page(int(place)) for place in places[::16]]
    if stored:
        assert writer.batch_set_v1(KEYS, places) == [True] * 12
    else:
        assert writer.batch_set(KEYS, pages)
    until(lambda: reader.batch_exists([*KEYS, "0" * 64]) == 12)
    if read:
        assert reader.batch_get_v1(KEYS, others) == [True] * 12
        got = [second.get_data_page(int(place)) for place in others[::16]]
    else:
        got = reader.batch_get(KEYS, [second.get_dummy_flat_data_page() for _ in KEYS])
    assert all(torch.equal(a, b) for a, b in zip(got, pages, strict=True))


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
def test_keys_and_values_of_different_size(make: Callable[..., Any], layout: str) -> None:
    device = MHATokenToKVPool(
        size=512,
        page_size=16,
        dtype=torch.bfloat16,
        head_num=2,
        head_dim=32,
        v_head_dim=16,
        layer_num=3,
        device="cpu",
        enable_memory_saver=False,
    )
    info = device.get_device_pool_infos()[0].buffer_info
    pools = [
        AsymmetricMHATokenToKVPoolHost(
            info, 1.0, 0, 16, layout, device_capacity_tokens=device.size, start_layer=0, end_layer=3
        )
        for _ in range(2)
    ]
    for pool in pools:
        for buffer in (pool.k_buffer, pool.v_buffer):
            buffer.copy_(torch.randn(buffer.shape).to(torch.bfloat16))
    writer, reader = make(pools[0]), make(pools[1])
    assert writer.batch_set_v1(KEYS[:4], pools[0].alloc(64)) == [True] * 4
    until(lambda: reader.batch_exists(KEYS) == 4)
    assert reader.batch_get_v1(KEYS[:4], pools[1].alloc(128)[64:]) == [True] * 4
    first, behind = (4, 8) if layout == "page_first_direct" else (64, 128)
    for ours, theirs in ((pools[1].k_buffer, pools[0].k_buffer), (pools[1].v_buffer, pools[0].v_buffer)):
        assert torch.equal(ours[first:behind], theirs[:first])


def test_one_page_at_a_time(make: Callable[..., Any]) -> None:
    pool = latents("page_first")
    backend = make(pool)
    page = pool.get_data_page(0)
    assert not backend.exists(KEYS[0])
    assert backend.get(KEYS[0], pool.get_dummy_flat_data_page()) is None
    assert backend.set(KEYS[0], page)
    assert backend.exists(KEYS[0])
    got = backend.get(KEYS[0], pool.get_dummy_flat_data_page())
    assert torch.equal(got, page)


def test_ranks_that_hold_the_same_do_not_store_it(make: Callable[..., Any]) -> None:
    pool = latents("page_first")
    backend = make(pool, rank=1, ranks=2)
    assert backend.batch_set_v1(KEYS[:2], pool.alloc(32)) == [True, True]
    assert backend.batch_exists(KEYS[:2]) == 0


def test_a_page_that_is_not_there_is_left_alone(make: Callable[..., Any]) -> None:
    pool = latents("page_first")
    backend = make(pool)
    places = pool.alloc(4 * 16)
    backend.batch_set_v1(KEYS[:2], places[:32])
    before = pool.kv_buffer.clone()
    assert backend.batch_get_v1([*KEYS[:2], "0" * 64, "1" * 64], places) == [True, True, False, False]
    assert torch.equal(pool.kv_buffer, before)


def test_another_model_under_the_same_served_name_finds_nothing(make: Callable[..., Any], tmp_path: Path) -> None:
    found = []
    for number, seed in enumerate((1, 2, 1)):
        place = make_model(tmp_path / str(number), seed)
        set_global_server_args_for_scheduler(ServerArgs(model_path=str(place), served_model_name="m", page_size=16))
        pool = latents("page_first")
        backend = make(pool, weights_id="")
        found.append(backend.batch_exists(KEYS[:4]))
        if not number:
            assert backend.batch_set_v1(KEYS[:4], pool.alloc(64)) == [True] * 4
    assert found == [0, 0, 4]


def test_kv_of_another_type_is_not_found(make: Callable[..., Any]) -> None:
    """Of the same model and the same number of bytes."""
    pool = latents("page_first")
    assert make(pool).batch_set_v1(KEYS[:4], pool.alloc(64)) == [True] * 4
    assert make(latents("page_first", torch.float16)).batch_exists(KEYS[:4]) == 0
    assert make(latents("page_first")).batch_exists(KEYS[:4]) == 4


@pytest.mark.parametrize("other", [("lora", None), (None, "tenant"), ("lora", "tenant")])
def test_requests_with_an_adapter_or_a_salt_and_those_without_find_nothing_of_each_other(
    make: Callable[..., Any], other: tuple[str | None, str | None]
) -> None:
    from array import array

    tokens = array("q", prompt(7, 64))
    plain, kept_apart = (list(get_hash_str(tokens, seed, 16)) for seed in (None, storage_namespace_seed(*other)))
    pool = latents("page_first")
    backend, places = make(pool), pool.alloc(64)
    assert backend.batch_set_v1(plain, places) == [True] * 4
    assert backend.batch_exists(kept_apart) == 0
    assert backend.batch_get_v1(kept_apart, places) == [False] * 4
    assert backend.batch_set_v1(kept_apart, places) == [True] * 4
    assert (backend.batch_exists(plain), backend.batch_exists(kept_apart)) == (4, 4)


def states() -> Any:
    """A host pool of recurrent state, with numbers in it."""
    info = MambaStateBufferInfo(
        conv=(torch.zeros(3, 8, 6, 4, dtype=torch.bfloat16),), temporal=torch.zeros(3, 8, 2, 5, 7, dtype=torch.float32)
    )
    pool = MambaPoolHost(info, 2.0, 0, device_capacity=8, pin_memory=False, layout="page_first")
    for buffer in (pool.temporal_buffer, *pool.conv_buffer):
        buffer.copy_(torch.randn(buffer.shape).to(buffer.dtype))
    return pool


def test_recurrent_state_is_found_where_it_was_taken(make: Callable[..., Any]) -> None:
    pool, first, second = latents("page_first"), states(), states()
    writer, reader = make(pool), make(latents("page_first"))
    writer.register_mem_host_pool_v2(first, "mamba")
    reader.register_mem_host_pool_v2(second, "mamba")
    places = pool.alloc(12 * 16)
    assert writer.batch_set_v1(KEYS, places) == [True] * 12

    def transfer(keys: list[str], slots: list[int]) -> PoolTransfer:
        return PoolTransfer(
            PoolName.MAMBA,
            host_indices=torch.tensor(slots),
            keys=keys,
            hit_policy=PoolHitPolicy.TRAILING_PAGES,
        )

    stored = writer.batch_set_v2([transfer([KEYS[4], KEYS[8]], [3, 5])])
    assert stored == {PoolName.MAMBA: [True, True]}
    asked = [transfer([KEYS[11]], [0])]
    until(lambda: reader.batch_exists_v2(KEYS, asked).kv_hit_pages == 9)
    found = reader.batch_exists_v2([*KEYS, "0" * 64], asked)
    assert (found.restorable_prefix_pages, found.extra_pool_hit_pages) == ([5, 9], {"kv": 12, "mamba": 9})
    got = reader.batch_get_v2([transfer([KEYS[8], KEYS[7]], [2, 7])])
    assert got == {PoolName.MAMBA: [True, False]}
    for ours, theirs in zip(
        (second.temporal_buffer, *second.conv_buffer), (first.temporal_buffer, *first.conv_buffer), strict=True
    ):
        assert torch.equal(ours[2], theirs[5])
    writer.clear()
    assert reader.batch_exists_v2(KEYS, asked).kv_hit_pages == 0


CALLS: dict[str, tuple[tuple[Any, ...], Any]] = {
    "batch_exists": ((KEYS[:2],), 0),
    "exists": ((KEYS[0],), False),
    "batch_get_v1": ((KEYS[:2], torch.arange(32)), [False, False]),
    "batch_set_v1": ((KEYS[:2], torch.arange(32)), [False, False]),
    "batch_get": ((KEYS[:2], [torch.zeros(8), torch.zeros(8)]), [None, None]),
    "batch_set": ((KEYS[:2], [torch.zeros(8), torch.zeros(8)]), False),
    "get": ((KEYS[0], torch.zeros(8)), None),
    "set": ((KEYS[0], torch.zeros(8)), False),
    "clear": ((), None),
    "batch_exists_v2": ((KEYS[:2], []), PoolTransferResult(0, {})),
    "batch_get_v2": (([PoolTransfer(PoolName.SWA, keys=KEYS[:2])],), {PoolName.SWA: [False, False]}),
    "batch_set_v2": (([PoolTransfer(PoolName.SWA, keys=KEYS[:2])],), {PoolName.SWA: [False, False]}),
}


@pytest.mark.parametrize("method", CALLS)
def test_no_fault_reaches_the_engine(
    make: Callable[..., Any], method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backend = make(latents("page_first"))

    def broken(*_: Any) -> Any:
        raise RuntimeError("boom")

    monkeypatch.setattr(backend, "_stores", broken)
    arguments, expected = CALLS[method]
    for _ in range(3):
        assert getattr(backend, method)(*arguments) == expected
    if method.startswith("batch_"):
        names = list(inspect.signature(getattr(backend, method)).parameters)
        assert getattr(backend, method)(**dict(zip(names, arguments, strict=False))) == expected
    assert backend.faults >= 3
    assert [record.message.count("boom") for record in caplog.records if "boom" in record.message] == [1]


@pytest.mark.parametrize(
    "call",
    [
        lambda backend: backend.batch_get_v1(["nonsense"], torch.arange(16)),
        lambda backend: backend.batch_get_v1(["00"], torch.arange(16)),
        lambda backend: backend.batch_get_v1([None], torch.arange(16)),
        lambda backend: backend.batch_get_v1(KEYS[:1], torch.arange(32)),
        lambda backend: backend.batch_get_v1(KEYS[:1], torch.arange(8, 24)),
        lambda backend: backend.batch_get_v1(KEYS[:1], torch.arange(10**6, 10**6 + 16)),
        lambda backend: backend.batch_set_v1(KEYS[:1], torch.arange(5)),
    ],
)
def test_what_cannot_be_meant_is_a_miss(make: Callable[..., Any], call: Callable[[Any], Any]) -> None:
    backend = make(latents("page_first"))
    assert call(backend) == [False]
    assert backend.faults == 1


def test_statistics_tell_what_was_done_since_they_were_last_asked_for(make: Callable[..., Any]) -> None:
    pool = latents("page_first")
    backend = make(pool)
    places = pool.alloc(12 * 16)
    backend.batch_set_v1(KEYS[:8], places[: 8 * 16], HiCacheStorageExtraInfo(prefix_keys=[]))
    backend.batch_get_v1(KEYS[:4], places[: 4 * 16])
    stats = backend.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([8], [4])
    assert len(stats.backup_bandwidth) == len(stats.prefetch_bandwidth) == 1
    assert backend.get_stats().backup_pgs == []


def test_a_closed_backend_has_nothing(make: Callable[..., Any]) -> None:
    backend = make(latents("page_first"))
    backend.close()
    backend.close()
    assert backend.batch_exists(KEYS) == 0
    assert backend.batch_get_v1(KEYS[:1], torch.arange(16)) == [False]
    assert backend.batch_set_v1(KEYS[:1], torch.arange(16)) == [False]


def test_other_pools_are_refused_by_name(make: Callable[..., Any]) -> None:
    pool = latents("page_first")
    backend = make(pool)
    with pytest.raises(LayoutError, match=r"host pool 'indexer' \(MLATokenToKVPoolHost\)"):
        backend.register_mem_host_pool_v2(pool, "indexer")
    assert backend.batch_exists(KEYS) == 0  # it is closed


def test_options_that_cannot_be_used_are_refused(cache: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="did you mean 'read_timeout'"):
        HiCacheBackend(storage(cache, read_time_out=1))
    backend = HiCacheBackend(storage({"cpu": {"capacity": "nonsense"}}))
    with pytest.raises(ConfigError, match="capacity"):
        backend.register_mem_pool_host(latents("page_first"))


def test_weights_that_were_changed_in_place_are_others(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lmcache_core.connectors.sglang import engine

    pool = latents("page_first")
    backend, other = make(pool), make(pool)
    places = pool.alloc(32)
    assert backend.batch_set_v1(KEYS[:2], places) == [True, True]
    monkeypatch.setattr(engine, "weights_now", lambda: ("v2", 1))
    assert backend.batch_exists(KEYS[:2]) == 0
    assert backend.batch_set_v1(KEYS[:2], places) == [True, True]
    until(lambda: other.batch_exists(KEYS[:2]) == 2)  # the other ranks of this engine find them
    monkeypatch.setattr(engine, "weights_now", lambda: ("v3", 2))
    assert other.batch_exists(KEYS[:2]) == 0


def test_weights_are_changed_until_what_they_computed_is_forgotten(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is stored in between may have been computed by either."""
    from lmcache_core.connectors.sglang import engine

    monkeypatch.setattr(engine, "updates", engine._Updates())
    pool = latents("page_first")
    backend, places = make(pool), pool.alloc(32)
    assert backend.batch_set_v1(KEYS[:2], places) == [True, True]
    engine.updates.forgotten()
    assert backend.batch_exists(KEYS[:2]) == 2
    engine.updates.begin()
    assert backend.batch_exists(KEYS[:2]) == 0
    assert backend.batch_set_v1(KEYS[:2], places) == [True, True]
    assert backend.batch_exists(KEYS[:2]) == 2
    engine.updates.forgotten()
    assert backend.batch_exists(KEYS[:2]) == 0
    assert backend.batch_set_v1(KEYS[:2], places) == [True, True]
    engine.updates.forgotten()
    assert backend.batch_exists(KEYS[:2]) == 2
    until(lambda: make(pool).batch_exists(KEYS[:2]) == 2)  # attached anew, for the weights of now


def test_ranks_agree_on_what_stands_for_weights_that_were_changed_and_engines_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks meet in a store. Another engine may have the same names and versions, but has another store."""
    from torch.distributed import distributed_c10d

    from lmcache_core.connectors.sglang import engine

    made: Any = torch.distributed

    def as_seen_from(store: Any) -> int:
        monkeypatch.setattr(distributed_c10d, "_get_default_store", lambda: store)
        engine.secret.cache_clear()
        return engine.epoch_of(("v2", 1))

    try:
        first = made.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        second = made.TCPStore("127.0.0.1", first.port, None, is_master=False)
        other = made.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        assert as_seen_from(second) == as_seen_from(first) == as_seen_from(second)
        assert as_seen_from(other) != as_seen_from(first)
        monkeypatch.undo()
        engine.secret.cache_clear()
        alone = engine.secret()  # no group in this process
        assert alone == engine.secret()
        engine.secret.cache_clear()
        assert alone != engine.secret()
    finally:
        engine.secret.cache_clear()


def test_sglang_is_watched_once() -> None:
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    from lmcache_core.connectors.sglang import engine

    assert engine.watch_updates()
    before = UnifiedRadixCache.reset
    assert engine.watch_updates()
    assert UnifiedRadixCache.reset is before


@pytest.mark.parametrize(("adapter", "salt"), [(None, None), ("lora", None), (None, "tenant")])
def test_names_of_pages_are_our_keys(adapter: str | None, salt: str | None) -> None:
    from array import array

    tokens = prompt(5, 96)
    seed = storage_namespace_seed(adapter, salt)
    hashes = get_hash_str(array("q", tokens), seed, 16)
    assert _as_bytes(hashes) == page_keys(tokens, 16, bytes.fromhex(seed) if seed else b"")


def test_the_extra_configuration_is_json() -> None:
    assert json.loads(json.dumps(extra_config("cache.yaml")))["class_name"] == "HiCacheBackend"

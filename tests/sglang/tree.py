"""SGLang's real radix tree, controller and pools on CPU tensors, without an engine: what is computed is what a test
writes."""

from __future__ import annotations

import contextlib
import json
import threading
import unittest
from array import array
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, MatchPrefixParams
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from sglang.test.kits.unified_radix_cache import fixtures
from sglang.test.kits.unified_radix_cache.config import CacheConfig
from sglang.test.kits.unified_radix_cache.fixtures import build_fixture, drop_hicache_atexit_pin
from sglang.test.kits.unified_radix_cache.storage import UnifiedRadixCacheStorageFixtures

from tests.sglang.engine import extra_config

__all__ = ["HEADS", "LAYERS", "Tree"]

LAYERS, HEADS, DIM = 4, 2, 32


def _latents(*, head_num: int, head_dim: int, **settings: Any) -> Any:
    """A pool of latents in the place of one of heads."""
    return MLATokenToKVPool(kv_lora_rank=head_num * head_dim, qk_rope_head_dim=DIM // 2, **settings)


class Tree(UnifiedRadixCacheStorageFixtures, unittest.TestCase):  # type: ignore[misc, unused-ignore]
    """One engine's cache, with ours behind it.

    Args:
        cache: Our configuration.
        layout: Of the host pool.
        v1: Whether SGLang uses its interface without copies.
        page: Tokens of a page.
        policy: Of prefetches.
        window: Tokens of a sliding window that every other layer has.
        latent: Whether KV is latents (MLA), and not heads.
        options: Others of the extra configuration.
    """

    __test__ = False  # it is no test itself

    def __init__(
        self,
        cache: Mapping[str, Any],
        layout: str,
        *,
        v1: bool = True,
        page: int = 16,
        policy: str = "wait_complete",
        window: int | None = None,
        latent: bool = False,
        **options: Any,
    ) -> None:
        super().__init__("runTest")
        self.page = page
        self.cfg = CacheConfig(
            page_size=page,
            components=(ComponentType.FULL,) if window is None else (ComponentType.FULL, ComponentType.SWA),
            sliding_window_size=window,
            full_attention_layer_ids=(1, 3),
            num_layers=LAYERS,
            kv_size=1024,
            max_context_len=1024,
            head_num=HEADS,
            head_dim=DIM,
        )
        made = mock.patch.object(fixtures, "MHATokenToKVPool", _latents) if latent else contextlib.nullcontext()
        with made:
            self.cache, self.allocator, self.requests = build_fixture(self.cfg)
        assert isinstance(self.allocator.get_kvcache(), MLATokenToKVPool) is latent
        ranks = get_parallel().override(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1)
        ranks.__enter__()
        self.addCleanup(ranks.__exit__, None, None, None)
        extra = extra_config(dict(cache), interface_v1=int(v1), prefetch_threshold=1, weights_id="test", **options)
        arguments = ServerArgs(
            model_path="dummy",
            page_size=page,
            hicache_io_backend="direct" if layout == "page_first_direct" else "kernel",
            hicache_mem_layout=layout,
            hicache_write_policy="write_through",
            hicache_storage_backend="dynamic",
            hicache_storage_backend_extra_config=json.dumps(extra),
            hicache_storage_prefetch_policy=policy,
            served_model_name="dummy",
        )
        arguments._mamba_cache_chunk_size = 64
        set_global_server_args_for_scheduler(arguments)
        self.cache.init_hicache(arguments, self.cache.cache_init_params)
        self.addCleanup(drop_hicache_atexit_pin, self.cache)
        self.addCleanup(self.cache.release_host_resources)
        self.cache.write_through_threshold = 1 << 30
        self.cache.load_back_threshold = 0
        controller = self.cache.cache_controller
        controller.prefetch_capacity_limit = max(controller.prefetch_capacity_limit, controller.mem_pool_host.size)
        self.addCleanup(self.cache.detach_storage_backend)
        self._requests = 0

    def runTest(self) -> None:
        """For `unittest`, which wants one."""

    def __enter__(self) -> Tree:
        return self

    def __exit__(self, *_: object) -> None:
        self.doCleanups()

    @property
    def backend(self) -> Any:
        """Ours, or SGLang's injector of faults around it."""
        return self.cache.cache_controller.storage_backend

    @property
    def threads(self) -> list[threading.Thread]:
        """SGLang's own, that look up, read and store."""
        found = [each for each in vars(self.cache.cache_controller).values() if isinstance(each, threading.Thread)]
        assert len(found) >= 3
        return found

    def _match(self, tokens: Sequence[int]) -> Any:
        return self.cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens))))

    def _numbers(self, matched: Any) -> list[torch.Tensor]:
        """KV of all tokens; of layers with a window, of those in it."""
        places = self.cache.path_device_indices(matched.last_device_node)
        return [buffer[part].clone() for buffer, part in self._buffers(places)]

    def _buffers(self, places: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """All buffers, and the places of these tokens in them."""
        window, pool = self.cfg.sliding_window_size, self.allocator.get_kvcache()
        if isinstance(pool, MLATokenToKVPool):
            return [(buffer, places) for buffer in pool.kv_buffer]
        if window is None:
            return [(buffer, places) for buffer in (*pool.k_buffer, *pool.v_buffer)]
        inside = self.allocator.full_to_swa_index_mapping[places[-window:]]
        full, swa = pool.full_kv_pool, pool.swa_kv_pool
        return [
            *((buffer, places) for buffer in (*full.k_buffer, *full.v_buffer)),
            *((buffer, inside) for buffer in (*swa.k_buffer, *swa.v_buffer)),
        ]

    def compute(self, tokens: Sequence[int]) -> list[torch.Tensor]:
        """Make KV up for a prompt and store what is new of it. Returns all of it."""
        before = self._match(tokens).device_prefix_len
        self._insert(self.cache, self.allocator, self.requests, list(tokens))
        matched = self._match(tokens)
        places = self.cache.path_device_indices(matched.last_device_node)[before:]
        for buffer, part in self._buffers(places):
            buffer[part] = torch.randn(len(part), *buffer.shape[1:]).to(buffer.dtype)
        self._backup_node(self.cache, matched.last_device_node)
        self._write_path_to_l3(self.cache, matched.last_device_node)
        self._flush_l3_backups(self.cache)
        return self._numbers(matched)

    def hashes(self, tokens: Sequence[int]) -> list[str]:
        """SGLang's names of a prompt's pages."""
        return list(self._all_page_hashes(self.cache, self._match(tokens).last_device_node))

    def prefetch(self, tokens: Sequence[int]) -> int:
        """Have pages of a prompt brought from storage. Returns how many tokens have come."""
        self._requests += 1
        request = CacheRequestHandle(f"r{self._requests}", 0)
        self.cache.prefetch_from_storage(request, self.cache.root_node_handle(), array("q", tokens), None, None)
        self._run_prefetch_to_completion(self.cache, request)
        return int(self.cache.pop_prefetch_loaded_tokens(request))

    def load(self, tokens: Sequence[int]) -> list[torch.Tensor]:
        """Bring what has come of a prompt to the device. Returns its KV there."""
        self._load_back_through_admission(self.cache, self.requests, list(tokens))
        self._finish_pending_loads(self.cache)
        matched = self._match(tokens)
        assert matched.device_prefix_len == len(tokens)
        return self._numbers(matched)

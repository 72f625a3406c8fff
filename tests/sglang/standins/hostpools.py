"""Have SGLang's host pools work where the device is the CPU: memory that is not pinned, and copies between the two
pools by torch in place of CUDA kernels. What lies between host pool and storage is SGLang's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["activate"]


def _pairs(pool: Any, layer: int, host: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor, Any]]:
    """Device buffer, host buffer and the places in it of one layer's tokens, for K and for V, or for latents."""
    size = pool.page_size
    page, slot = host // size, host % size
    latent = hasattr(pool, "kv_cache_dim")
    devices = [pool.device_kv_buffers] if latent else [pool.device_k_buffers, pool.device_v_buffers]
    planes = [pool.kv_buffer] if latent else [pool.kv_buffer[0], pool.kv_buffer[1]]
    for device, plane in zip(devices, planes, strict=True):
        where: Any
        if pool.layout == "layer_first":
            where = (layer, host)
        elif pool.layout == "page_first":
            where = (host, layer)
        elif pool.layout == "page_first_direct":
            where = (page, layer, slot)
        else:  # page_head: [page][head][token][layer][dim]
            where = (page, slice(None), slot, layer)
        yield device[layer], plane, where


def _load(
    self: Any,
    device_pool: Any,
    host_indices: torch.Tensor,
    device_indices: torch.Tensor,
    layer_id: int,
    io_backend: str,
    *,
    is_draft: bool = False,
) -> None:
    host, device = host_indices.cpu().long(), device_indices.cpu().long()
    for target, plane, where in _pairs(self, layer_id, host):
        target[device] = plane[where].reshape(target[device].shape)


def _save(
    self: Any, device_pool: Any, host_indices: torch.Tensor, device_indices: torch.Tensor, io_backend: str
) -> None:
    host, device = host_indices.cpu().long(), device_indices.cpu().long()
    for layer in range(self.layer_num):
        for source, plane, where in _pairs(self, layer, host):
            plane[where] = source[device].reshape(plane[where].shape)


def _without_pinning(kind: Any) -> None:
    make = kind.__init__

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs | {"pin_memory": False})

    kind.__init__ = made


def activate() -> None:
    """Called by SGLang's plugin system in each of its processes, or by a test."""
    from sglang.srt.managers.cache_controller import HiCacheController
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
    from sglang.srt.mem_cache.pool_host import base, common, mha, mla

    # SGLang leaves 10 GiB of a machine's memory to others, which are tests of vLLM here; pools of tests take some MiB.
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 1 << 30

    def allocate(
        dims: Any, dtype: Any, device: Any, pin_memory: bool, allocator: Any, registration_granularity_bytes: Any = None
    ) -> Any:
        return allocator.allocate(dims, dtype=dtype, device=device)

    common.ALLOC_MEMORY_FUNCS["cpu"] = allocate
    for kind in (mha.MHATokenToKVPoolHost, mla.MLATokenToKVPoolHost):
        _without_pinning(kind)
        kind.load_to_device_per_layer = _load
        kind.backup_from_device_all_layer = _save

    def on_host(self: Any, host_indices: torch.Tensor, device_indices: torch.Tensor) -> Any:
        return host_indices.cpu(), device_indices.cpu()

    def of_pool_on_host(
        self: Any, pool: Any, host_indices: torch.Tensor, device_indices: torch.Tensor, *, write_back_jit: bool
    ) -> Any:
        return host_indices.cpu(), device_indices.cpu()

    HiCacheController.move_indices = on_host
    HybridCacheController._move_pool_indices = of_pool_on_host

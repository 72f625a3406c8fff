"""Memory for the KV of one request, with room for what is still to come.

transformers' own cache grows by concatenation: every forward pass copies all KV of every layer. Here all layers lie in
one block of memory with room at the end, `[layer][K, V][kv_head][token][head_size]`, to which new tokens are written in
place. The cache restores into the same block before the first pass and stores from it after the last.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

__all__ = ["Arena", "ArenaCache", "Shape"]

HUGE = 2 << 20


class Shape(NamedTuple):
    """What the KV of a token is."""

    layers: int
    kv_heads: int
    head_size: int
    dtype: torch.dtype
    device: torch.device


class Arena:
    """KV of one request. `capacity` tokens fit; more make it move to a larger block of memory."""

    def __init__(self, shape: Shape, capacity: int, step: int = 1) -> None:
        self.shape = shape
        self._step = step
        self._block = self._allocate(capacity)

    def _allocate(self, capacity: int) -> torch.Tensor:
        shape = self.shape
        capacity = -(-capacity // self._step) * self._step
        return allocate((shape.layers, 2, shape.kv_heads, capacity, shape.head_size), shape.dtype, shape.device)

    @property
    def capacity(self) -> int:
        return int(self._block.shape[3])

    def layer(self, index: int, tokens: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer as `[1, kv_head, token, head_size]`: of the first `tokens` tokens, or all there is room
        for."""
        keys, values = self._block[index, :, None, :, :tokens]
        return keys, values

    def layers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """K and V of all layers."""
        return [self.layer(index) for index in range(self.shape.layers)]

    def reserve(self, tokens: int) -> None:
        """Make sure that there is room for `tokens` tokens. What is there is kept, maybe elsewhere in memory."""
        old = self.capacity
        if tokens > old:
            block = self._allocate(max(tokens, old + old // 4))
            block[..., :old, :] = self._block
            self._block = block


class ArenaLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """A layer of a `DynamicCache` that lives in an arena.

    `keys` and `values` are views of the arena. Whatever replaces them (beam search, a batch) takes the layer out of the
    arena, and from then on it grows as any other.
    """

    def __init__(self, arena: Arena, index: int, tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._arena = arena
        self._index = index
        self.dtype = arena.shape.dtype
        self.device = arena.shape.device
        self._see(tokens)
        self.is_initialized = True

    def _see(self, tokens: int) -> None:
        self.keys, self.values = self._own = self._arena.layer(self._index, tokens)

    @property
    def in_arena(self) -> bool:
        return self.keys is self._own[0] and self.values is self._own[1]

    @property
    def tokens(self) -> int:
        """Number of tokens whose KV lies in the arena."""
        return self._own[0].shape[2] if self.in_arena else 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.in_arena or key_states.shape[0] != 1:
            keys, values = super().update(key_states, value_states, *args, **kwargs)
            return keys, values
        start = self._own[0].shape[2]
        end = start + key_states.shape[2]
        self._arena.reserve(end)
        self._see(end)
        keys, values = self._own
        keys[:, :, start:] = key_states
        values[:, :, start:] = value_states
        return keys, values


class ArenaCache(DynamicCache):
    """A `DynamicCache` whose layers live in one arena, the first `tokens` tokens filled already."""

    def __init__(self, arena: Arena, tokens: int) -> None:
        super().__init__()
        self.arena = arena
        self.layer_class_to_replicate = None
        self.layers = [ArenaLayer(arena, index, tokens) for index in range(arena.shape.layers)]

    @property
    def tokens(self) -> int:
        """Number of tokens whose KV lies in the arena, in every layer."""
        return min(layer.tokens if isinstance(layer, ArenaLayer) else 0 for layer in self.layers)


def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of no particular content. In host memory it is taken in huge pages where the system has them: touching
    200 MB for the first time then takes 20 instead of 110 ms."""
    count = 1
    for size in shape:
        count *= size
    nbytes = count * dtype.itemsize
    if device.type != "cpu" or nbytes < HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)

"""An engine with a Llama 3 8B: its paged KV in host memory, its prompts, and caches for it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import Buffer
from lmcache_core.cache import Cache
from lmcache_core.frame import shape
from lmcache_core.namespace import Encoding, Group, GroupKind, Namespace
from lmcache_transfer.cpu import CpuTransfer

__all__ = ["CHUNK_TOKENS", "PAGE_TOKENS", "Engine", "Nothing", "namespace", "opened"]

CHUNK_TOKENS, PAGE_TOKENS = 256, 64
PAGES = CHUNK_TOKENS // PAGE_TOKENS
HEADS, DIM, ELEMENT = 8, 128, 2
VOCABULARY = 128_256


def namespace(page_layer_bytes: int, layers: int = 1, block_tokens: int = PAGE_TOKENS) -> Namespace:
    """A model with one group of full attention."""
    group = Group(
        kind=GroupKind.FULL,
        layers=tuple(range(layers)),
        page_layer_bytes=page_layer_bytes,
        dtype="bfloat16",
        kv_heads=HEADS,
        head_size=page_layer_bytes // (2 * PAGE_TOKENS * HEADS * ELEMENT),
    )
    strides = (HEADS * DIM * ELEMENT, DIM * ELEMENT, ELEMENT)
    encoding = Encoding(layout="native", engine="benchmark", block_tokens=block_tokens, strides=strides)
    return Namespace(weights="benchmark", groups=(group,), page_tokens=PAGE_TOKENS, encoding=encoding)


class Engine:
    """Blocks of `block_tokens` tokens, `[2, blocks, block, head, dim]`, in a tensor of its own for each layer. A prompt
    of `chunks` chunks has two thirds of them, in random order."""

    def __init__(self, layers: int, chunks: int, block_tokens: int) -> None:
        self.tokens = chunks * CHUNK_TOKENS
        used = self.tokens // block_tokens
        self.layers = [_tensor((2, used * 3 // 2, block_tokens, HEADS, DIM)) for _ in range(layers)]
        self.block_ids = np.random.default_rng(0).permutation(used * 3 // 2)[:used].tolist()
        self.kv = CpuTransfer().register(self.layers, dims="2bthd", page_tokens=PAGE_TOKENS)
        self.namespace = namespace(self.kv.page_layer_bytes, layers, block_tokens)
        self.chunk_bytes = PAGES * self.namespace.groups[0].page_bytes
        self.nbytes = chunks * self.chunk_bytes
        self.frame_bytes = shape(PAGES, 1, self.namespace.groups[0].page_bytes).nbytes
        self._random = np.random.default_rng(1)

    def view(self) -> Any:
        """The KV of the prompt, as an engine makes it for every request."""
        return self.kv.view(self.block_ids)

    def prompt(self) -> list[int]:
        """Tokens that were never seen before."""
        tokens: list[int] = self._random.integers(0, VOCABULARY, self.tokens).tolist()
        return tokens

    def check(self, cache: Cache, source: str = "cpu") -> None:
        """Store a prompt, scramble the engine's memory, and see that a retrieve from `source` puts it right."""
        for number, layer in enumerate(self.layers):
            layer[:] = np.arange(layer.size, dtype=np.uint16).reshape(layer.shape) * (2 * number + 1)
        before = [layer[:, self.block_ids].copy() for layer in self.layers]
        tokens = self.prompt()
        assert cache.store(tokens, self.view()).wait()
        for layer in self.layers:
            layer[:] = 1
        if source != "cpu":
            cache.clear(["cpu"])
        found = cache.retrieve(tokens, self.view())
        assert found.tiers == {source: self.tokens}, found
        for layer, kept in zip(self.layers, before, strict=True):
            assert np.array_equal(layer[:, self.block_ids], kept)


class Nothing:
    """A view whose copies do nothing, so that what is left is the cache's own work."""

    def gather(self, group: int, first_page: int, pages: int, into: memoryview) -> None:
        """See `KVView`."""

    def scatter(self, group: int, first_page: int, pages: int, source: memoryview) -> None:
        """See `KVView`."""


@contextmanager
def opened(space: Namespace, capacity: int, tiers: tuple[Mapping[str, Any], ...] = ()) -> Iterator[Cache]:
    """A cache whose pool is faulted in."""
    config = {"chunk_tokens": CHUNK_TOKENS, "page_tokens": PAGE_TOKENS, "cpu": {"capacity": capacity}}
    with Cache.open({**config, "tiers": list(tiers)}, space) as cache:
        while (stats := cache.stats()).pool_usable < stats.pool_capacity:
            time.sleep(0.01)
        yield cache


def _tensor(shape: tuple[int, ...]) -> NDArray[np.uint16]:
    """As torch allocates what is large: from the kernel, 64 bytes behind the start of a page. Made by numpy, those of a
    second engine would lie in the heap, where the first one's were."""
    size = math.prod(shape) * ELEMENT
    return Buffer(size + 64, shared=False).array[64 : 64 + size].view(np.uint16).reshape(shape)

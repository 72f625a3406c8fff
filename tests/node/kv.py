"""KV for tests: pages whose bytes follow from their key, views over numpy, and nodes over any backends."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lmcache_core import Cache, Encoding, Group, GroupKind, Namespace
from lmcache_core.config import Config, CpuConfig, TierConfig
from lmcache_core.direct import DirectClient
from lmcache_core.errors import LayoutError
from lmcache_core.node import Node
from lmcache_core.protocols import StorageBackend

PAGE_TOKENS = 16
CHUNK_TOKENS = 64
PAGE_BYTES = 4 * 1024
CHUNK_FRAME = 4096 + 4 * PAGE_BYTES


def namespace(kinds: str = "f", weights: str = "model", **changes: Any) -> Namespace:
    """One group a letter: `f`ull, `w`indow of 32 tokens, `s`tate."""
    groups = []
    for number, kind in enumerate(kinds):
        groups.append(
            Group(
                kind={"f": GroupKind.FULL, "w": GroupKind.WINDOW, "s": GroupKind.STATE}[kind],
                layers=(2 * number, 2 * number + 1),
                page_layer_bytes=PAGE_BYTES // 2,
                dtype="float32",
                kv_heads=2,
                head_size=8,
                window_tokens=32 if kind == "w" else None,
            )
        )
    settings: dict[str, Any] = {
        "weights": weights,
        "groups": tuple(groups),
        "page_tokens": PAGE_TOKENS,
        "encoding": Encoding(layout="canonical"),
    }
    return Namespace(**settings | changes)


class PageView:
    """Pages of a prompt as rows of numpy arrays, one array a group. Counts what is copied."""

    def __init__(self, pages: int, groups: int = 1) -> None:
        self.rows = [np.zeros((pages, PAGE_BYTES), np.uint8) for _ in range(groups)]
        self.gathered: list[tuple[int, int, int]] = []
        self.scattered: list[tuple[int, int, int]] = []

    @classmethod
    def of(cls, keys: Sequence[bytes], groups: int = 1) -> PageView:
        """The KV of a prompt: each page is a stream that follows from its key and group."""
        view = cls(len(keys), groups)
        for group in range(groups):
            for number, key in enumerate(keys):
                view.rows[group][number] = page(key, group)
        return view

    def gather(self, group: int, first_page: int, pages: int, into: memoryview) -> None:
        self._check(first_page, pages, len(into))
        self.gathered.append((group, first_page, pages))
        np.frombuffer(into, np.uint8).reshape(pages, -1)[:] = self.rows[group][first_page : first_page + pages]

    def scatter(self, group: int, first_page: int, pages: int, source: memoryview) -> None:
        self._check(first_page, pages, len(source))
        assert source.readonly
        self.scattered.append((group, first_page, pages))
        self.rows[group][first_page : first_page + pages] = np.frombuffer(source, np.uint8).reshape(pages, -1)

    def _check(self, first_page: int, pages: int, nbytes: int) -> None:
        if first_page + pages > len(self.rows[0]) or nbytes != pages * PAGE_BYTES:
            raise LayoutError("the view is smaller than that")

    def wrong(self, keys: Sequence[bytes], pages: int, group: int = 0, first: int = 0) -> int:
        """How many of the pages `[first, pages)` are not those of the prompt."""
        return sum(not np.array_equal(self.rows[group][n], page(keys[n], group)) for n in range(first, pages))


def page(key: bytes, group: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    seed = int.from_bytes(key[:8], "little") + group
    return np.random.default_rng(seed).integers(0, 256, PAGE_BYTES, np.uint8)


def tokens(text: str, each: int = PAGE_TOKENS) -> list[int]:
    """Token ids: each letter is a page of that letter."""
    return [ord(letter) for letter in text for _ in range(each)]


def open_cache(
    *backends: StorageBackend,
    slots: int = 8,
    kinds: str = "f",
    tiers: Sequence[dict[str, Any]] = (),
    **settings: Any,
) -> Cache:
    """A cache over a node with a pool of `slots` full chunks and the backends as tiers `t0`, `t1`, ..."""
    rules = [
        TierConfig(backend="test", **{"name": f"t{n}"} | (tiers[n] if n < len(tiers) else {}))
        for n in range(len(backends))
    ]
    config = Config(
        chunk_tokens=CHUNK_TOKENS,
        page_tokens=PAGE_TOKENS,
        cpu=CpuConfig(capacity=slots * CHUNK_FRAME),
        tiers=tuple(rules),
        **settings,
    )
    return Cache(DirectClient(Node(config, backends), owns=True), namespace(kinds))


def store(cache: Cache, text: str, groups: int = 1) -> bool:
    """Store the prompt of `text` and wait for its arrival on the tiers."""
    prompt = cache.prompt(tokens(text))
    return cache.store(prompt, PageView.of(prompt.keys, groups)).wait(10)


def retrieve(cache: Cache, text: str, **arguments: Any) -> int:
    """Retrieve the prompt of `text`, check every byte, and return its pages."""
    prompt = cache.prompt(tokens(text))
    view = PageView(len(prompt.keys))
    got = cache.retrieve(prompt, view, **arguments)
    assert got.tokens == sum(got.tiers.values())
    pages = got.tokens // PAGE_TOKENS
    assert view.wrong(prompt.keys, pages) == 0
    return pages


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait for something that another thread brings about."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.002)  # polling: the node tells nobody of this


def at_rest(cache: Cache) -> None:
    """Nothing is leased, staged, pinned or under way, and every slot is a resident chunk's."""
    assert cache.flush(20)
    stats = cache.stats()
    assert (stats.leases, stats.staged, stats.pinned) == (0, 0, 0)
    assert stats.slots == stats.chunks

"""The host pool of an engine, whose pages have bytes that follow from their keys; and a node behind it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from lmcache_core.client import Client
from lmcache_core.config import BreakerConfig, Config, CpuConfig, TierConfig
from lmcache_core.connectors.sglang.hostpages import HostPages, buffers_of
from lmcache_core.connectors.sglang.options import Options
from lmcache_core.connectors.sglang.pagestore import PageStore
from lmcache_core.direct import DirectClient
from lmcache_core.keys import page_keys
from lmcache_core.namespace import Encoding, Group, GroupKind, Namespace
from lmcache_core.node import Node
from lmcache_core.protocols import StorageBackend
from lmcache_core.service.remote import RemoteClient
from lmcache_core.service.server import NodeServer

__all__ = ["LAYOUTS", "Host", "World", "opened", "prompt_keys"]

PAGE_TOKENS = 4
CHUNK_TOKENS = 16
LAYERS = 3
ROW = 48
"""Bytes of one token's K in one layer."""
LAYOUTS = ("layers", "halves", "latents")
"""K and V of each layer apart, K and V of all layers apart, one piece."""


def prompt_keys(seed: int, pages: int, page_tokens: int = PAGE_TOKENS) -> list[bytes]:
    """The keys of a prompt's pages."""
    tokens = np.random.default_rng(seed).integers(0, 50_000, pages * page_tokens, np.uint32)
    return page_keys(tokens, page_tokens)


class Host:
    """Pages in an engine's memory."""

    def __init__(self, layout: str = "halves", pages: int = 64, page_tokens: int = PAGE_TOKENS) -> None:
        planes = 1 if layout == "latents" else 2
        self.page_tokens = page_tokens
        self.page_bytes = planes * LAYERS * page_tokens * ROW
        count = {"layers": planes * LAYERS, "halves": 2, "latents": 1}[layout]
        self._memory = np.zeros((count, pages, self.page_bytes // count), np.uint8)
        self.buffers = buffers_of(self.locate, pages)
        self.pages = HostPages(self.buffers, pages, page_tokens, self._memory)

    def locate(self, pages: Sequence[int]) -> tuple[list[int], list[int]]:
        """As an engine tells it."""
        at: int = self._memory.ctypes.data
        buffer, page = self._memory.strides[:2]
        places = [at + number * page + part * buffer for number in pages for part in range(len(self._memory))]
        return places, [page] * len(places)

    def content(self, key: bytes) -> Any:
        """What the page of this key must hold."""
        return np.random.default_rng(int.from_bytes(key[:8], "big")).integers(0, 256, self.page_bytes, np.uint8)

    def write(self, page: int, key: bytes) -> None:
        """Compute a page."""
        self._memory[:, page] = self.content(key).reshape(len(self._memory), -1)

    def holds(self, page: int, key: bytes) -> bool:
        """Whether a page is that of a key."""
        return bool(np.array_equal(self._memory[:, page].ravel(), self.content(key)))

    def wipe(self) -> None:
        """Forget all."""
        self._memory[:] = 0

    @property
    def blank(self) -> bool:
        return not self._memory.any()


class World:
    """A host's pages, and what they are stored in."""

    def __init__(self, host: Host, store: PageStore, client: Client, node: Node) -> None:
        self.host = host
        self.store = store
        self.client = client
        self.node = node

    def compute(self, keys: Sequence[bytes], prefix: Sequence[bytes] = ()) -> int:
        """Compute pages and store them. Returns how many are stored."""
        for page, key in enumerate(keys):
            self.host.write(page, key)
        stored = self.store.set(keys, self.host.pages.view(range(len(keys))), prefix)
        self.host.wipe()
        return stored

    def fetch(self, keys: Sequence[bytes], prefix: Sequence[bytes] = (), batch: int = 1000) -> int:
        """Look pages up and read what is promised, in batches. Returns how many have come, all of them right."""
        found = self.store.exists(keys, prefix)
        done = 0
        while done < found:
            part = keys[done : min(found, done + batch)]
            got = self.read(part, [*prefix, *keys[:done]])
            done += got
            if got < len(part):
                break
        return done

    def read(self, keys: Sequence[bytes], prefix: Sequence[bytes] = ()) -> int:
        """Read pages without looking them up. Returns how many have come, all of them right, and nothing else."""
        self.host.wipe()
        places = list(range(len(keys)))[::-1]  # an engine's pages are anywhere
        done = self.store.get(keys, self.host.pages.view(places), prefix)
        for place, key in zip(places[:done], keys, strict=False):
            assert self.host.holds(place, key)
        return done

    def settle(self) -> None:
        """Let reads and writes end."""
        self.client.stats()  # over a socket what was sent before has come when this is answered
        assert DirectClient(self.node).flush(20)

    def forget(self, *places: str) -> None:
        """Take all out of these places."""
        self.settle()
        DirectClient(self.node).clear(None, places)

    def counts(self, name: str) -> Mapping[str, float]:
        """One of the node's counters."""
        found: Mapping[str, float] = DirectClient(self.node).stats().counts[name]
        return found

    @property
    def chunks(self) -> int:
        """Chunks in the pool."""
        return DirectClient(self.node).stats().chunks

    @property
    def leases(self) -> int:
        return DirectClient(self.node).stats().leases


@contextmanager
def opened(
    *backends: StorageBackend,
    host: Host | None = None,
    remote: Path | None = None,
    capacity: int = 4 << 20,
    chunk_tokens: int = CHUNK_TOKENS,
    options: Options | None = None,
    **tier: Any,
) -> Iterator[World]:
    """A world with these tiers; its node in another process's stead, where `remote` is a folder for a socket."""
    host = host or Host()
    quick = BreakerConfig(failures=1000)
    tiers = tuple(
        TierConfig("cpu", name=f"tier{number}", **{"breaker": quick, **tier}) for number in range(len(backends))
    )
    config = Config(chunk_tokens, host.page_tokens, CpuConfig(capacity=capacity), tiers)
    with Node(config, list(backends)) as node:
        client: Client = DirectClient(node)
        if remote is not None:
            node.servers.append(NodeServer(node, str(remote / "s")))
            client = RemoteClient(str(remote / "s"), config)
            assert client.wait_until_up(10)
        store = PageStore(client, client.register(namespace(host)), options or Options())
        world = World(host, store, client, node)
        try:
            yield world
            world.store.close()
            if remote is None:
                assert world.leases == 0
        finally:
            client.close()


def namespace(host: Host, rank: str = "") -> Namespace:
    """Of what a host keeps."""
    group = Group(
        kind=GroupKind.FULL,
        layers=tuple(range(LAYERS)),
        page_layer_bytes=host.page_bytes // LAYERS,
        dtype="uint8",
        kv_heads=1,
        head_size=ROW,
        planes=host.page_bytes // (LAYERS * host.page_tokens * ROW),
    )
    encoding = Encoding(layout="native", engine="test", block_tokens=host.page_tokens, strides=(1,))
    return Namespace(
        weights="w", groups=(group,), page_tokens=host.page_tokens, encoding=encoding, config=rank, model_name="m"
    )

"""What tiers say of their chunks' models: a node knows them by name before an engine has come."""

from __future__ import annotations

from typing import Any

import pytest

from lmcache_core import Cache
from lmcache_core.direct import DirectClient
from lmcache_core.errors import BackendError
from lmcache_core.node import Node
from tests.node.kv import namespace, open_cache, store
from tests.node.shelf import Shelf


def node_of(cache: Cache) -> Node:
    client: DirectClient = cache.client  # type: ignore[assignment]
    return client.node


class Described(Shelf):
    """Tells what `told` says."""

    def __init__(self) -> None:
        super().__init__()
        self.told: Any = {}

    async def describe(self, space: bytes, manifest: bytes) -> None:
        self.told[space] = manifest

    async def manifests(self) -> dict[bytes, bytes]:
        if isinstance(self.told, Exception):
            raise self.told
        return self.told  # type: ignore[no-any-return]


def test_a_tier_says_what_its_chunks_are_of() -> None:
    shelf = Described()
    with open_cache(shelf) as cache:
        assert store(cache, "abcd")
        config = node_of(cache).config
    shelf.told[b"o" * 32] = b"of a space without chunks"
    with Node(config, [shelf]) as node:
        (space,) = DirectClient(node).spaces()
        assert (space.digest, space.manifest, space.chunks) == (namespace().space(0), namespace().manifest(), 1)
        assert list(node._reports.manifests) == [space.digest]


@pytest.mark.parametrize("told", [BackendError("it is broken"), RuntimeError("a defect"), None, {b"x": 5}, [b"x"]])
def test_a_tier_that_cannot_say_so_is_used_all_the_same(told: object) -> None:
    shelf = Described()
    with open_cache(shelf) as cache:
        assert store(cache, "abcd")
        config = node_of(cache).config
    shelf.told = told
    with Node(config, [shelf]) as node:
        client = DirectClient(node)
        (space,) = client.spaces()
        assert (space.manifest, space.chunks) == (b"", 1)
        assert client.stats().tiers[0].up

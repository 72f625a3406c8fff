"""Several tenants and models at one node: whose the room is, and what operators see of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmcache_backends.cpu import CpuBackend, CpuOptions
from lmcache_core import Cache
from lmcache_core.config import Config, ShareConfig, TierConfig
from lmcache_core.direct import DirectClient
from lmcache_core.errors import ConfigError
from lmcache_core.namespace import Namespace
from lmcache_core.node import Node
from lmcache_core.service import wire
from tests.node.kv import CHUNK_FRAME, at_rest, namespace, open_cache, retrieve, store
from tests.node.shelf import Shelf
from tests.service.kit import open_served, remote
from tests.service.test_protocol import answer, at_end, connected


def holdings(cache: Cache, place: str = "cpu") -> dict[str, float]:
    """Chunks by owner."""
    return {owner.name: owner.nbytes[place] / CHUNK_FRAME for owner in cache.stats().owners if owner.nbytes[place]}


def beside(cache: Cache, tenant: str, model: Namespace | None = None) -> Cache:
    """Another client of the same node."""
    client = cache.client
    assert isinstance(client, DirectClient)
    return Cache(DirectClient(client.node, tenant=tenant), model or namespace())


def flood(cache: Cache, chunks: int, first: int = 0x4E00) -> None:
    for number in range(first, first + chunks):
        store(cache, chr(number) * 4)
        cache.flush(20)


def test_a_flood_leaves_another_tenant_its_half_of_the_pool_and_of_a_tier() -> None:
    with open_cache(Shelf(), slots=8, tiers=[{"capacity": 12 * CHUNK_FRAME}], tenant="quiet") as cache:
        for text in ("abcd", "efgh", "ijkl", "mnop"):
            assert store(cache, text)
        flood(beside(cache, "noisy"), 40)
        assert holdings(cache) == {"quiet": 4, "noisy": 4}
        assert holdings(cache, "t0") == {"quiet": 4, "noisy": 8}
        assert [retrieve(cache, text, source="cpu") for text in ("abcd", "efgh", "ijkl", "mnop")] == [4] * 4
        at_rest(cache)


def test_without_tenants_each_model_has_its_part_by_its_name() -> None:
    plain = namespace()
    other = Namespace(
        weights="other", groups=plain.groups, page_tokens=plain.page_tokens, encoding=plain.encoding, model_name="llama"
    )
    with open_cache(slots=6) as cache:
        flood(cache, 10)
        flood(beside(cache, "", other), 10)
        name = plain.model_name or plain.content.hex()[:16]
        assert holdings(cache) == {name: 3, "llama": 3}
        assert {owner.kind for owner in cache.stats().owners} == {"model"}


def test_quotas_and_weights_of_the_settings() -> None:
    shares = (
        ShareConfig(tenant="small", cpu=2 * CHUNK_FRAME, tiers={"t0": 3 * CHUNK_FRAME}),
        ShareConfig(tenant="big", weight=2),
    )
    with open_cache(Shelf(), slots=11, tiers=[{"capacity": 30 * CHUNK_FRAME}], shares=shares) as cache:
        small, big, third = (beside(cache, name) for name in ("small", "big", "third"))
        flood(small, 20, 0x5000)
        flood(third, 20, 0x6000)
        flood(big, 20, 0x7000)
        assert holdings(cache) == {"small": 2, "big": 6, "third": 3}
        assert holdings(cache, "t0")["small"] == 3
        assert cache.stats().counts.get("dropped_chunks", {}) == {}
        at_rest(cache)


def test_a_store_beyond_a_quota_is_dropped_and_counted() -> None:
    shares = (ShareConfig(tenant="small", cpu=2 * CHUNK_FRAME),)
    with open_cache(slots=8, shares=shares, tenant="small") as cache:
        store(cache, "aaaabbbb")
        prompt = [ord(letter) for letter in "aaaabbbb" for _ in range(cache.page_tokens)]
        assert cache.pin(prompt) == len(prompt)
        assert not store(cache, "cccc")
        assert cache.stats().counts["dropped_chunks"] == {"quota": 1}
        assert cache.unpin(prompt) == len(prompt)
        assert store(cache, "cccc")
        assert holdings(cache) == {"small": 2}


def test_after_a_restart_what_is_on_a_tier_is_the_models() -> None:
    shelf = Shelf()
    with open_cache(shelf, tenant="acme") as cache:
        store(cache, "abcdefgh")
        assert holdings(cache, "t0") == {"acme": 2}
    with Node(Config(tiers=(TierConfig(backend="test"),)), [shelf]) as node:
        owners = DirectClient(node).stats().owners
        assert [(owner.kind, owner.nbytes) for owner in owners] == [("unclaimed", {"cpu": 0, "test": 2 * CHUNK_FRAME})]
    with open_cache(shelf, tenant="acme") as cache:
        assert retrieve(cache, "abcdefgh") == 8
        assert [owner.kind for owner in cache.stats().owners] == ["model"]
        assert list(holdings(cache, "t0").values()) == list(holdings(cache).values()) == [2]


def test_a_quota_of_a_tier_that_cannot_be_listed_is_refused() -> None:
    shares = (ShareConfig(model="m", tiers={"t0": 3 * CHUNK_FRAME}),)

    class Unlisted:
        def __init__(self) -> None:
            backend = CpuBackend(CpuOptions())
            for verb in ("open", "close", "contains", "read", "write", "delete"):
                setattr(self, verb, getattr(backend, verb))

    with pytest.raises(ConfigError, match=r"shares\[0\].tiers.t0: .* delete the quota"):
        open_cache(Unlisted(), shares=shares)  # type: ignore[arg-type]


def test_a_client_of_a_socket_says_whose_its_chunks_are(tmp_path: Path) -> None:
    with open_served(tmp_path, slots=8, tenant="first") as cache:
        store(cache, "abcd")
        path = cache.client.path  # type: ignore[attr-defined]
        with remote(path, tenant="second") as second, remote(path) as nobodys:
            store(second, "efgh")
            store(second, "ijkl")
            store(nobodys, "mnop")
            assert holdings(cache) == {"first": 1, "second": 2, nobodys.namespace.content.hex()[:16]: 1}
            assert holdings(second) == holdings(cache)
            told = second.client.clients()  # type: ignore[attr-defined]
            assert sorted(client.tenant for client in told) == ["", "first", "second"]


@pytest.mark.parametrize("tenant", ["a\nb", "x" * 65, "\ud7ff"])
def test_a_client_whose_tenant_is_no_name_is_sent_away(tmp_path: Path, tenant: str) -> None:
    with open_served(tmp_path, slots=8) as cache, connected(cache) as stream:
        stream.sendall(wire.encode(wire.Hello(wire.VERSION, "a test", 0, tenant)))
        assert isinstance(answer(stream), wire.Failed)
        assert at_end(stream)
        assert store(cache, "abcd")

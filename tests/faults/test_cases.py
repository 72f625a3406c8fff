"""More of what engines meet in practice: requests that end early, room that is fought for, tiers that say nothing."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.faults.campaign import until
from benchmarks.faults.engine import CHUNK_PAGES, PAGE_TOKENS, Engine, Prompt, View, namespace, settings
from lmcache_backends.cpu import CpuBackend, CpuOptions
from lmcache_backends.disk.inspection import inspect_path
from lmcache_core import AsyncCache, Cache, PoolError, hostpool
from lmcache_core.direct import DirectClient
from lmcache_core.wrappers import Slow
from tests.faults.kit import FRAME, an_engine
from tests.node import kv
from tests.node.shelf import Shelf


class Disturbed(View):
    """While its first page is being copied, everything is evicted and others take all the room they can get."""

    def __init__(self, engine: Engine, prompt: Prompt) -> None:
        super().__init__(engine.cache.prompt(prompt.tokens).keys, engine.space)
        self._engine = engine
        self._prompt = prompt
        self.taken = -1

    def scatter(self, group: int, first_page: int, pages: int, source: memoryview) -> None:
        if self.taken < 0:
            before = bytes(source)
            self._engine.cache.evict(self._prompt.tokens)
            self._engine.cache.clear()
            other = self._engine.store(Prompt(99, 4 * CHUNK_PAGES))
            assert other is not None
            self.taken = other.stored
            assert bytes(source) == before
        super().scatter(group, first_page, pages, source)


@pytest.mark.parametrize(("tier", "chunks"), [("cpu", 2), ("t0", 1)])
def test_what_is_being_copied_stays_while_everything_is_evicted(tier: str, chunks: int) -> None:
    with an_engine(Shelf(), slots=2 + chunks) as engine:
        prompt = Prompt(0, chunks * CHUNK_PAGES)
        for pages in range(CHUNK_PAGES, prompt.pages + 1, CHUNK_PAGES):
            assert engine.stored(prompt._replace(pages=pages))
        if tier != "cpu":
            engine.cache.clear(["cpu"])
        view = Disturbed(engine, prompt)
        found = engine.cache.retrieve(prompt.tokens, view)
        assert (found.tokens // PAGE_TOKENS, view.first_difference(0, prompt.pages)) == (prompt.pages, None)
        assert found.tiers == {tier: found.tokens}
        assert view.taken == 2 * CHUNK_PAGES * PAGE_TOKENS, "two slots were free"
        assert engine.lookup(prompt) == 0


def test_fewer_tokens_than_are_in_the_view_already_are_never_a_negative_number() -> None:
    with an_engine() as engine:
        prompt = Prompt(0, 4 * CHUNK_PAGES)
        engine.store(prompt._replace(pages=CHUNK_PAGES))
        computed = 3 * CHUNK_PAGES * PAGE_TOKENS
        view = engine.view(prompt)
        found = engine.cache.retrieve(prompt.tokens, view, first_token=computed)
        assert (found.tokens, dict(found.tiers), view.got) == (CHUNK_PAGES * PAGE_TOKENS, {}, {})
        engine.cache.clear()
        found = engine.cache.retrieve(prompt.tokens, view, first_token=computed)
        assert (found.tokens, dict(found.tiers), view.got) == (0, {}, {})
        counts = engine.cache.stats().counts
        assert sum(counts.get("retrieved_tokens", {}).values()) == 0
        assert [name for name, values in counts.items() if min(values.values()) < 0] == []


@pytest.mark.parametrize("form", ["blocking", "awaited"])
def test_a_tier_that_does_not_answer_what_it_holds_is_waited_for_as_long_as_was_asked(form: str) -> None:
    tier = Slow(CpuBackend(CpuOptions()))
    prompt = Prompt(0, 2 * CHUNK_PAGES)

    async def ask(engine: Engine) -> None:
        cache = AsyncCache(engine.cache.client, engine.cache.namespace)
        async with asyncio.timeout(5):
            found = await cache.lookup(prompt.tokens, wait=0.05)
            assert (found.tokens, found.pending) == (0, True)
            assert (await cache.retrieve(prompt.tokens, engine.view(prompt), wait=0.05)).tokens == 0

    with an_engine(tier, tiers=[{"read_timeout": 3600.0}]) as engine:
        tier.hang("contains")
        if form == "blocking":
            assert engine.retrieve(prompt, timeout=0.05) == 0, "computed instead"
            assert engine.cache.lookup(prompt.tokens).pending
        else:
            asyncio.run(ask(engine))
        assert engine.cache.stats().leases == 0
        tier.release()
        assert engine.serves(prompt)


@pytest.mark.parametrize("when", ["at once", "while it is read", "when it is there"])
def test_a_hit_that_is_not_loaded_is_held_by_nobody_once_its_request_has_ended(when: str) -> None:
    tier = Slow(Shelf())
    with an_engine(tier, slots=2, lease_timeout=3600.0) as engine:
        prompt, more = Prompt(0, 2 * CHUNK_PAGES), Prompt(1, 2 * CHUNK_PAGES)
        for pages in (CHUNK_PAGES, prompt.pages):
            assert engine.stored(prompt._replace(pages=pages))
        client, model = engine.cache.client, engine.cache._model
        if when == "while it is read":
            engine.cache.clear(["cpu"])
            tier.hang("read")
        held = client.hold(model, engine.cache.prompt(prompt.tokens).keys)
        assert held.pages == prompt.pages
        if when != "at once":
            assert len(client.grant(held, 0, 8)) == 2
        result = engine.store(more)
        assert result is not None
        assert result.stored == 0
        client.release(held)
        client.release(held)
        tier.release()
        assert engine.cache.stats().leases == 0
        assert engine.cache.stats().pinned == 0
        assert engine.cache.flush(10)
        result = engine.store(more)
        assert result is not None
        assert result.stored == len(more.tokens)


def test_a_load_whose_request_is_gone_is_aborted_and_its_room_is_used() -> None:
    tier = Slow(CpuBackend(CpuOptions()))
    with an_engine(tier, slots=2, lease_timeout=0.3, tiers=[{"read_timeout": 0.3}]) as engine:
        prompt, more = Prompt(0, 2 * CHUNK_PAGES), Prompt(1, 2 * CHUNK_PAGES)
        for pages in (CHUNK_PAGES, prompt.pages):
            assert engine.stored(prompt._replace(pages=pages))
        engine.cache.clear(["cpu"])
        tier.hang("read")
        client = engine.cache.client
        held = client.hold(engine.cache._model, engine.cache.prompt(prompt.tokens).keys)
        grants = client.grant(held, 0, 8)
        assert engine.cache.stats().slots == 2
        assert until(lambda: engine.cache.stats().leases == engine.cache.stats().slots == tier.hanging == 0, 10)
        assert [grant.wait is not None and grant.wait.result(10) for grant in grants] == [False, False]
        assert client.grant(held, 0, 8) == [], "the lease has ended"
        tier.release()
        result = engine.store(more)
        assert result is not None
        assert result.stored == len(more.tokens)


@pytest.mark.parametrize("verb", ["store", "retrieve"])
def test_no_view_is_kept_when_its_request_has_ended(verb: str) -> None:
    """It leads to the memory of an engine. What is being written to a slow tier is the cache's own copy."""
    tier = Slow(Shelf())
    with an_engine(tier) as engine:
        prompt = Prompt(0, 2 * CHUNK_PAGES)
        if verb == "retrieve":
            assert engine.stored(prompt)
        else:
            tier.hang("write")
        view = engine.view(prompt)
        kept = weakref.ref(view)
        getattr(engine.cache, verb)(prompt.tokens, view)
        del view
        gc.collect()
        assert kept() is None
        tier.release()


def test_a_pool_that_is_not_free_is_refused_at_the_start_and_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hostpool, "available_memory", lambda: 1 << 20)
    before = set(threading.enumerate())
    with pytest.raises(PoolError, match=r"cpu\.capacity is 2MiB but only 1MiB .* one for all engine processes"):
        Cache.open(settings(tmp_path / "kv", cpu="2MiB"), namespace())
    assert set(threading.enumerate()) <= before
    with Cache.open(settings(tmp_path / "kv", cpu="1MiB"), namespace()) as cache:
        assert cache.stats().pool_capacity == 1 << 20


def test_prompts_that_are_asked_for_once_are_not_written_to_a_tier_that_admits_at_the_second_touch() -> None:
    shelf = Shelf()
    with an_engine(shelf, slots=32, tiers=[{"admit": "second-touch"}]) as engine:
        prompts = [Prompt(number, CHUNK_PAGES) for number in range(30)]
        for prompt in prompts:
            engine.store(prompt)
        assert engine.cache.flush(10)
        assert (engine.count("written_bytes"), len(shelf.values)) == (0, 0)
        for _ in range(5):
            for prompt in prompts[:3]:
                assert engine.retrieve(prompt) == prompt.pages
        assert engine.cache.flush(10)
        assert (engine.count("written_bytes"), len(shelf.values)) == (3 * FRAME, 3)


def filled(client: DirectClient, rooms: Sequence[object], byte: int) -> None:
    for room in rooms:
        room.target[:] = bytes([byte]) * len(room.target)  # type: ignore[attr-defined]
        client.filled(room)  # type: ignore[arg-type]


def test_what_one_rank_has_not_stored_is_a_hit_for_none() -> None:
    """Both ranks see as many pages, however far each of them came."""
    with kv.open_cache(slots=32) as cache:
        node = cache.client.node  # type: ignore[attr-defined]
        ranks = [DirectClient(node, shard=number) for number in range(2)]
        models = [rank.register(kv.namespace(shards=2)) for rank in ranks]
        keys = cache.prompt(kv.tokens("abcdefghijkl")).keys
        storing = ranks[0].begin_store(models[0], keys)
        joined = ranks[1].join_store(ranks[0].share(storing))
        assert joined is not None
        filled(ranks[0], storing.rooms, 1)
        filled(ranks[1], joined.rooms[:2], 2)
        ranks[1].finish_store(joined)
        assert ranks[0].finish_store(storing).pages == 8
        assert [rank.lookup(model, keys).pages for rank, model in zip(ranks, models, strict=True)] == [8, 8]
        held = ranks[0].hold(models[0], keys)
        mine = ranks[1].join_hold(ranks[0].share(held))
        assert mine is not None
        assert (held.pages, mine.pages) == (8, 8)
        for rank, lease, byte in ((ranks[0], held, 1), (ranks[1], mine, 2)):
            sources = [grant.source for grant in rank.grant(lease, 0, 8)]
            assert [bytes(source or b"") for source in sources] == [bytes([byte]) * 4 * kv.PAGE_BYTES] * 2
            del sources
            rank.release(lease)
        kv.at_rest(cache)


def test_cleared_is_cleared_on_all_tiers_also_after_a_restart(tmp_path: Path) -> None:
    paths = [tmp_path / "one", tmp_path / "two"]
    config = settings(paths[0])
    config["tiers"] = [settings(path, segment="64KiB")["tiers"][0] | {"name": path.name} for path in paths]
    prompt = Prompt(0, 3 * CHUNK_PAGES)
    with Cache.open(config, namespace()) as cache:
        view = View(cache.prompt(prompt.tokens).keys, cache.namespace.space(0))
        assert cache.store(prompt.tokens, view).wait(10)
        assert cache.contains(prompt.tokens) == dict.fromkeys(["cpu", "one", "two"], len(prompt.tokens))
        assert cache.clear() == 3
        assert cache.flush(10)
        stats = cache.stats()
        assert (stats.chunks, stats.slots, [(tier.chunks, tier.used) for tier in stats.tiers]) == (0, 0, [(0, 0)] * 2)
    assert [list(inspect_path(path).entries()) for path in paths] == [[], []]
    with Cache.open(config, namespace()) as cache:
        assert cache.contains(prompt.tokens) == dict.fromkeys(["cpu", "one", "two"], 0)

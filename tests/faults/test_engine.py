"""What engines meet in practice: each test is a way in which a cache has failed one."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from benchmarks.faults.campaign import until
from benchmarks.faults.engine import CHUNK_PAGES, Engine, Prompt, View
from lmcache_backends.disk import DiskBackend, DiskOptions
from lmcache_core import AsyncCache, ClosedError
from lmcache_core.config import BreakerConfig
from lmcache_core.protocols import ChunkKey, ReadResult
from lmcache_core.wrappers import Faulty, Slow, always
from tests.faults.kit import FRAME, an_engine
from tests.node.shelf import Shelf


class Lazy(Shelf):
    """Says that it has read what it has not."""

    lazy = False

    async def read(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> list[ReadResult]:
        if self.lazy:
            return [ReadResult.HIT] * len(keys)
        return await super().read(keys, into)


def store_slowly(engine: Engine, prompt: Prompt) -> None:
    """Chunk by chunk, since writes may take no more than half of a pool."""
    for pages in range(CHUNK_PAGES, prompt.pages + 1, CHUNK_PAGES):
        assert engine.stored(prompt._replace(pages=pages))


def test_a_buffer_that_nothing_was_read_into_is_never_exposed() -> None:
    """What lies in it is a chunk that is whole and valid, even the very one that is asked for in an older life."""
    shelf = Lazy()
    with an_engine(shelf, slots=4) as engine:
        prompts = [Prompt(number, 4 * CHUNK_PAGES) for number in range(3)]
        for prompt in prompts:
            store_slowly(engine, prompt)
        engine.cache.clear(["cpu"])
        for prompt in prompts:
            assert engine.retrieve(prompt) == prompt.pages
        engine.cache.clear(["cpu"])
        shelf.lazy = True
        for prompt in prompts:
            assert engine.retrieve(prompt) == 0
        assert engine.count("corrupt_chunks") >= len(prompts)


def test_an_allocation_that_fails_in_the_middle_of_a_load_ends_the_prefix_there() -> None:
    shelf = Shelf()
    with an_engine(shelf, slots=4) as engine:
        long, held = Prompt(0, 4 * CHUNK_PAGES), Prompt(1, 2 * CHUNK_PAGES)
        store_slowly(engine, long)
        engine.cache.clear(["cpu"])
        store_slowly(engine, held)
        client, model = engine.cache.client, engine.cache._model
        lease = client.hold(model, engine.cache.prompt(held.tokens).keys)
        client.grant(lease, 0, 8)
        half = client.hold(model, engine.cache.prompt(long.tokens).keys)
        grants = client.grant(half, 0, 8)
        for grant in grants:
            assert grant.wait is not None
            grant.wait.result(10)
        assert len(grants) == 2, "two slots are left"
        client.grant(half, 0, 8)
        assert engine.retrieve(long) == 2 * CHUNK_PAGES
        client.release(half)
        client.release(lease)
        assert engine.retrieve(long) == long.pages


def test_what_is_evicted_between_lookup_and_retrieve_ends_the_prefix_exactly_there() -> None:
    with an_engine() as engine:
        prompt = Prompt(0, 4 * CHUNK_PAGES)
        engine.store(prompt)
        assert engine.lookup(prompt) == prompt.pages
        for left in (3, 1, 0):
            keys = engine.cache.prompt(prompt.tokens).keys
            space = engine.space
            guard = engine.cache.client.node.guard  # type: ignore[attr-defined]
            with guard.turn, guard.mutex:
                index = guard.use()
                entries = [index.spaces[space].chunks.get(key) for key in keys[left * CHUNK_PAGES :]]
                index.evict([entry for entry in entries if entry is not None], -1)
            assert engine.retrieve(prompt) == left * CHUNK_PAGES
        engine.store(prompt)
        assert engine.retrieve(prompt) == prompt.pages


@pytest.mark.parametrize("how", ["leased", "pinned"])
def test_a_full_pool_answers_within_a_bound(how: str) -> None:
    with an_engine(slots=2) as engine:
        held, more = Prompt(0, 2 * CHUNK_PAGES), Prompt(1, 2 * CHUNK_PAGES)
        engine.store(held)
        cache = engine.cache
        lease = None
        if how == "pinned":
            cache.pin(held.tokens)
        else:
            lease = cache.client.hold(cache._model, cache.prompt(held.tokens).keys)
        started = time.monotonic()
        for _ in range(20):
            result = engine.store(more)
            assert result is not None
            assert result.stored == 0
            assert result.dropped == len(more.tokens)
            assert result.wait(1) is False
        assert time.monotonic() - started < 2
        if lease is None:
            cache.unpin(held.tokens)
        else:
            cache.client.release(lease)
        result = engine.store(more)
        assert result is not None
        assert result.stored == len(more.tokens)


class Broken(View):
    """Raises half-way."""

    def gather(self, group: int, first_page: int, pages: int, into: memoryview) -> None:
        if first_page >= CHUNK_PAGES:
            raise RuntimeError("the request was aborted")
        super().gather(group, first_page, pages, into)

    def scatter(self, group: int, first_page: int, pages: int, source: memoryview) -> None:
        if first_page >= CHUNK_PAGES:
            raise RuntimeError("the request was aborted")
        super().scatter(group, first_page, pages, source)


def test_a_view_that_raises_keeps_no_lock_lease_or_slot() -> None:
    with an_engine(Shelf()) as engine:
        prompt = Prompt(0, 3 * CHUNK_PAGES)
        broken = Broken(engine.cache.prompt(prompt.tokens).keys, engine.space)
        for _ in range(20):
            with pytest.raises(RuntimeError, match="aborted"):
                engine.cache.store(prompt.tokens, broken)
            assert engine.retrieve(prompt) == CHUNK_PAGES, "what was copied before is there"
        assert engine.stored(prompt)
        for _ in range(20):
            with pytest.raises(RuntimeError, match="aborted"):
                engine.cache.retrieve(prompt.tokens, broken)
        assert engine.retrieve(prompt) == prompt.pages


@pytest.mark.parametrize("verb", ["read", "write", "delete", "touch", "describe", "contains", "scan", "open", "close"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_no_lock_is_kept_when_a_verb_fails(verb: str, when: str) -> None:
    """Every other call of the verb fails; every call of the cache works and the next one too."""
    faults = {verb: lambda _, call: call % 2 == 1}
    backend = Faulty(Shelf(), faults, when=when)  # type: ignore[arg-type]
    with an_engine(backend, lease_timeout=0.3) as engine:
        for number in range(12):
            prompt = Prompt(number % 3, 2 * CHUNK_PAGES)
            result = engine.store(prompt)
            assert result is not None
            result.wait(5)
            engine.cache.clear(["cpu"])
            engine.retrieve(prompt)
            engine.lookup(prompt)
            engine.cache.prefetch(prompt.tokens, timeout=5)
            engine.cache.pin(prompt.tokens)
            engine.cache.unpin(prompt.tokens)
            engine.cache.evict(prompt.tokens)
        backend.active = False
        assert until(lambda: engine.tier().up, 10)
        assert until(lambda: engine.serves(Prompt(9, 2 * CHUNK_PAGES)), 10)


def test_a_load_that_failed_is_not_tried_again_for_ever() -> None:
    backend = Faulty(Shelf(), {"read": always})
    with an_engine(backend, tiers=[{"breaker": BreakerConfig(failures=100)}]) as engine:
        prompt = Prompt(0, CHUNK_PAGES)
        assert engine.stored(prompt)
        engine.cache.clear(["cpu"])
        assert engine.retrieve(prompt) == 0
        assert engine.lookup(prompt) == 0, "the next lookup misses"
        for _ in range(10):
            assert engine.retrieve(prompt) == 0
        assert backend.calls["read"] == 1


def test_a_frozen_tier_costs_its_deadline_once(tmp_path: Path) -> None:
    disk = Slow(DiskBackend(DiskOptions(path=str(tmp_path), capacity=1 << 24, min_free=0)))
    with an_engine(disk, tiers=[{"read_timeout": 0.3}]) as engine:
        prompt, other = Prompt(0, 3 * CHUNK_PAGES), Prompt(1, 3 * CHUNK_PAGES)
        assert engine.stored(prompt)
        assert engine.stored(other)
        engine.cache.clear(["cpu"])
        disk.hang("read")
        started = time.monotonic()
        assert engine.retrieve(prompt) == 0
        assert 0.2 < time.monotonic() - started < 1.5
        started = time.monotonic()
        for _ in range(20):
            assert engine.retrieve(prompt) == 0, "computed instead, at once"
        assert engine.retrieve(other, timeout=0.05) == 0
        assert time.monotonic() - started < 1.0
        disk.release()
        assert until(lambda: engine.tier().up and not engine.tier().quarantined, 10)
        assert until(lambda: engine.serves(prompt), 10)


def test_a_lease_that_nobody_releases_ends_and_its_room_is_used() -> None:
    with an_engine(slots=2, lease_timeout=0.3) as engine:
        held, more = Prompt(0, 2 * CHUNK_PAGES), Prompt(1, 2 * CHUNK_PAGES)
        engine.store(held)
        cache = engine.cache
        lease = cache.client.hold(cache._model, cache.prompt(held.tokens).keys)
        result = engine.store(more)
        assert result is not None
        assert result.stored == 0
        assert until(lambda: cache.stats().leases == 0, 5)
        assert lease.pages == held.pages
        assert engine.count("expired_leases") == 1
        result = engine.store(more)
        assert result is not None
        assert result.stored == len(more.tokens)


@pytest.mark.parametrize("ask", ["lookup", "contains"])
def test_asking_renews_nothing(ask: str) -> None:
    shelf = Shelf()
    with an_engine(shelf, slots=2, tiers=[{"capacity": 2 * FRAME}]) as engine:
        first, second, third = (Prompt(number, CHUNK_PAGES) for number in range(3))
        assert engine.stored(first)
        assert engine.stored(second)
        for _ in range(20):
            getattr(engine.cache, ask)(first.tokens)
        assert engine.stored(third)
        assert [engine.lookup(prompt) for prompt in (first, second, third)] == [0, CHUNK_PAGES, CHUNK_PAGES]
        assert len(shelf.values) == 2


def test_a_pin_ends_even_if_what_it_holds_cannot_be_found_then() -> None:
    """A read that is late hides a chunk for a while."""
    slow = Slow(Shelf())
    with an_engine(slow, tiers=[{"read_timeout": 0.1, "breaker": BreakerConfig(failures=100)}]) as engine:
        prompt = Prompt(0, 2 * CHUNK_PAGES)
        assert engine.stored(prompt)
        engine.cache.clear(["cpu"])
        assert engine.cache.pin(prompt.tokens) == len(prompt.tokens)
        slow.hang("read")
        assert engine.retrieve(prompt) == 0
        assert engine.lookup(prompt) < prompt.pages
        engine.cache.unpin(prompt.tokens)
        slow.release()
        assert until(lambda: engine.cache.stats().pinned == 0, 5)


def test_a_cancelled_prefetch_is_nobody_elses_business() -> None:
    """Others wait for the same chunk, and for those that are read together with it."""
    slow = Slow(Shelf())
    prompt = Prompt(0, 4 * CHUNK_PAGES)

    async def cancel_one_of_two(engine: Engine) -> int:
        cache = AsyncCache(engine.cache.client, engine.cache.namespace)
        prefetching = asyncio.create_task(cache.prefetch(prompt.tokens))
        assert await asyncio.to_thread(slow.wait_until_hanging)
        retrieving = asyncio.create_task(asyncio.to_thread(engine.retrieve, prompt))
        assert await asyncio.to_thread(until, lambda: engine.cache.stats().leases == 2, 5)
        prefetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await prefetching
        slow.release()
        return await retrieving

    with an_engine(slow) as engine:
        assert engine.stored(prompt)
        engine.cache.clear(["cpu"])
        slow.hang("read")
        assert asyncio.run(cancel_one_of_two(engine)) == prompt.pages


def test_closing_while_an_engine_is_at_work_ends_every_call() -> None:
    problems: list[BaseException] = []
    with an_engine(Slow(Shelf(), delay=0.002)) as engine:
        cache = engine.cache

        def work(number: int) -> None:
            prompt = Prompt(number, 2 * CHUNK_PAGES)
            try:
                while True:
                    cache.store(prompt.tokens, engine.view(prompt))
                    cache.evict(prompt.tokens, ["cpu"])
                    cache.retrieve(prompt.tokens, engine.view(prompt))
            except ClosedError:
                return
            except BaseException as error:  # noqa: BLE001  nothing else may come
                problems.append(error)

        threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(4)]
        for thread in threads:
            thread.start()
        assert until(lambda: engine.count("read_chunks") > 20, 20)
        cache.close()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        assert not problems


@pytest.mark.slow
def test_over_many_rounds_the_hit_rate_is_stable_and_memory_is_flat(tmp_path: Path) -> None:
    disk = DiskBackend(DiskOptions(path=str(tmp_path), capacity=256 * FRAME, min_free=0, segment=1 << 18))
    rng = random.Random(1)
    conversations = [(number, 1 / (1 + number)) for number in range(300)]
    weights = [weight for _, weight in conversations]
    rates: list[float] = []
    sizes: list[int] = []
    with an_engine(disk, slots=64, tiers=[{"capacity": 256 * FRAME}]) as engine:
        end = time.monotonic() + 15
        while time.monotonic() < end or len(rates) < 6:
            wanted = hit = 0
            for number, _ in rng.choices(conversations, weights, k=400):
                prompt = Prompt(number, rng.randint(1, 4 * CHUNK_PAGES))
                got = engine.retrieve(prompt)
                wanted, hit = wanted + prompt.pages, hit + got
                if got < prompt.pages:
                    engine.store(prompt)
            engine.cache.flush(10)
            rates.append(hit / wanted)
            sizes.append(psutil.Process().memory_info().rss)
    third = len(rates) // 3
    early, late = rates[third : 2 * third], rates[-third:]
    assert min(late) > 0.3
    assert abs(sum(early) / len(early) - sum(late) / len(late)) < 0.08, rates
    assert max(sizes[-third:]) - max(sizes[third : 2 * third]) < 8 << 20, sizes

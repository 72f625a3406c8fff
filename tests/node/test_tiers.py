"""Tiers at work: deadlines, quarantine, the breaker, order, recovery, hostile backends. The engine is never failed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from lmcache_backends.cpu import CpuBackend, CpuOptions
from lmcache_core import guard
from lmcache_core.config import BreakerConfig
from lmcache_core.errors import BackendError, ConfigError
from lmcache_core.health import TierHealth
from lmcache_core.index import Entry
from lmcache_core.index.tiers import TierState
from lmcache_core.namespace import Namespace
from lmcache_core.protocols import Chunk, ChunkKey, ReadResult, Stored, WriteResult
from lmcache_core.wrappers import Corrupting, Faulty, Slow
from tests.node.kv import (
    CHUNK_FRAME,
    PAGE_TOKENS,
    PageView,
    at_rest,
    open_cache,
    retrieve,
    store,
    tokens,
    until,
)
from tests.node.shelf import Shelf

QUICK = BreakerConfig(failures=2, cooldown=0.01, max_cooldown=0.05)


def counted(cache: Any, name: str, label: str) -> float:
    return float(cache.stats().counts.get(name, {}).get(label, 0))


def test_a_restart_finds_what_was_stored_in_order_of_use() -> None:
    shelf = Shelf()
    with open_cache(shelf) as cache:
        for text in ("abcd", "efgh", "ijkl"):
            store(cache, text)
        assert retrieve(cache, "abcd") == 4
    assert [stored.pages[-1] for stored, _ in shelf.values.values()][-1] == cache.prompt(tokens("abcd")).keys[-1]
    with open_cache(shelf, slots=1, tiers=[{"capacity": 2 * CHUNK_FRAME}]) as cache:
        until(lambda: len(shelf.values) == 2)
        assert [retrieve(cache, text) for text in ("abcd", "efgh", "ijkl")] == [4, 0, 4]
        assert cache.lookup(tokens("abcd")).tokens == 4 * PAGE_TOKENS
        at_rest(cache)


def test_a_tier_learns_what_its_chunks_are_of() -> None:
    shelf = Shelf()
    with open_cache(shelf) as cache:
        store(cache, "abcd")
        assert cache.flush(10)
        space = cache.namespace.space(0)
        assert Namespace.from_manifest(shelf.manifest[space]) == cache.namespace


def test_a_slow_tier_costs_its_deadline_and_its_bytes_land_nowhere_else() -> None:
    """A load past its deadline is a miss; its slot is nobody else's until the read has ended, however late."""
    shelf = Shelf()
    slow = Slow(shelf)
    with open_cache(slow, slots=1, tiers=[{"read_timeout": 0.05}]) as cache:
        store(cache, "abcd")
        cache.clear(["cpu"])
        slow.hang("read")
        assert retrieve(cache, "abcd") == 0
        until(lambda: cache.stats().tiers[0].quarantined == CHUNK_FRAME)  # it is told a moment before
        assert counted(cache, "late_reads", "t0") == 1
        prompt = cache.prompt(tokens("efgh"))
        assert cache.store(prompt, PageView.of(prompt.keys)).dropped == 4 * PAGE_TOKENS
        assert cache.lookup(tokens("abcd")).tokens == 0
        slow.release()
        until(lambda: cache.stats().tiers[0].quarantined == 0)
        assert retrieve(cache, "abcd") == 4
        at_rest(cache)


def test_quarantine_is_capped_then_the_tier_counts_as_down() -> None:
    shelf = Shelf()
    slow = Slow(shelf)
    rules = {
        "read_timeout": 0.02,
        "quarantine": 2 * CHUNK_FRAME,
        "breaker": BreakerConfig(failures=1000, cooldown=0.01, max_cooldown=0.01),
    }
    with open_cache(slow, tiers=[rules]) as cache:
        texts = ["abcd", "efgh", "ijkl", "mnop"]
        for text in texts:
            store(cache, text)
        cache.clear(["cpu"])
        slow.hang("read")
        assert [retrieve(cache, text) for text in texts[:3]] == [0, 0, 0]
        until(lambda: not cache.stats().tiers[0].up)
        assert cache.lookup(tokens("mnop")).tokens == 0
        slow.release()
        until(lambda: cache.stats().tiers[0].up)
        assert [retrieve(cache, text) for text in texts] == [4, 4, 4, 4]
        at_rest(cache)


def test_an_abortable_read_is_cancelled_at_its_deadline() -> None:
    slow = Slow(CpuBackend(CpuOptions()))
    with open_cache(slow, slots=1, tiers=[{"read_timeout": 0.05}]) as cache:
        store(cache, "abcd")
        cache.clear(["cpu"])
        slow.hang("read")
        assert retrieve(cache, "abcd") == 0
        until(lambda: slow.hanging == 0)
        until(lambda: cache.stats().tiers[0].quarantined == 0)
        assert cache.stats().slots == 0


def test_what_can_be_aborted_does_not_keep_a_tier_from_being_opened_again() -> None:
    """A write that hangs has a minute, and would hold up the recovery for as long."""
    slow = Slow(CpuBackend(CpuOptions()))
    with open_cache(slow, tiers=[{"read_timeout": 0.05, "write_timeout": 60.0, "breaker": QUICK}]) as cache:
        store(cache, "abcd")
        cache.clear(["cpu"])
        slow.hang()
        prompt = cache.prompt(tokens("efgh"))
        written = cache.store(prompt, PageView.of(prompt.keys))
        until(lambda: slow.hanging == 1)
        assert retrieve(cache, "abcd") == 0
        until(lambda: counted(cache, "opened_breakers", "t0") == 1)
        assert written.wait(10) is False
        assert counted(cache, "failed_writes", "t0") == 1
        slow.hang("touch")  # what is called from now on is well; nothing is let go
        until(lambda: cache.stats().tiers[0].up)
        assert slow.hanging == 0
        assert store(cache, "ijkl")
        at_rest(cache)


def test_the_breaker_opens_calls_return_at_once_and_a_probe_recovers() -> None:
    """A dead tier costs the requests that found out; then nobody pays, and it comes back by itself with its hits."""
    shelf = Shelf()
    with open_cache(shelf, tiers=[{"breaker": QUICK}]) as cache:
        store(cache, "abcd")
        store(cache, "efgh")
        cache.clear(["cpu"])
        shelf.broken = True
        assert [retrieve(cache, "abcd"), retrieve(cache, "efgh")] == [0, 0]
        until(lambda: not cache.stats().tiers[0].up)
        before = len([1 for verb, _ in shelf.calls if verb == "read"])
        for _ in range(20):
            assert retrieve(cache, "abcd") == 0
        assert len([1 for verb, _ in shelf.calls if verb == "read"]) == before
        assert counted(cache, "opened_breakers", "t0") == 1
        prompt = cache.prompt(tokens("ijkl"))
        assert cache.store(prompt, PageView.of(prompt.keys)).wait(10) is False
        assert retrieve(cache, "ijkl") == 4, "host memory serves on"
        shelf.broken = False
        until(lambda: cache.stats().tiers[0].up)
        assert retrieve(cache, "abcd") == 4
        assert retrieve(cache, "efgh") == 4
        assert store(cache, "ijkl"), "what the tier missed is written when it is stored again"
        at_rest(cache)


def test_what_a_tier_held_is_forgotten_in_turns_before_it_is_scanned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "MOST_AT_ONCE", 3)
    shelf = Shelf()
    with open_cache(shelf, tiers=[{"breaker": QUICK}], slots=16) as cache:
        for text in ("abcdefghijkl", "mnop", "qrstuvwx", "yzab"):
            assert store(cache, text)
        node = cache.client.node  # type: ignore[attr-defined]
        index, sizes = node.guard.index, []
        reset = index.reset_tier

        def noted(tier: TierState, entries: Sequence[Entry]) -> None:
            sizes.append(len(entries))
            assert not node.guard.index.readable & tier.bit
            reset(tier, entries)

        monkeypatch.setattr(index, "reset_tier", noted)
        node.start(_trip(node.runners[0].health)).result(10)
        until(lambda: cache.stats().tiers[0].up)
        assert sizes == [3, 3, 1]
        assert cache.stats().tiers[0].chunks == 7
        cache.clear(["cpu"])
        assert retrieve(cache, "abcdefghijkl") == 12


async def _trip(health: TierHealth) -> None:
    health.trip()


def test_a_tier_that_is_down_at_start_is_used_when_it_comes_up() -> None:
    shelf = Shelf()
    with open_cache(shelf) as cache:
        store(cache, "abcd")
    shelf.broken = True
    with open_cache(shelf, tiers=[{"breaker": QUICK}]) as cache:
        assert not cache.stats().tiers[0].up
        assert retrieve(cache, "abcd") == 0
        shelf.broken = False
        until(lambda: cache.stats().tiers[0].up)
        assert retrieve(cache, "abcd") == 4


def test_options_that_cannot_work_end_the_start_and_leave_no_thread() -> None:
    class Hopeless(Shelf):
        async def open(self) -> None:
            raise ConfigError("tiers[0].path: /proc is not a place for chunks; name a directory")

    before = set(threading.enumerate())
    with pytest.raises(ConfigError, match="not a place for chunks"):
        open_cache(Hopeless())
    assert {thread.name for thread in set(threading.enumerate()) - before} == set()


def test_damage_below_the_frame_is_a_miss_counted_and_deleted() -> None:
    shelf = Shelf()
    lying = Corrupting(shelf, ["flip"], probability=1.0)
    with open_cache(lying) as cache:
        store(cache, "abcd")
        cache.clear(["cpu"])
        assert retrieve(cache, "abcd") == 0
        assert cache.flush(10)
        assert counted(cache, "corrupt_chunks", "t0") == 1
        assert shelf.values == {}
        lying.active = False
        store(cache, "abcd")
        cache.clear(["cpu"])
        assert retrieve(cache, "abcd") == 4
        at_rest(cache)


def test_a_chunk_that_vanished_below_us_is_a_miss_once() -> None:
    shelf = Shelf()
    with open_cache(shelf) as cache:
        store(cache, "abcdefgh")
        cache.clear(["cpu"])
        last = cache.prompt(tokens("abcdefgh")).keys[-1]
        del shelf.values[ChunkKey(cache.namespace.space(0), last)]
        assert retrieve(cache, "abcdefgh") == 4
        assert cache.lookup(tokens("abcdefgh")).tokens == 4 * PAGE_TOKENS
        assert counted(cache, "vanished_chunks", "t0") == 1
        at_rest(cache)


class Hostile(Shelf):
    """A plugin that keeps no contract."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.hostile = False

    async def read(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> list[ReadResult]:
        if not self.hostile:
            return await super().read(keys, into)
        if self.how == "raises":
            raise ZeroDivisionError("oops")
        if self.how == "too few":
            return []
        if self.how == "nonsense":
            return ["yes" for _ in keys]  # type: ignore[misc]
        return [ReadResult.HIT for _ in keys]  # without having read anything

    async def write(self, chunks: Sequence[Chunk]) -> list[WriteResult]:
        if not self.hostile:
            return await super().write(chunks)
        if self.how == "raises":
            raise KeyError("oops")
        if self.how == "nonsense":
            return [None for _ in chunks]  # type: ignore[misc]
        return [] if self.how == "too few" else [WriteResult.FULL for _ in chunks]

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        if self.hostile and self.how == "raises":
            raise RuntimeError("oops")
        await super().delete(keys)


@pytest.mark.parametrize("how", ["raises", "too few", "nonsense", "lies"])
def test_a_hostile_backend_costs_only_misses(how: str) -> None:
    backend = Hostile(how)
    with open_cache(backend, tiers=[{"breaker": QUICK}]) as cache:
        store(cache, "abcd")
        cache.clear(["cpu"])
        backend.hostile = True
        assert retrieve(cache, "abcd") == 0
        prompt = cache.prompt(tokens("efgh"))
        assert cache.store(prompt, PageView.of(prompt.keys)).wait(10) is False
        assert retrieve(cache, "efgh") == 4
        backend.hostile = False
        until(lambda: cache.stats().tiers[0].up)
        assert store(cache, "efgh") or store(cache, "efgh")
        at_rest(cache)


def test_an_error_of_any_verb_leaves_the_next_call_working() -> None:
    shelf = Shelf()
    for verb in ("read", "write", "delete", "touch"):
        faulty = Faulty(shelf, {verb: lambda _, call: call == 1}, error=OSError)
        with open_cache(faulty, tiers=[{"breaker": BreakerConfig(failures=100)}]) as cache:
            for _ in range(3):
                store(cache, "abcd")
                cache.clear(["cpu"])
                retrieve(cache, "abcd")
                cache.clear()
                assert cache.flush(10)
            store(cache, "abcd")
            cache.clear(["cpu"])
            assert retrieve(cache, "abcd") == 4
            at_rest(cache)


def test_a_delete_that_failed_is_made_up_for() -> None:
    shelf = Shelf()
    faulty = Faulty(shelf, {"delete": lambda _, call: call == 1}, error=BackendError)
    with open_cache(faulty) as cache:
        store(cache, "abcd")
        cache.clear()
        assert cache.flush(10)
        assert len(shelf.values) == 1
        store(cache, "efgh")
        assert cache.flush(10)
        assert [stored.pages[-1] for stored, _ in shelf.values.values()] == [cache.prompt(tokens("efgh")).keys[-1]]


def test_a_delete_that_failed_is_not_made_up_for_when_the_chunk_has_been_stored_again() -> None:
    shelf = Shelf()
    faulty = Faulty(shelf, {"delete": lambda _, call: call == 1}, error=BackendError)
    with open_cache(faulty) as cache:
        store(cache, "abcd")
        cache.clear()
        assert cache.flush(10)
        assert store(cache, "abcd")
        assert store(cache, "efgh")
        assert cache.flush(10)
        cache.clear(["cpu"])
        assert retrieve(cache, "abcd") == 4
        at_rest(cache)


def test_what_could_not_make_room_is_deleted_later() -> None:
    shelf = Shelf()
    faulty = Faulty(shelf, {"delete": lambda _, call: call == 1}, error=BackendError)
    with open_cache(faulty, tiers=[{"capacity": CHUNK_FRAME}]) as cache:
        assert store(cache, "abcd")
        assert not store(cache, "efgh")
        assert store(cache, "ijkl")
        assert cache.flush(10)
        assert [key.page for key in shelf.values] == [cache.prompt(tokens("ijkl")).keys[-1]]
        at_rest(cache)


def test_what_was_to_make_room_for_a_write_that_came_too_late_is_deleted_all_the_same() -> None:
    shelf = Shelf()
    slow = Slow(shelf)
    rules = {"capacity": 2 * CHUNK_FRAME, "write_timeout": 0.05, "breaker": BreakerConfig(failures=100)}
    with open_cache(slow, tiers=[rules]) as cache:
        assert store(cache, "abcd")
        slow.hang("write")
        assert not store(cache, "efgh")
        cache.evict(tokens("efgh"))
        assert not store(cache, "efgh"), "it waits behind the first, and takes the room of the other chunk"
        slow.release()
        until(lambda: cache.stats().tiers[0].queued == 0)
        assert store(cache, "ijkl")
        assert cache.flush(10)
        assert [key.page for key in shelf.values] == [cache.prompt(tokens("ijkl")).keys[-1]]
        at_rest(cache)


class Listed(Shelf):
    """Stops in the middle of its list, from the second time on."""

    def __init__(self) -> None:
        super().__init__()
        self.listing = threading.Event()
        self.go_on = threading.Event()

    async def scan(self) -> AsyncIterator[Sequence[Stored]]:
        async for batch in super().scan():
            yield batch
        if self.opened > 1:
            self.listing.set()
            await asyncio.to_thread(self.go_on.wait, 10)


def test_what_is_cleared_while_a_tier_is_listed_is_deleted_when_it_is_back() -> None:
    shelf = Listed()
    with open_cache(shelf, tiers=[{"breaker": QUICK}]) as cache:
        assert store(cache, "abcd")
        node = cache.client.node  # type: ignore[attr-defined]
        node.start(_trip(node.runners[0].health)).result(10)
        assert shelf.listing.wait(10)
        cache.clear()
        shelf.go_on.set()
        until(lambda: cache.stats().tiers[0].up)
        assert store(cache, "efgh")
        assert cache.flush(10)
        assert [key.page for key in shelf.values] == [cache.prompt(tokens("efgh")).keys[-1]]
        at_rest(cache)


def test_a_delete_that_ends_when_its_tier_is_down_is_not_made_up_for() -> None:
    """What could not be read is given up while the tier seems to work. When it turns out that it does not, what is
    there once it is back is there."""
    shelf = Shelf()
    slow = Slow(shelf)
    with open_cache(slow, tiers=[{"breaker": QUICK}]) as cache:
        store(cache, "abcd")
        store(cache, "efgh")
        cache.clear(["cpu"])
        shelf.broken = True
        slow.hang("delete")
        assert retrieve(cache, "abcd") == 0
        assert slow.wait_until_hanging()
        assert retrieve(cache, "efgh") == 0
        until(lambda: not cache.stats().tiers[0].up)
        slow.release()
        until(lambda: ("delete", 1) in shelf.calls)
        shelf.broken = False
        until(lambda: cache.stats().tiers[0].up)
        assert store(cache, "ijkl"), "a write that works is when deletes are made up for"
        assert cache.flush(10)
        assert [retrieve(cache, "abcd"), retrieve(cache, "efgh")] == [4, 4]
        at_rest(cache)


def test_store_clear_store_of_one_prompt_ends_stored() -> None:
    """Operations on one key keep their order although several run at once."""
    shelf = Shelf()
    slow = Slow(shelf, delay=0.002, jitter=1.0, seed=3)
    with open_cache(slow, slots=100) as cache:
        for _ in range(20):
            store(cache, "abcd")
            cache.clear()
        prompt = cache.prompt(tokens("abcd"))
        for _ in range(10):
            cache.store(prompt, PageView.of(prompt.keys))
            cache.clear()
            result = cache.store(prompt, PageView.of(prompt.keys))
        assert result.wait(10)
        cache.clear(["cpu"])
        assert retrieve(cache, "abcd") == 4
        at_rest(cache)


def test_a_write_past_its_deadline_is_reported_and_holds_its_slot() -> None:
    shelf = Shelf()
    slow = Slow(shelf)
    with open_cache(slow, slots=1, tiers=[{"write_timeout": 0.05}]) as cache:
        slow.hang("write")
        prompt = cache.prompt(tokens("abcd"))
        assert cache.store(prompt, PageView.of(prompt.keys)).wait(10) is False
        assert counted(cache, "late_writes", "t0") == 1
        other = cache.prompt(tokens("efgh"))
        assert cache.store(other, PageView.of(other.keys)).dropped == 4 * PAGE_TOKENS
        slow.release()
        until(lambda: cache.contains(prompt)["t0"] == 4 * PAGE_TOKENS)
        at_rest(cache)


def test_a_slow_tier_queues_no_more_than_half_the_pool() -> None:
    shelf = Shelf()
    slow = Slow(shelf)
    with open_cache(slow, slots=8) as cache:
        slow.hang("write")
        for text in ("abcd", "efgh", "ijkl", "mnop", "qrst", "uvwx"):
            prompt = cache.prompt(tokens(text))
            assert cache.store(prompt, PageView.of(prompt.keys)).stored == 4 * PAGE_TOKENS
        assert cache.stats().tiers[0].used == 4 * CHUNK_FRAME  # held or being written
        slow.release()
        assert cache.flush(10)
        assert len(shelf.values) == 6  # the rest was written when there was room in the queue
        assert counted(cache, "dropped_chunks", "queue_full") == 0
        at_rest(cache)


def test_what_leaves_the_pool_before_a_slow_tier_took_it_is_counted() -> None:
    shelf = Shelf()
    slow = Slow(shelf)
    with open_cache(slow, slots=8) as cache:
        slow.hang("write")
        for text in ("abcd", "efgh", "ijkl", "mnop", "qrst", "uvwx", "yzAB", "CDEF", "GHIJ"):
            prompt = cache.prompt(tokens(text))
            assert cache.store(prompt, PageView.of(prompt.keys)).stored == 4 * PAGE_TOKENS
        assert counted(cache, "dropped_chunks", "queue_full") == 1
        slow.release()
        assert cache.flush(10)
        assert len(shelf.values) == 8
        at_rest(cache)


def test_a_tier_that_goes_down_forgets_what_it_was_owed() -> None:
    slow = Slow(Shelf())
    with open_cache(slow, slots=8, tiers=[{"write_timeout": 0.05, "breaker": QUICK}]) as cache:
        slow.hang("write")
        for text in ("abcd", "efgh", "ijkl", "mnop", "qrst", "uvwx"):
            prompt = cache.prompt(tokens(text))
            cache.store(prompt, PageView.of(prompt.keys))
        until(lambda: not cache.stats().tiers[0].up)
        assert counted(cache, "dropped_chunks", "tier_down") == 2
        slow.release()
        until(lambda: cache.stats().tiers[0].up)
        at_rest(cache)


def test_closing_writes_what_is_queued() -> None:
    shelf = Shelf()
    slow = Slow(shelf, delay=0.005)
    with open_cache(slow) as cache:
        for text in ("abcd", "efgh", "ijkl"):
            prompt = cache.prompt(tokens(text))
            cache.store(prompt, PageView.of(prompt.keys))
    assert len(shelf.values) == 3
    assert shelf.calls[-1] == ("close", 1)


def test_small_chunks_share_calls() -> None:
    shelf = Shelf()
    slow = Slow(shelf)
    with open_cache(slow, slots=20, tiers=[{"concurrency": 1}]) as cache:
        slow.hang("write")
        first = cache.prompt(tokens("zzzz"))
        cache.store(first, PageView.of(first.keys))
        assert slow.wait_until_hanging()
        prompt = cache.prompt(tokens("abcdefghijklmnop"))
        result = cache.store(prompt, PageView.of(prompt.keys))
        slow.release()
        assert result.wait(10)
        assert [count for verb, count in shelf.calls if verb == "write"] == [1, 4]


def test_a_tier_that_cannot_be_listed_is_asked() -> None:
    """Another process wrote; a lookup answers at once and says that the answer is pending."""
    shared = CpuBackend(CpuOptions())
    with open_cache(shared) as writer:
        store(writer, "abcdefghij")
        node = writer.client.node  # type: ignore[attr-defined]
        reader = open_cache(_Share(shared))
        assert reader.lookup(tokens("abcdefghijkl")).pending
        until(lambda: not reader.lookup(tokens("abcdefghijkl")).pending)
        found = reader.lookup(tokens("abcdefghijkl"))
        assert (found.tokens, found.tiers) == (10 * PAGE_TOKENS, {"t0": 10 * PAGE_TOKENS})
        assert retrieve(reader, "abcdefghijkl") == 10
        until(lambda: not reader.lookup(tokens("xyz")).pending)
        assert reader.lookup(tokens("xyz")).tokens == 0
        at_rest(reader)
        reader.close()
        assert node.config.tiers[0].name == "t0"


class _Share:
    """The same store as another backend's, through a door of its own."""

    def __init__(self, inner: CpuBackend) -> None:
        self.inner = inner
        self.read = inner.read
        self.write = inner.write
        self.contains = inner.contains
        self.delete = inner.delete

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass


def test_threads_at_once_share_reads_and_writes() -> None:
    shelf = Shelf()
    slow = Slow(shelf)
    with open_cache(slow) as cache:
        store(cache, "abcd")
        cache.clear(["cpu"])
        slow.hang("read")
        got: list[int] = []
        threads = [threading.Thread(target=lambda: got.append(retrieve(cache, "abcd"))) for _ in range(6)]
        for thread in threads:
            thread.start()
        assert slow.wait_until_hanging()
        until(lambda: cache.stats().leases == 6)
        slow.release()
        for thread in threads:
            thread.join()
        assert got == [4] * 6
        assert [count for verb, count in shelf.calls if verb == "read"] == [1]
        at_rest(cache)


def test_closing_ends_what_waits_for_a_hanging_tier() -> None:
    slow = Slow(CpuBackend(CpuOptions()))
    cache = open_cache(slow, tiers=[{"read_timeout": 3600.0}])
    store(cache, "abcd")
    cache.clear(["cpu"])
    slow.hang("read")
    got: list[int] = []
    waiting = threading.Thread(target=lambda: got.append(retrieve(cache, "abcd")))
    waiting.start()
    assert slow.wait_until_hanging()
    cache.client.node.close(grace=0.1)  # type: ignore[attr-defined]
    waiting.join(20)
    assert got == [0]
    cache.close()


def test_a_retrieve_asks_tiers_that_cannot_be_listed_first() -> None:
    shared = CpuBackend(CpuOptions())
    with open_cache(shared) as writer:
        store(writer, "abcdefghij")
        with open_cache(_Share(shared)) as reader:
            assert retrieve(reader, "abcdefgh") == 8
            assert retrieve(reader, "xyz") == 0
            assert counted(reader, "retrieved_tokens", "t0") == 8 * PAGE_TOKENS

"""Several tiers together: who is asked, who is waited for, what goes where, and that none of them hurts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from lmcache_backends.cpu import CpuBackend, CpuOptions
from lmcache_core.config import BreakerConfig
from lmcache_core.index import residency
from lmcache_core.prefixsearch import QUESTIONS
from lmcache_core.protocols import ChunkKey, ReadResult
from lmcache_core.wrappers import Corrupting, Slow
from tests.node.kv import CHUNK_FRAME, PAGE_TOKENS, at_rest, open_cache, retrieve, store, tokens, until
from tests.node.shelf import Shelf


class Remote:
    """A medium that several nodes use, each through a door of its own. Counts what it is asked."""

    costly_probes = True

    def __init__(self, medium: CpuBackend | None = None) -> None:
        self.medium = medium or CpuBackend(CpuOptions())
        self.questions: list[int] = []
        self.reads = 0
        self.delete = self.medium.delete
        self.write = self.medium.write

    async def open(self) -> None:
        await self.medium.open()

    async def close(self) -> None:
        pass

    async def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        self.questions.append(len(keys))
        return await self.medium.contains(keys)

    async def read(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> list[ReadResult]:
        self.reads += len(keys)
        return await self.medium.read(keys, into)


class Cheap(Remote):
    costly_probes = False


def found(cache: Any, text: str) -> Any:
    """What a lookup says once all have answered."""
    until(lambda: not cache.lookup(tokens(text)).pending)
    return cache.lookup(tokens(text))


def prompt_of(chunks: int) -> str:
    """A prompt of so many chunks, no two of which are alike."""
    return "".join(f"{number:03}." for number in range(chunks))


def test_the_end_of_a_prefix_is_found_with_few_questions_where_each_costs() -> None:
    for stored in (0, 1, 37, 64):
        medium = CpuBackend(CpuOptions())
        with open_cache(Remote(medium), slots=70) as writer:
            if stored:
                store(writer, prompt_of(stored))
        remote = Remote(medium)
        with open_cache(remote, slots=70) as reader:
            assert found(reader, prompt_of(64)).tokens == stored * 4 * PAGE_TOKENS
            at_end = 3 if stored < 64 else 0  # for a tail behind the last full chunk
            assert sum(remote.questions) <= QUESTIONS + at_end
            assert retrieve(reader, prompt_of(64)) == stored * 4
            at_rest(reader)


def test_where_questions_are_cheap_all_are_asked_at_once() -> None:
    remote = Cheap()
    with open_cache(remote, slots=70) as cache:
        assert found(cache, prompt_of(64)).tokens == 0
        assert remote.questions == [64, 3]


def test_a_chunk_that_was_wrongly_concluded_to_be_there_is_a_miss_when_it_is_read() -> None:
    medium = CpuBackend(CpuOptions())
    with open_cache(Remote(medium), slots=20) as writer:
        store(writer, prompt_of(8))
        keys = writer.prompt(tokens(prompt_of(8))).keys
        space = writer.namespace.space(0)
        writer.client.node.start(medium.delete([ChunkKey(space, keys[4 * 3 - 1])])).result(10)  # type: ignore[attr-defined]
        with open_cache(Remote(medium), slots=20) as reader:
            assert found(reader, prompt_of(8)).tokens == 8 * 4 * PAGE_TOKENS
            assert retrieve(reader, prompt_of(8)) == 2 * 4
            assert reader.stats().counts["vanished_chunks"] == {"t0": 1}
            at_rest(reader)


def test_nobody_waits_for_a_slow_tier_when_a_fast_one_has_it_all() -> None:
    fast, slow = CpuBackend(CpuOptions()), Slow(Cheap())
    with open_cache(Cheap(fast)) as writer:
        store(writer, "abcdefgh")
        with open_cache(Cheap(fast), slow) as reader:
            slow.hang("contains")
            answer = found(reader, "abcdefgh")
            assert (answer.tokens, answer.tiers) == (8 * PAGE_TOKENS, {"t0": 8 * PAGE_TOKENS})
            until(lambda: slow.hanging == 0)
            at_rest(reader)


def test_what_is_read_from_further_down_is_kept_further_up_too() -> None:
    near, never, off, far = Shelf(), Shelf(), Shelf(), Cheap()
    with open_cache(far) as writer:
        store(writer, "abcdefgh")
    rules: list[dict[str, Any]] = [{}, {"write": "never"}, {"promote": False}, {}]
    with open_cache(near, never, off, Cheap(far.medium), tiers=rules) as cache:
        found(cache, "abcdefgh")
        assert retrieve(cache, "abcdefgh") == 8
        assert cache.flush(10)
        assert [len(shelf.values) for shelf in (near, never, off)] == [2, 0, 0]
        cache.clear(["cpu"])
        reads = far.reads
        assert retrieve(cache, "abcdefgh") == 8
        assert far.reads == reads
        at_rest(cache)


def test_where_a_second_use_decides_it_does_so_of_promotion_too() -> None:
    near, far = Shelf(), Cheap()
    with open_cache(far) as writer:
        store(writer, "abcd")
    with open_cache(near, Cheap(far.medium), tiers=[{"admit": "second-touch"}]) as cache:
        found(cache, "abcd")
        assert retrieve(cache, "abcd") == 4
        assert cache.flush(10)
        assert not near.values
        assert retrieve(cache, "abcd") == 4
        assert cache.flush(10)
        assert len(near.values) == 1


def test_short_prompts_stay_off_a_tier_that_wants_long_ones() -> None:
    near, far = Shelf(), Shelf()
    with open_cache(near, far, slots=8, tiers=[{}, {"min_prompt": 6 * PAGE_TOKENS}]) as cache:
        store(cache, "abcd")
        assert (len(near.values), len(far.values)) == (1, 0)
        store(cache, "abcdef")
        assert cache.flush(10)
        assert (len(near.values), len(far.values)) == (2, 2), "what was too short before is part of a long one now"
        at_rest(cache)


def test_a_tier_that_hangs_costs_its_deadline_once() -> None:
    slow = Slow(Shelf())
    breaker = BreakerConfig(failures=100, cooldown=3600)
    with open_cache(slow, slots=2, tiers=[{"read_timeout": 0.05, "breaker": breaker}]) as cache:
        for text in ("abcd", "efgh"):
            store(cache, text)
        cache.clear(["cpu"])
        slow.hang("read")
        assert retrieve(cache, "abcd") == 0
        assert not cache.stats().tiers[0].up
        assert cache.lookup(tokens("efgh")).tokens == 0
        slow.release()


def test_a_remote_tier_that_gives_wrong_bytes_again_and_again_is_left_alone() -> None:
    breaker = BreakerConfig(failures=3, cooldown=3600)
    lying = Corrupting(Cheap(), seed=1)
    texts = ["abcd", "efgh", "ijkl", "mnop", "qrst"]
    with open_cache(lying, slots=8, tiers=[{"breaker": breaker, "concurrency": 1}]) as cache:
        for text in texts:
            store(cache, text)
        cache.clear(["cpu"])
        assert [retrieve(cache, text) for text in texts] == [0] * 5
        assert cache.stats().counts["corrupt_chunks"] == {"t0": 3}
        assert not cache.stats().tiers[0].up
        assert cache.stats().slots == 0


def test_a_prompt_larger_than_the_pool_comes_from_a_tier_each_time() -> None:
    for slots in (1, 2, 5):
        with open_cache(Shelf(), slots=slots) as cache:
            whole = "".join(chr(ord("a") + number) for number in range(26)) + "ABCDEFGHIJ"
            for end in range(4, len(whole) + 1, 4):
                store(cache, whole[:end])
                assert cache.flush(10)
            assert [retrieve(cache, whole) for _ in range(4)] == [36] * 4
            at_rest(cache)


def test_the_capacity_of_a_tier_that_others_fill_too_is_its_own_matter() -> None:
    medium = Cheap()
    with open_cache(medium, slots=4, tiers=[{"capacity": 2 * CHUNK_FRAME}]) as cache:
        for number in range(12):
            assert store(cache, f"{number:04}")
        assert [retrieve(cache, f"{number:04}") for number in range(12)] == [4] * 12
        at_rest(cache)


def test_of_a_tier_where_nothing_is_deleted_only_so_many_chunks_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "MOST_KNOWN", 10)
    with open_cache(Cheap(), slots=4) as cache:
        texts = [f"{number:04}" for number in range(40)]
        for text in texts:
            assert store(cache, text)
        node = cache.client.node  # type: ignore[attr-defined]
        until(lambda: len(node.guard.index.tiers[0].policy) <= 14)
        (space,) = node.guard.index.spaces.values()
        assert len(space.chunks) <= 14
        assert [retrieve(cache, text) for text in texts] == [4] * 40, "who asks for it has the tier asked again"
        at_rest(cache)

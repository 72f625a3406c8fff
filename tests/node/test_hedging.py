"""A tier that takes longer than it does has another tier read the chunk too, if that is switched on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from lmcache_core import Cache
from lmcache_core.hedging import MOST_EARNED
from lmcache_core.pace import FEWEST
from lmcache_core.wrappers import Slow
from tests.node.kv import at_rest, open_cache, retrieve, store, until
from tests.node.shelf import Shelf

PATIENT = {"read_timeout": 60.0}
LETTERS = "abcdefghijklmnop"


def counted(cache: Cache, name: str, label: str) -> float:
    return float(cache.stats().counts.get(name, {}).get(label, 0))


@pytest.fixture
def slow() -> Iterator[Slow]:
    made = Slow(Shelf())
    yield made
    made.release()


def known(cache: Cache, text: str) -> None:
    """Have what is stored of `text` read from the first tier until that tier's speed is known."""
    for _ in range(FEWEST):
        cache.clear(["cpu"])
        assert retrieve(cache, text) == len(text)
    assert cache.stats().tiers[0].read_latency is not None


def ended(cache: Cache, slow: Slow) -> None:
    slow.release()
    until(lambda: cache.stats().tiers[0].queued == 0)
    cache.clear(["cpu"])
    at_rest(cache)
    assert cache.stats().slots == 0


def test_what_a_tier_does_not_give_in_time_comes_from_the_next(slow: Slow) -> None:
    """The first tier's deadline is far away, so nothing else can have ended the waiting."""
    with open_cache(slow, Shelf(), tiers=[{**PATIENT, "hedge": True}]) as cache:
        store(cache, "abcd")
        known(cache, "abcd")
        cache.clear(["cpu"])
        slow.hang("read")
        assert retrieve(cache, "abcd") == 4
        assert slow.hanging == 1
        assert [counted(cache, "hedged_reads", "t0"), counted(cache, "won_hedges", "t1")] == [1, 1]
        assert cache.stats().slots == 2, "one is still being read into"
        ended(cache, slow)
        assert retrieve(cache, "abcd") == 4
        assert counted(cache, "read_chunks", "t0") == FEWEST + 1


def test_it_is_off_by_default_and_then_the_deadline_ends_the_waiting(slow: Slow) -> None:
    with open_cache(slow, Shelf()) as cache:
        store(cache, "abcd")
        known(cache, "abcd")
    with open_cache(slow, Shelf(), tiers=[{"read_timeout": 0.05}]) as cache:
        store(cache, "abcd")
        known(cache, "abcd")
        cache.clear(["cpu"])
        slow.hang("read")
        assert retrieve(cache, "abcd") == 0
        assert counted(cache, "hedged_reads", "t0") == 0


def test_what_waits_behind_a_read_that_hangs_is_read_elsewhere_once(slow: Slow) -> None:
    """Sixteen chunks of sixteen prompts, and room for one read at a time: the others never get to the first tier."""
    first: Any = slow.inner
    rules = {**PATIENT, "hedge": True, "concurrency": 1}
    with open_cache(slow, Shelf(), slots=40, tiers=[rules]) as cache:
        text = LETTERS * 4
        store(cache, text)
        known(cache, text)
        cache.clear(["cpu"])
        slow.hang("read")
        reads = len([verb for verb, _ in first.calls if verb == "read"])
        assert retrieve(cache, text) == len(text)
        ended(cache, slow)
        assert len([verb for verb, _ in first.calls if verb == "read"]) <= reads + 1


def test_a_tenth_of_reads_is_made_twice_at_most(slow: Slow) -> None:
    """Beyond what was saved up, a read that hangs is waited for."""
    rules = {"read_timeout": 1.0, "hedge": True, "concurrency": 64}
    with open_cache(slow, Shelf(), slots=80, tiers=[rules]) as cache:
        prompts = [letter * 4 for letter in LETTERS + LETTERS.upper()]
        for text in prompts:
            store(cache, text)
        for _ in range(2):
            cache.clear(["cpu"])
            assert sum(retrieve(cache, text) for text in prompts) == 4 * len(prompts)
        cache.clear(["cpu"])
        slow.hang("read")
        got = [retrieve(cache, text) for text in prompts if cache.stats().tiers[0].up]
        hedged = counted(cache, "hedged_reads", "t0")
        assert MOST_EARNED <= hedged <= MOST_EARNED + len(prompts) // 10 + 1
        assert got[: int(MOST_EARNED)] == [4] * int(MOST_EARNED)
        ended(cache, slow)


def test_speeds_are_told() -> None:
    """Two sizes of reads, a delay whatever the size: about all of it is latency."""
    slow = Slow(Shelf(), delay=0.02, verbs=["read"])
    with open_cache(slow) as cache:
        assert cache.stats().tiers[0].read_latency is None
        store(cache, "abcdefgh")
        store(cache, "x")
        for _ in range(FEWEST):
            cache.clear(["cpu"])
            assert retrieve(cache, "abcdefgh") == 8
            assert retrieve(cache, "x") == 1
        (tier,) = cache.stats().tiers
        assert tier.read_latency is not None
        assert tier.read_latency > 0.01

"""Reads past the pool count for a tier's health and pace as reads into it do, and hold up what those do."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError
from typing import Any

import pytest

from lmcache_core import Cache
from lmcache_core.breaker import Breaker
from lmcache_core.client import DirectReading
from lmcache_core.config import BreakerConfig
from lmcache_core.errors import BackendError
from lmcache_core.pace import FEWEST
from lmcache_core.protocols import CopyBack, DirectRead, ReadResult
from tests.node.directshelf import DirectShelf
from tests.node.kv import PAGE_BYTES, open_cache, retrieve, store, tokens, until
from tests.node.kv import page as page_of

QUICK = {"breaker": BreakerConfig(failures=3, cooldown=0.01, max_cooldown=0.02)}
LONG = {"breaker": BreakerConfig(failures=3, cooldown=60.0, max_cooldown=60.0)}
NBYTES = 4 * PAGE_BYTES


class Device:
    """Memory that is copied back from as a device's is."""

    def __init__(self) -> None:
        self.memory = bytearray(NBYTES)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.lost = False

    def back(self, address: int, into: memoryview) -> None:
        if self.lost:
            raise OSError("the device is lost")
        ctypes.memmove((ctypes.c_char * len(into)).from_buffer(into), address, len(into))


def begin(cache: Cache, device: Device, text: str = "abcd") -> DirectReading:
    """Read the first chunk of a prompt past the pool."""
    client: Any = cache.client
    model: Any = cache._model
    held = client.hold(model, cache.prompt(tokens(text)).keys)
    try:
        found = client.past_host(held, 0)
        assert found is not None
        assert found.nbytes == NBYTES
        return client.read_past_host(found, device.address, device.back)  # type: ignore[no-any-return]
    finally:
        client.release(held)


def read(cache: Cache, device: Device) -> list[ReadResult]:
    reading = begin(cache, device)
    assert reading.answered.result(5)
    return reading.ended.result(5)


def fails(cache: Cache, device: Device) -> str:
    with pytest.raises(BackendError) as error:
        read(cache, device)
    return str(error.value)


def up(cache: Cache) -> bool:
    return bool(cache.stats().tiers[0].up)


def gated(cache: Cache, shelf: DirectShelf, *, open_: bool) -> None:
    """Let reads wait, or go on."""
    done = threading.Event()

    def change() -> None:
        (shelf.gate.set if open_ else shelf.gate.clear)()
        done.set()

    client: Any = cache.client
    client.node._loop.call(change)
    assert done.wait(5)


def probed(patch: pytest.MonkeyPatch, times: int) -> None:
    """Wait until it has been considered so often to open the tier again."""
    asked: list[Breaker] = []
    before = Breaker.next_probe

    def count(breaker: Breaker) -> float:
        asked.append(breaker)
        return before(breaker)

    patch.setattr(Breaker, "next_probe", count)
    until(lambda: len(asked) >= times)


def stored(cache: Cache) -> Device:
    store(cache, "abcd")
    assert cache.flush(5)
    cache.clear(["cpu"])
    return Device()


def test_it_is_measured() -> None:
    shelf = DirectShelf()
    with open_cache(shelf) as cache:
        device = stored(cache)
        for _ in range(FEWEST):
            assert cache.stats().tiers[0].read_bandwidth is None
            assert read(cache, device) == [ReadResult.HIT]
        assert cache.stats().tiers[0].read_bandwidth is not None
        expected = b"".join(page_of(key, 0).tobytes() for key in cache.prompt(tokens("abcd")).keys)
        assert device.memory == expected


@pytest.mark.parametrize("raised", [BackendError("no"), RuntimeError("no"), SystemExit("no"), KeyboardInterrupt("no")])
def test_a_success_between_failures_counts(raised: BaseException) -> None:
    """Whatever a plugin raises costs a failed read and nothing else."""
    shelf = DirectShelf()
    with open_cache(shelf, tiers=[LONG]) as cache:
        device = stored(cache)
        works = shelf.read_direct

        async def broken(reads: Sequence[DirectRead], back: CopyBack) -> list[ReadResult]:
            raise raised

        for _ in range(3):
            shelf.read_direct = broken  # type: ignore[method-assign]
            assert [fails(cache, device)[-2:] for _ in range(2)] == ["no", "no"]
            shelf.read_direct = works  # type: ignore[method-assign]
            assert read(cache, device) == [ReadResult.HIT]
        assert up(cache)


def test_three_failures_and_no_more_is_asked() -> None:
    shelf = DirectShelf(["raise"])
    with open_cache(shelf, tiers=[LONG]) as cache:
        device = stored(cache)
        readings = [begin(cache, device) for _ in range(3)]
        for reading in readings:
            assert reading.answered.result(5)
            assert isinstance(reading.ended.exception(5), BackendError)
        assert not up(cache)
        assert retrieve(cache, "abcd") == 0


@pytest.mark.parametrize("answer", [None, [], [True], [ReadResult.HIT, ReadResult.HIT], "hit"])
def test_an_answer_that_is_none_is_a_failure(answer: Any) -> None:
    shelf = DirectShelf()
    with open_cache(shelf) as cache:
        device = stored(cache)

        async def odd(reads: Sequence[DirectRead], back: CopyBack) -> list[ReadResult]:
            return answer  # type: ignore[no-any-return]

        shelf.read_direct = odd  # type: ignore[method-assign]
        assert "for one read" in fails(cache, device)


def test_a_lost_device_is_not_the_tiers_fault() -> None:
    shelf = DirectShelf()
    with open_cache(shelf, tiers=[{"breaker": BreakerConfig(failures=1, cooldown=60.0)}]) as cache:
        device = stored(cache)
        device.lost = True
        assert "copied back" in fails(cache, device)
        assert up(cache)
        assert retrieve(cache, "abcd") == 4


def test_what_hangs_leaves_the_tier_alone_and_it_is_opened_again_only_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shelf = DirectShelf()
    with open_cache(shelf, tiers=[{**QUICK, "read_timeout": 0.05}]) as cache:
        device = stored(cache)
        gated(cache, shelf, open_=False)
        reading = begin(cache, device)
        assert not reading.answered.result(5)
        assert not up(cache)
        stats = cache.stats().tiers[0]
        assert stats.quarantined == NBYTES
        probed(monkeypatch, 5)
        assert ("close", 1) not in shelf.calls
        assert not reading.ended.done()
        gated(cache, shelf, open_=True)
        assert reading.ended.result(5) == [ReadResult.HIT]
        until(lambda: up(cache))
        assert cache.stats().tiers[0].quarantined == 0
        assert read(cache, device) == [ReadResult.HIT]


def test_closing_waits_for_it() -> None:
    shelf = DirectShelf()
    with open_cache(shelf) as cache:
        device = stored(cache)
        gated(cache, shelf, open_=False)
        reading = begin(cache, device)
        until(lambda: len(shelf.arrived) == 1)
        client: Any = cache.client
        assert not client.flush(0.01)
        thread = threading.Thread(target=cache.close)
        thread.start()
        assert ("close", 1) not in shelf.calls
        gated(cache, shelf, open_=True)
        assert reading.ended.result(5) == [ReadResult.HIT]
        thread.join(10)
        assert not thread.is_alive()
        assert shelf.calls[-1] == ("close", 1)


def test_there_is_no_such_part() -> None:
    with open_cache(DirectShelf()) as cache:
        stored(cache)
        client: Any = cache.client
        held = client.hold(cache._model, cache.prompt(tokens("abcd")).keys)
        assert [client.past_host(held, number) for number in (-1, 1, 99)] == [None] * 3
        client.release(held)
        assert retrieve(cache, "abcd") == 4


def test_what_is_under_way_when_a_node_is_closed_without_patience_ends_before_its_backend() -> None:
    class Waits(DirectShelf):
        async def held(self, number: int) -> None:
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.calls.append(("cancelled", 1))
                raise

    shelf = Waits()
    with open_cache(shelf) as cache:
        device = stored(cache)
        gated(cache, shelf, open_=False)
        reading = begin(cache, device)
        until(lambda: len(shelf.arrived) == 1)
        client: Any = cache.client
        client.node.close(0.0)
    assert isinstance(reading.ended.exception(5), CancelledError)
    assert shelf.calls[-2:] == [("cancelled", 1), ("close", 1)]


def test_a_tier_that_went_down_is_not_opened_again_while_it_is_read() -> None:
    """Nor is anything asked of it meanwhile, by who has been told that it can be."""
    shelf = DirectShelf()
    with open_cache(shelf, tiers=[QUICK]) as cache, pytest.MonkeyPatch.context() as patch:
        device, other = stored(cache), Device()
        gated(cache, shelf, open_=False)
        client: Any = cache.client
        held = client.hold(cache._model, cache.prompt(tokens("abcd")).keys)
        found = client.past_host(held, 0)
        first = client.read_past_host(found, device.address, device.back)
        until(lambda: len(shelf.arrived) == 1)
        client.node._loop.call(client.node.runners[0].health.trip)
        second = client.read_past_host(found, other.address, other.back)
        assert second.answered.result(5)
        with pytest.raises(BackendError, match="left alone"):
            second.ended.result(5)
        probed(patch, 5)
        assert ("close", 1) not in shelf.calls
        client.release(held)
        gated(cache, shelf, open_=True)
        assert first.ended.result(5) == [ReadResult.HIT]
        until(lambda: up(cache))
        assert len(shelf.arrived) == 1
        assert other.memory == bytes(NBYTES)

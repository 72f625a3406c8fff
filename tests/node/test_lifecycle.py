"""What a backend that hangs, blocks or fails in any verb does to opening, waiting and closing: never a hang of ours."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from lmcache_core import AsyncCache, ClosedError, node
from lmcache_core.cache import Cache
from lmcache_core.coding.recipe import Recipe
from lmcache_core.config import BreakerConfig, TierConfig
from lmcache_core.direct import DirectClient
from lmcache_core.errors import BackendError, ConfigError
from lmcache_core.framing import Framer
from lmcache_core.index.decisions import Load, Write
from lmcache_core.protocols import ChunkKey
from lmcache_core.ratelog import RateLog
from lmcache_core.tier import TierRunner
from lmcache_core.wrappers import Slow
from tests.node.kv import PAGE_TOKENS, PageView, at_rest, namespace, open_cache, retrieve, store, tokens, until
from tests.node.shelf import Shelf

QUICK = BreakerConfig(failures=2, cooldown=0.01, max_cooldown=0.05)
IMPATIENT = {"write_timeout": 0.05, "read_timeout": 0.05, "breaker": QUICK}


@pytest.mark.parametrize("verb", ["delete", "touch", "describe"])
def test_what_waits_behind_a_change_that_hangs_is_told_at_its_deadline(verb: str) -> None:
    """A backend that cannot be cancelled hangs in a change: writes of the same keys wait behind it, nobody for ever."""
    slow = Slow(Shelf())
    with open_cache(slow, tiers=[IMPATIENT | {"concurrency": 1}]) as cache:
        assert store(cache, "abcd")
        slow.hang(verb)
        if verb == "delete":
            cache.evict(tokens("abcd"))
        elif verb == "touch":
            cache.client.release(cache.client.hold(cache._model, cache.prompt(tokens("abcd")).keys))
        else:
            Cache(cache.client, namespace(weights="another"))
        assert slow.wait_until_hanging()
        prompt = cache.prompt(tokens("efgh"))
        result = cache.store(prompt, PageView.of(prompt.keys))
        assert cache.flush(10)
        assert result.wait(10) in (False, True)  # told, either way: it may have come before the change
        slow.release()
        until(lambda: cache.stats().tiers[0].up and cache.stats().tiers[0].queued == 0)
        assert store(cache, "ijkl")
        at_rest(cache)


def test_changes_that_hang_open_the_breaker() -> None:
    slow = Slow(Shelf())
    with open_cache(slow, tiers=[IMPATIENT | {"concurrency": 4}]) as cache:
        for text in ("abcd", "efgh"):
            assert store(cache, text)
        slow.hang("delete")
        for text in ("abcd", "efgh"):
            cache.evict(tokens(text))
        until(lambda: not cache.stats().tiers[0].up)
        assert cache.flush(10)
        slow.release()
        until(lambda: cache.stats().tiers[0].up)
        assert store(cache, "ijkl")


def test_a_late_write_leaves_its_key_to_nobody_before_it_has_ended() -> None:
    shelf = Shelf()
    slow = Slow(shelf)
    with open_cache(slow, tiers=[IMPATIENT | {"breaker": BreakerConfig(failures=100)}]) as cache:
        slow.hang("write")
        prompt = cache.prompt(tokens("abcd"))
        assert cache.store(prompt, PageView.of(prompt.keys)).wait(10) is False
        cache.clear()
        assert [verb for verb, _ in shelf.calls if verb in ("write", "delete")] == []
        slow.release()
        until(lambda: cache.stats().tiers[0].queued == 0)
        assert not shelf.values
        at_rest(cache)


class Blocking(Shelf):
    """Blocks the event loop when it is opened, as no backend may."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()

    async def open(self) -> None:
        while not self.go_on.is_set():
            pass


def test_a_backend_that_blocks_the_event_loop_is_named_and_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "START_TIMEOUT", 0.2)
    monkeypatch.setattr(node, "CLOSE_TIMEOUT", 0.2)
    monkeypatch.setattr("lmcache_core.loop.STOP_TIMEOUT", 0.1)
    blocking = Blocking()
    with pytest.raises(BackendError, match=r"backends \(test\) makes blocking calls"):
        open_cache(blocking)
    blocking.go_on.set()
    until(lambda: not any(thread.name == "lmcache-loop" for thread in threading.enumerate()))


def test_closing_lets_go_of_everything_whatever_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = open_cache(Shelf(), Shelf())
    a_node: Any = cache.client.node  # type: ignore[attr-defined]

    async def fail(grace: float) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(a_node.runners[0], "close", fail)
    cache.close()
    assert not a_node._loop.thread.is_alive()
    assert a_node.runners[1].backend.calls[-1] == ("close", 1)
    with pytest.raises(ValueError, match="released"):
        a_node.pool.memory[0]
    with pytest.raises(ClosedError):
        cache.lookup(tokens("abcd"))


class Asked(Shelf):
    """Never answers what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Event()

    async def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        self.asked.set()
        await asyncio.Event().wait()
        return []


async def test_closing_while_a_tier_is_asked_is_a_miss_to_coroutines() -> None:
    asked = Asked()
    opened = await asyncio.to_thread(open_cache, _Unlisted(asked), tiers=[{"read_timeout": 3600.0}])
    client = opened.client
    cache = AsyncCache(client, namespace())
    prompt = cache.prompt(tokens("abcd"))
    waiting = asyncio.create_task(cache.retrieve(prompt, PageView(4)))
    await asyncio.to_thread(asked.asked.wait, 10)
    await asyncio.to_thread(client.node.close, 0.1)  # type: ignore[attr-defined]
    with pytest.raises(ClosedError):
        await waiting


class _Unlisted:
    """A backend without its list."""

    def __init__(self, inner: Shelf) -> None:
        self.read, self.write, self.delete = inner.read, inner.write, inner.delete
        self.contains, self.open, self.close = inner.contains, inner.open, inner.close


def test_a_tier_that_refuses_its_options_when_it_is_asked_is_a_miss() -> None:
    class Refusing(Shelf):
        async def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
            raise ConfigError("tiers[0].url: the server has another name now")

    with open_cache(_Unlisted(Refusing()), tiers=[{"breaker": BreakerConfig(failures=1)}]) as cache:
        assert retrieve(cache, "abcd") == 0
        assert not cache.stats().tiers[0].up


def test_what_is_let_go_of_unfinished_is_given_back() -> None:
    with open_cache(Shelf(), lease_timeout=3600.0) as cache:
        assert store(cache, "abcd")
        client: DirectClient = cache.client  # type: ignore[assignment]
        held = client.hold(cache._model, cache.prompt(tokens("abcd")).keys)
        assert client.grant(held, 0, 1)[0].source is not None
        storing = client.begin_store(cache._model, cache.prompt(tokens("efghijkl")).keys)
        room = storing.rooms[0]
        room.target[:] = PageView.of(cache.prompt(tokens("efgh")).keys).rows[0].reshape(-1).data
        client.filled(room)
        assert cache.stats().leases == 1
        assert cache.stats().staged == 1
        del held, storing, room
        gc.collect()
        until(lambda: not (cache.stats().leases or cache.stats().staged))
        assert cache.flush(10)
        assert retrieve(cache, "efghijkl") == 4  # what was filled is kept
        at_rest(cache)


def test_what_was_shared_with_other_ranks_is_given_back_when_it_is_let_go_of() -> None:
    with open_cache(lease_timeout=3600.0) as cache:
        store(cache, "abcd")
        client, model = cache.client, cache._model
        number = client.share(client.begin_store(model, cache.prompt(tokens("efgh")).keys))
        held = client.hold(model, cache.prompt(tokens("abcd")).keys)
        assert client.grant(held, 0, 1)
        lease = client.share(held)
        del held
        gc.collect()
        at_rest(cache)
        assert client.join_store(number) is None
        assert client.join_hold(lease) is None


def test_a_start_that_took_long_is_no_standstill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "STILL", 0.05)
    monkeypatch.setattr(node, "TICK", 0.01)
    with open_cache(Slow(Shelf(), delay=0.1, verbs=["open"])) as cache:
        cache.client.node.check_loop()  # type: ignore[attr-defined]


def test_a_room_is_not_written_to_after_it_was_reported() -> None:
    with open_cache() as cache:
        client = cache.client
        prompt = cache.prompt(tokens("abcd"))
        storing = client.begin_store(cache._model, prompt.keys)
        client.filled(storing.rooms[0])
        with pytest.raises(ValueError, match="released"):
            storing.rooms[0].target[0] = 1
        assert client.finish_store(storing).pages == 4
        assert cache.lookup(prompt).tokens == 4 * PAGE_TOKENS


async def test_what_was_about_to_begin_when_a_tier_is_closed_is_told() -> None:
    """A task that is cancelled before its first step runs none of its code, not even what cleans up."""
    told: list[tuple[str, Any]] = []

    class Events:
        def __getattr__(self, name: str) -> Any:
            return lambda *arguments: told.append((name, arguments[0]))

    events: Any = Events()
    config = TierConfig(backend="test", name="t0", concurrency=1)
    faults = RateLog(logging.getLogger("test"))
    runner = TierRunner(0, config, Shelf(), Recipe(), Framer(), events, faults)
    runner.health.up = True
    entry: Any = SimpleNamespace(chunk_key=ChunkKey(bytes(32), bytes(32)), nbytes=4096)
    nothing: Any = None
    writes = [Write(0, entry, nothing, []) for _ in range(2)]
    loads = [Load(entry, nothing, 0) for _ in range(2)]
    for write in writes:
        runner.mutate(write)
    for load in loads:
        runner.read(load)
    runner._idle.set()  # so that closing does not wait, in which time they would begin
    await runner.close(0)
    assert [what for name, what in told if name == "wrote"] == writes[::-1]  # those that waited first
    assert {id(what) for name, what in told if name == "dropped"} == set(map(id, loads))
    assert runner.queued == 0

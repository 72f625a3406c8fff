"""What is done to one key on a tier is done in the order in which it was decided."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from benchmarks.faults.campaign import until
from benchmarks.faults.engine import CHUNK_PAGES, Prompt
from lmcache_core.protocols import ChunkKey
from lmcache_core.wrappers import Slow
from tests.faults.kit import FRAME, an_engine
from tests.node.shelf import Shelf


class Gated(Shelf):
    """Deleting one of its keys takes until the gate is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.slow: ChunkKey | None = None
        self.waiting = False
        self.gate = asyncio.Event()

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        if self.slow in keys and not self.gate.is_set():
            self.waiting = True
            await self.gate.wait()
        await super().delete(keys)


def test_a_write_that_waits_with_an_eviction_does_not_delete_what_was_stored_meanwhile() -> None:
    """The eviction of X goes with a write of B, which waits for a slow deletion of B. X is stored again meanwhile."""
    shelf = Gated()
    b, x, y = (Prompt(number, CHUNK_PAGES) for number in range(3))
    with an_engine(shelf, tiers=[{"capacity": 2 * FRAME}]) as engine:
        cache = engine.cache
        assert engine.stored(b)
        assert engine.stored(x)
        shelf.slow = ChunkKey(engine.space, cache.prompt(b.tokens).keys[-1])
        cache.evict(b.tokens)
        assert until(lambda: shelf.waiting, 10)
        assert engine.stored(y)  # the tier has X and Y
        written = engine.store(b)  # takes the place of X, and waits
        again = engine.store(x)  # takes the place of Y
        assert written is not None
        assert again is not None
        again.wait(0.5)
        cache.client.node.start(opened(shelf.gate)).result(10)  # type: ignore[attr-defined]
        assert written.wait(10)
        assert again.wait(10)
        assert cache.flush(10)
        cache.clear(["cpu"])
        assert engine.lookup(x) == x.pages
        assert engine.retrieve(x) == x.pages
        assert engine.count("vanished_chunks") == 0


async def opened(gate: asyncio.Event) -> None:
    gate.set()


class Between:
    """A mutex that lets something happen at the moment when it has been released."""

    def __init__(self, mutex: threading.Lock) -> None:
        self._mutex = mutex
        self.then: Callable[[], object] | None = None

    def acquire(self, *arguments: Any) -> bool:
        return self._mutex.acquire(*arguments)

    def release(self) -> None:
        self._mutex.release()
        then, self.then = self.then, None
        if then is not None:
            then()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *exc: object) -> None:
        self.release()


@pytest.mark.parametrize("verb", ["write", "read"])
def test_what_one_thread_decides_while_another_lets_go_is_done_once(verb: str) -> None:
    shelf = Shelf()
    with an_engine(shelf) as engine:
        prompt = Prompt(0, CHUNK_PAGES)
        if verb == "read":
            assert engine.stored(prompt)
            engine.cache.clear(["cpu"])
        node = engine.cache.client.node  # type: ignore[attr-defined]
        node.guard.mutex = between = Between(node.guard.mutex)
        between.then = (lambda: engine.stored(prompt)) if verb == "write" else (lambda: engine.retrieve(prompt))
        engine.cache.lookup(Prompt(1, 1).tokens)
        assert engine.cache.flush(10)
        assert [count for called, count in shelf.calls if called == verb] == [1]
        assert engine.retrieve(prompt) == prompt.pages


def test_closing_tells_who_waits_for_a_write_that_waits_for_another() -> None:
    slow = Slow(Shelf())
    with an_engine(slow) as engine:
        prompt = Prompt(0, CHUNK_PAGES)
        assert engine.stored(prompt)
        slow.hang("delete")
        engine.cache.evict(prompt.tokens)
        assert slow.wait_until_hanging()
        written = engine.store(prompt)
        assert written is not None
        engine.cache.client.node.close(0.2)  # type: ignore[attr-defined]
        assert written._written.done()
        assert written.wait() is False

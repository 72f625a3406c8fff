"""What is done to one key on a tier is done in the order in which it was decided."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from benchmarks.faults.campaign import until
from benchmarks.faults.engine import CHUNK_PAGES, Prompt
from lmcache_core.protocols import ChunkKey
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

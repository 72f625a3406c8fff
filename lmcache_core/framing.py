"""What is done to whole frames, off the event loop: sealing slots once before they are written to tiers, and coding."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from lmcache_core import frame
from lmcache_core.hostpool import Slot
from lmcache_core.index import Entry
from lmcache_core.iothreads import IoThreads, Workers

P = ParamSpec("P")
R = TypeVar("R")


class Framer:
    """Runs `frame.seal` and what else works on frames on threads, or on `workers`. To be used on one event loop."""

    def __init__(self, threads: int = 2, workers: Workers | None = None) -> None:
        self._threads = IoThreads("lmcache-frame", threads) if workers is None else workers
        self._sealing: dict[Slot, asyncio.Future[None]] = {}

    async def seal(self, slot: Slot, entry: Entry) -> None:
        """Put the header in front of a slot's payload. Concurrent calls for one slot do it once."""
        if slot.sealed:
            return
        under_way = self._sealing.get(slot)
        if under_way is None:
            under_way = self._threads.submit(
                frame.seal, slot.frame, slot.form, entry.space.digest, entry.parent, entry.pages
            )
            self._sealing[slot] = under_way
            under_way.add_done_callback(lambda _: self._sealing.pop(slot))
        await asyncio.shield(under_way)
        slot.sealed = True

    async def run(self, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Return or raise what `fn`, which works on frames, does. A cancelled coroutine ends only when `fn` has."""
        return await self._threads.finish(fn, *args, **kwargs)

    def close(self) -> None:
        """Stop the threads."""
        self._threads.close()

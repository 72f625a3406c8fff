"""Sealing slots before they are written to tiers, checking them after they were read: once each, off the event loop."""

from __future__ import annotations

import asyncio

from lmcache_core import frame
from lmcache_core.errors import FrameError
from lmcache_core.hostpool import Slot
from lmcache_core.index import Entry
from lmcache_core.iothreads import IoThreads, Workers


class Framer:
    """Runs `frame.seal` and `frame.verify` on threads, or on `workers`. To be used on one event loop."""

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

    async def verify(self, slot: Slot, entry: Entry) -> FrameError | None:
        """Check every byte of a slot that was read. Returns what is wrong with it."""
        try:
            await self._threads.finish(
                frame.verify, slot.frame, slot.form, entry.space.digest, entry.parent, entry.pages
            )
        except FrameError as error:
            return error
        return None

    def close(self) -> None:
        """Stop the threads."""
        self._threads.close()

"""One opening of the backend: the open directory, threads for it, and the sweeps.

A call that hangs costs its thread. The directory is closed only when no thread can use it any more: the number of its
descriptor would be given to another file, and a thread that goes on after an hour would write there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

from lmcache_backends.nfs.chunks import ChunkFiles
from lmcache_backends.nfs.directory import open_root
from lmcache_backends.nfs.errors import failed
from lmcache_backends.nfs.leases import Leases
from lmcache_backends.nfs.moving import Mover
from lmcache_backends.nfs.naming import Maker
from lmcache_backends.nfs.options import Settings
from lmcache_backends.nfs.sweep import Rules, Sweeper
from lmcache_backends.nfs.tally import Tally
from lmcache_core.errors import ClosedError
from lmcache_core.iocalls import IoCalls
from lmcache_core.iothreads import IoThreads, ended
from lmcache_core.openings import to_the_end

__all__ = ["Session"]

R = TypeVar("R")

_LAST_CALLS = 2.0
"""Seconds that `close` waits for calls that are under way before it leaves them to their threads: what takes longer
hangs. Less than the node gives a backend to close in."""
HURRY = 0.01
"""Part of the capacity that this host writes before it sweeps without waiting for the time."""
SOONEST = 10.0
"""Seconds between two sweeps of a part at least."""
FIRST = 60.0
"""Seconds within which the first sweep begins, at a time by chance: hosts may all start together."""
TIDY = 86400.0
"""Seconds between two sweeps where there is neither capacity nor ttl: only what crashes left is removed."""


class Session:
    """All methods run on the event loop, but for those that say so."""

    def __init__(self, options: Settings, tally: Tally, mover: Callable[[], Mover], *, reads_only: bool) -> None:
        """`mover` makes what moves bytes; it is called on a thread and may raise what `open` may."""
        self._options = options
        self._reads_only = reads_only
        self._name = options.name
        self._mover = mover
        self._tally = tally
        self._path = options.directory()
        self._maker = Maker()
        self._calls = IoCalls(self._name, options.threads, self._close_root)
        self._sweeping = IoThreads(f"{self._name}-sweep", 1)
        self._root = -1
        self._chunks: ChunkFiles | None = None
        self._sweeper: Sweeper | None = None
        self._sweeps: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()
        self._written = 0

    @property
    def root(self) -> int:
        """The open directory."""
        return self._root

    @property
    def maker(self) -> Maker:
        """Who makes names for what is unfinished."""
        return self._maker

    @property
    def chunks(self) -> ChunkFiles:
        """The chunks there."""
        if self._chunks is None:
            raise ClosedError(f"{self._name}: the backend is not open")
        return self._chunks

    async def open(self) -> None:
        try:
            await self.each(self._open, [()])
        except BaseException:  # a cancelled opening too must let go of what it has
            await to_the_end(self.close())
            raise
        if not self._reads_only:
            self._begin_sweeps()

    def _begin_sweeps(self) -> None:
        rules = Rules(self._options.capacity, self._options.ttl, self._options.sweep_interval)
        if rules.capacity is None and rules.ttl is None:
            rules = Rules(None, None, TIDY)
        leases = Leases(self._root, self._maker.name, self._tally)
        self._sweeper = Sweeper(self._root, self._path, rules, leases, self._tally, self._name)
        self._sweeps = asyncio.create_task(self._sweep(self._sweeper, rules.interval))

    def _open(self) -> None:
        mover = self._mover()
        try:
            self._root = open_root(self._path, self._options.must_be_mounted, self._name, make=not self._reads_only)
        except OSError as error:
            raise failed(error, self._path, name=self._name) from error
        self._chunks = ChunkFiles(self._root, self._options, self._tally, self._maker, mover)

    async def each(self, fn: Callable[..., R], calls: Iterable[tuple[object, ...]]) -> list[R]:
        """See `IoCalls`."""
        return await self._calls.each(fn, calls)

    def wrote(self, nbytes: int) -> None:
        """Sweep soon if much has been written."""
        self._written += nbytes
        if self._options.capacity is not None and self._written >= HURRY * self._options.capacity:
            self._written = 0
            self._hurry.set()

    async def close(self) -> None:
        if self._sweeps is not None:
            self._sweeps.cancel()
            await asyncio.wait([self._sweeps], timeout=_LAST_CALLS)
        if self._sweeper is not None:
            self._sweeper.abandoned = True  # a step that hangs may not use the directory once it has gone
        await self._calls.close(_LAST_CALLS)
        self._sweeping.close()

    def _close_root(self) -> None:
        """On a thread."""
        root, self._root = self._root, -1
        if root >= 0:
            with contextlib.suppress(OSError):
                os.close(root)

    # Sweeps

    async def _sweep(self, sweeper: Sweeper, interval: float) -> None:
        pause = random.uniform(0, min(interval, FIRST))
        while True:
            hurried = await self._pause(pause)
            steps = sweeper.round(min(SOONEST, interval) if hurried else 0.9 * interval)
            try:
                while await self._step(steps):
                    pass
            except ClosedError:
                return
            await asyncio.sleep(min(SOONEST, interval))
            pause = max(0.0, interval - SOONEST)

    async def _step(self, steps: Generator[None, None, None]) -> bool:
        step = self._calls.submit(_advance, steps, threads=self._sweeping)
        try:
            await ended([step])
        except asyncio.CancelledError:
            with contextlib.suppress(ClosedError):
                await self._sweeping.finish(steps.close)
            raise
        return step.result()

    async def _pause(self, seconds: float) -> bool:
        """Whether much was written meanwhile."""
        try:
            async with asyncio.timeout(seconds):
                await self._hurry.wait()
        except TimeoutError:
            return False
        self._hurry.clear()
        return True


def _advance(steps: Generator[None, None, None]) -> bool:
    """Whether there may be more."""
    end = object()
    return next(steps, end) is not end

"""Calls on threads that share something which may be let go of only when none of them uses it any more: an open
directory, whose number another file would get; a library's client, which may not be called once it is closed.

A call that hangs costs its thread, and then what it uses stays until it ends, if ever.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from lmcache_core.errors import ClosedError
from lmcache_core.iothreads import IoThreads, ended

__all__ = ["IoCalls"]

R = TypeVar("R")


class IoCalls:
    """All methods run on one event loop.

    Args:
        name: Of the backend, for errors and its threads.
        threads: How many calls run at once.
        let_go: Called once, on a thread, when `close` was called and no call runs any more.
    """

    def __init__(self, name: str, threads: int, let_go: Callable[[], None] = lambda: None) -> None:
        self._name = name
        self._let_go = let_go
        self._threads = IoThreads(name, threads)
        self._under_way: set[asyncio.Future[Any]] = set()
        self._lock = threading.Lock()
        self._running = 0
        self._closed = False

    def submit(self, fn: Callable[..., R], *arguments: object, threads: IoThreads | None = None) -> asyncio.Future[R]:
        """Queue a call and return the future of its outcome; on other threads than these, if some are given.

        Raises:
            ClosedError: `close` was called.
        """
        future = (threads or self._threads).submit(self._run, fn, arguments)
        self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)
        return future

    async def each(self, fn: Callable[..., R], calls: Iterable[tuple[object, ...]]) -> list[R]:
        """Call `fn` with each of the arguments and return when all have ended, even if cancelled: they use the caller's
        memory, and who has called must know that they hang. If calls fail, the first of them does.

        Raises:
            ClosedError: `close` was called.
        """
        futures = [self.submit(fn, *arguments) for arguments in calls]
        await ended(futures)
        return [future.result() for future in futures]

    async def close(self, patience: float) -> None:
        """Start no more calls, and let go once those that run have ended: here, if that is within so many seconds, else
        on the thread of the last of them. To be called once."""
        if self._under_way:
            await asyncio.wait(self._under_way, timeout=patience)
        with self._lock:
            self._closed = True
            busy = self._running > 0
        if not busy:
            await self._threads.finish(self._let_go)
        self._threads.close()

    def _run(self, fn: Callable[..., R], arguments: tuple[object, ...]) -> R:
        """On a thread."""
        with self._lock:
            if self._closed:
                raise ClosedError(f"{self._name}: closed")
            self._running += 1
        try:
            return fn(*arguments)
        finally:
            with self._lock:
                self._running -= 1
                last = self._closed and not self._running
            if last:
                self._let_go()

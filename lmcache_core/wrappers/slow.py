"""Latency, limited bandwidth, and calls that hang until they are let go."""

from __future__ import annotations

import asyncio
import math
import random
import threading
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from typing import TypeVar

from lmcache_core.protocols import StorageBackend
from lmcache_core.wrappers.base import DATA_VERBS, Wrapper

__all__ = ["Slow"]

T = TypeVar("T")


class Slow(Wrapper):
    """Waits before it calls `inner`: `delay` seconds and the time its bytes take, or until `release`.

    Waiting touches no buffer, so a call that is cancelled meanwhile has ended when its coroutine has. The methods that
    are not verbs may be called from any thread.
    """

    def __init__(
        self,
        inner: StorageBackend,
        *,
        delay: float = 0.0,
        bytes_per_second: float = math.inf,
        jitter: float = 0.0,
        seed: object = 0,
        verbs: Collection[str] = DATA_VERBS,
    ) -> None:
        """Each call has the bandwidth for itself. `jitter` adds up to that share of the wait, by a seeded generator."""
        super().__init__(inner)
        self.active = True
        """While False, nothing waits but what hangs. May be changed at any time, as may the others."""
        self.delay = delay
        self.bytes_per_second = bytes_per_second
        self.jitter = jitter
        self.verbs = verbs
        self._rng = random.Random(f"{seed!r}")
        self._changed = threading.Condition()
        self._hanging_verbs: frozenset[str] = frozenset()
        self._hanging: set[asyncio.Future[None]] = set()

    @property
    def hanging(self) -> int:
        """Calls that hang now."""
        return len(self._hanging)

    def hang(self, *verbs: str) -> None:
        """From now on calls of these verbs wait for `release`; without verbs, all but `open` and `close`."""
        with self._changed:
            self._hanging_verbs = frozenset(verbs) or DATA_VERBS

    def release(self) -> None:
        """Let go what hangs, and hang nothing more."""
        with self._changed:
            self._hanging_verbs = frozenset()
            for future in self._hanging:
                with suppress(RuntimeError):  # its loop is closed
                    future.get_loop().call_soon_threadsafe(_wake, future)

    def wait_until_hanging(self, calls: int = 1, timeout: float = 10.0) -> bool:
        """Block this thread, which must not be an event loop's, until so many calls hang; False if they don't."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._hanging) >= calls, timeout)

    async def around(self, verb: str, nbytes: int, call: Callable[[], Awaitable[T]]) -> T:
        await self._hang(verb)
        if self.active and verb in self.verbs:
            wait = self.delay + nbytes / self.bytes_per_second
            await asyncio.sleep(wait * (1 + self.jitter * self._rng.random()))
        return await call()

    async def _hang(self, verb: str) -> None:
        with self._changed:
            if verb not in self._hanging_verbs:
                return
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._hanging.add(future)
            self._changed.notify_all()
        try:
            await future
        finally:
            with self._changed:
                self._hanging.discard(future)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)

"""Reads of one tier into a device's memory, past the host pool; they count for its health and pace as others do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from functools import partial

from lmcache_core.config import TierConfig
from lmcache_core.errors import BackendError, ConfigError
from lmcache_core.events import OpeningEvents
from lmcache_core.health import TierHealth
from lmcache_core.protocols import CopyBack, DeviceDirect, DirectRead, ReadResult

__all__ = ["DirectReads"]

Ended = Future[list[ReadResult]]


class DirectReads:
    """Runs on the event loop.

    Args:
        number: Which tier it is.
        config: Its settings.
        backend: Its backend.
        health: Its health.
        events: Whom to tell.
        changed: Called when there is one more under way, or one less.
    """

    def __init__(
        self,
        number: int,
        config: TierConfig,
        backend: DeviceDirect,
        health: TierHealth,
        events: OpeningEvents,
        changed: Callable[[], None],
    ) -> None:
        self._number = number
        self._config = config
        self._backend = backend
        self._health = health
        self._events = events
        self._changed = changed
        self._tasks: dict[asyncio.Task[list[ReadResult]], None] = {}
        """In order, so that a run can be repeated exactly."""
        self._overdue: set[asyncio.Task[list[ReadResult]]] = set()

    @property
    def possible(self) -> bool:
        """Whether there is a device for the backend to read to, and the tier is in use."""
        try:
            return self._health.up and bool(self._backend.has_device)
        except (Exception, SystemExit):  # noqa: BLE001  a plugin may raise anything
            return False

    @property
    def busy(self) -> bool:
        """Whether anything is under way."""
        return bool(self._tasks)

    @property
    def awaited(self) -> bool:
        """Whether anything is under way that is not past its deadline."""
        return len(self._tasks) > len(self._overdue)

    async def read(self, read: DirectRead, back: CopyBack, ended: Ended) -> bool:
        """Read pages of one chunk. Returns at the deadline of the tier's reads at the latest; False if it has not ended
        then. `ended` is told what came of it when nothing writes to the device's memory any more."""
        if not self._health.up:
            ended.set_exception(BackendError(f"tier {self._config.name} is left alone for now"))
            return True
        nbytes = read.pages * read.chunk.page_bytes
        task = asyncio.get_running_loop().create_task(self._read(read, back, nbytes))
        self._tasks[task] = None
        task.add_done_callback(partial(self._ended, nbytes, ended))
        self._changed()
        limit = self._config.read_timeout
        await asyncio.wait([task], timeout=limit)
        if not task.done():
            self._overdue.add(task)
            self._health.quarantine(nbytes)
            self._health.timed_out(f"did not answer within {limit:g} s", limit)
            self._changed()
        return task.done()

    async def _read(self, read: DirectRead, back: CopyBack, nbytes: int) -> list[ReadResult]:
        loop = asyncio.get_running_loop()
        started = loop.time()
        lost: list[Exception] = []

        def watched(address: int, into: memoryview) -> None:
            try:
                back(address, into)
            except Exception as error:
                lost.append(error)  # the engine's device has failed, not the tier
                raise

        try:
            result = await self._health.calls.call(self._asked(read, watched), self._config.read_timeout)
        except (BackendError, ConfigError, TimeoutError) as error:
            if not lost and asyncio.current_task() not in self._overdue:
                self._health.failed(error, "failed to read")
            raise
        if result is ReadResult.HIT:
            self._events.measured(self._number, nbytes, loop.time() - started)
        if asyncio.current_task() not in self._overdue:
            self._health.succeeded()
        return [result]

    async def _asked(self, read: DirectRead, back: CopyBack) -> ReadResult:
        results = await self._backend.read_direct([read], back)
        if not isinstance(results, (list, tuple)) or [type(each) for each in results] != [ReadResult]:
            raise BackendError(f"{results!r:.80} for one read")
        return results[0]

    def _ended(self, nbytes: int, ended: Ended, task: asyncio.Task[list[ReadResult]]) -> None:
        del self._tasks[task]
        if task in self._overdue:
            self._overdue.discard(task)
            self._health.release(nbytes)
        failure = CancelledError() if task.cancelled() else task.exception()
        if failure is None:
            ended.set_result(task.result())
        else:
            ended.set_exception(failure)
        self._changed()

    def cancel(self) -> None:
        """Ask all that is under way to end. It does when its I/O has."""
        for task in list(self._tasks):
            task.cancel()

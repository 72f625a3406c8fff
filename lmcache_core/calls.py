"""Calls of a backend's verbs: what a plugin raises becomes `BackendError`, and what it lets hang is kept track of."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Coroutine
from typing import Any, TypeVar

from lmcache_core.errors import BackendError, ConfigError
from lmcache_core.openings import Opening
from lmcache_core.protocols import Abortable, StorageBackend

T = TypeVar("T")

_VERBS = [name for name, verb in vars(StorageBackend).items() if inspect.iscoroutinefunction(verb)]


class BackendCalls:
    """Calls of one backend. Runs on the event loop."""

    def __init__(self, backend: Opening, name: str) -> None:
        self.abortable = isinstance(backend, Abortable) and backend.abortable
        self._backend = backend
        self._name = name
        self._hanging: set[asyncio.Task[Any]] = set()
        self._deadlines: dict[asyncio.Timeout, None] = {}
        """Of calls under way that can be aborted, in order."""

    @property
    def hanging(self) -> int:
        """Calls that nobody waits for any more and that have not ended."""
        return len(self._hanging)

    async def call(self, work: Coroutine[Any, Any, T], limit: float) -> T:
        """Await a verb that uses memory of the caller: to its end, or where it can be aborted at most `limit` seconds.

        Raises:
            BackendError: It failed, in whatever way.
            ConfigError: The backend's options can never work.
            TimeoutError: It took too long.
        """
        if not inspect.isawaitable(work) and (plain := self._plain()):
            raise BackendError(f"backend {self._name}: {plain} not 'async def', as all verbs of a backend have to be")
        try:
            async with asyncio.timeout(limit if self.abortable else None) as deadline:
                if not self.abortable:
                    return await work
                self._deadlines[deadline] = None
                try:
                    return await work
                finally:
                    del self._deadlines[deadline]
        except (BackendError, ConfigError, TimeoutError):
            raise
        except asyncio.CancelledError as error:
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            raise BackendError(f"backend {self._name} cancelled itself") from error
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            # A plugin may raise anything: that must cost no more than a failed operation, and end no event loop.
            raise BackendError(f"backend {self._name} raised {type(error).__name__}: {error}") from error

    async def bounded(self, work: Coroutine[Any, Any, T], limit: float) -> T:
        """Await a verb that uses no memory of the caller for at most `limit` seconds, even if it cannot be cancelled:
        then it is left behind, as one more that is hanging.

        Raises:
            BackendError: It failed, in whatever way.
            ConfigError: The backend's options can never work.
            TimeoutError: It took too long.
        """
        task = asyncio.create_task(self.call(work, limit))
        task.add_done_callback(self._ended)
        try:
            await asyncio.wait([task], timeout=limit)
        finally:
            if not task.done():
                self._hanging.add(task)
                task.cancel()
        if not task.done():
            raise TimeoutError
        return task.result()

    async def rest(self, limit: float) -> None:
        """Wait at most `limit` seconds for what is hanging."""
        if self._hanging:
            await asyncio.wait(list(self._hanging), timeout=limit)

    def abort(self) -> None:
        """Let the time of all that can be aborted be over: who waits for it, waits in vain."""
        now = asyncio.get_running_loop().time()
        for deadline in self._deadlines:
            if not deadline.expired():
                deadline.reschedule(now)

    def _plain(self) -> str:
        """Which verbs may be what returned something that cannot be awaited: for who wrote the backend."""
        verbs = [verb for verb in _VERBS if not inspect.iscoroutinefunction(getattr(self._backend, verb, None))]
        *others, last = verbs or [""]
        return f"{', '.join(others)} and {last} are" if others else last and f"{last} is"

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._hanging.discard(task)
        if not task.cancelled():
            task.exception()  # counts as seen, also when nobody waits any more

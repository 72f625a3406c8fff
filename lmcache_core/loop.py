"""The event loop that owns all I/O, on a thread of its own, and the bridge to it from other threads."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, Protocol, TypeVar

from lmcache_core.errors import ClosedError, UsageError

T = TypeVar("T")

log = logging.getLogger(__name__)

STOP_TIMEOUT = 5.0


class NodeLoop(Protocol):
    """An event loop that runs beside its callers; see `LoopThread`."""

    def call(self, work: Callable[[], None]) -> None:
        """Have `work` called on the loop soon; after the loop has stopped it is not called."""
        ...

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop."""
        ...

    def run(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run a coroutine on the loop and wait for what it returns."""
        ...

    def stop(self) -> None:
        """Cancel what still runs on the loop, and stop it."""
        ...


class LoopThread:
    """One asyncio event loop on one daemon thread."""

    def __init__(self, name: str = "lmcache-loop") -> None:
        self.loop = asyncio.new_event_loop()
        self._stopping = False
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()

    def call(self, work: Callable[[], None]) -> None:
        """Have `work` called on the loop soon, from any thread; after the loop has stopped it is not called."""
        with contextlib.suppress(RuntimeError):  # it has stopped
            self.loop.call_soon_threadsafe(work)

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop; the future is for other threads.

        Raises:
            ClosedError: The loop has stopped.
        """
        if self._stopping or not self.thread.is_alive():
            work.close()
            raise ClosedError("the node's event loop has stopped")
        try:
            return asyncio.run_coroutine_threadsafe(work, self.loop)
        except RuntimeError as error:  # it has just been closed
            work.close()
            raise ClosedError("the node's event loop has stopped") from error

    def run(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run a coroutine on the loop and wait for what it returns.

        Raises:
            UsageError: Called on the loop's own thread, which would wait for itself.
            TimeoutError: It has not ended within `timeout` seconds; it goes on.
            ClosedError: The loop has stopped, or does before that ends.
        """
        if threading.current_thread() is self.thread:
            work.close()
            raise UsageError("a blocking call was made on the event loop's own thread; await the async form instead")
        try:
            return self.start(work).result(timeout)
        except CancelledError as error:
            raise ClosedError("the node has been closed meanwhile") from error

    def stop(self) -> None:
        """Cancel what still runs on the loop, stop it and wait for its thread. A thread that a plugin blocks is left
        behind; it is a daemon."""
        if self.thread.is_alive():
            with contextlib.suppress(ClosedError):
                self.start(self._cancel_all())
            self._stopping = True
            self.thread.join(2 * STOP_TIMEOUT)
            if self.thread.is_alive():
                log.error("%s is blocked and is left behind", self.thread.name)

    async def _cancel_all(self) -> None:
        until = self.loop.time() + STOP_TIMEOUT
        while (others := asyncio.all_tasks() - {asyncio.current_task()}) and self.loop.time() < until:
            for task in others:
                task.cancel()
            await asyncio.wait(others, timeout=until - self.loop.time())
        self.loop.stop()

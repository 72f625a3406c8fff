"""The event loop that owns all I/O, on a thread of its own, and the bridge to it from other threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from lmcache_core.errors import ClosedError, UsageError

T = TypeVar("T")

STOP_TIMEOUT = 5.0


class LoopThread:
    """One asyncio event loop on one daemon thread."""

    def __init__(self, name: str = "lmcache-loop") -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop; the future is for other threads.

        Raises:
            ClosedError: The loop has stopped.
        """
        if self.loop.is_closed() or not self.thread.is_alive():
            work.close()
            raise ClosedError("the node's event loop has stopped")
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def run(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run a coroutine on the loop and wait for what it returns.

        Raises:
            UsageError: Called on the loop's own thread, which would wait for itself.
            TimeoutError: It has not ended within `timeout` seconds; it goes on.
            ClosedError: The loop has stopped.
        """
        if threading.current_thread() is self.thread:
            work.close()
            raise UsageError("a blocking call was made on the event loop's own thread; await the async form instead")
        return self.start(work).result(timeout)

    def stop(self) -> None:
        """Cancel what still runs on the loop, stop it and wait for its thread."""
        if self.thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._cancel_all(), self.loop)
            self.thread.join()

    async def _cancel_all(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=STOP_TIMEOUT)
        self.loop.stop()

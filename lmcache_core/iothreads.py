"""Threads of one tier for calls that block, such as file I/O: a hung mount holds up neither other tiers nor exit.

Unlike `concurrent.futures` they are daemon threads that nothing joins: a thread inside a `pread` that never returns
costs that thread and nothing else. A thread drops all references to a call before it waits for the next one, so
memory that was handed in is not kept.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

from lmcache_core.errors import ClosedError

__all__ = ["IoThreads", "Workers", "ended"]

P = ParamSpec("P")
R = TypeVar("R")

_log = logging.getLogger(__name__)


class Workers(Protocol):
    """Runs calls beside the event loop; see `IoThreads`."""

    async def finish(self, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Return or raise what `fn` does; a cancelled coroutine ends only when `fn` has."""
        ...

    def submit(self, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[R]:
        """Queue `fn` and return the future of its outcome."""
        ...

    def close(self) -> None:
        """End after what is running."""
        ...


class _Call(NamedTuple):
    run: Callable[[], Any]
    future: asyncio.Future[Any] | None
    """Where the outcome goes; None when nobody waits for it."""


class IoThreads:
    """At most `threads` threads that start when they are first needed. May be used from several event loops.

    The queue in front of them has no bound; whoever submits keeps its own.
    """

    def __init__(self, name: str, threads: int) -> None:
        """`name` is what the threads are called in a debugger; `threads` is at least 1."""
        self._name = name
        self._limit = max(1, threads)
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._started = 0
        self._open_calls = 0  # queued or running
        self._closed = False

    async def run(self, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Return or raise what `fn` does on one of the threads.

        When the coroutine is cancelled it ends at once: an `fn` that runs goes on to its end and its outcome is
        dropped, one that has not started is not started.

        Raises:
            ClosedError: `close` was called before `fn` started.
        """
        return await self.submit(fn, *args, **kwargs)

    async def finish(self, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """As `run`, but a cancelled coroutine ends only when `fn` has: for `fn` that use memory of the caller.

        Raises:
            ClosedError: `close` was called before `fn` started.
        """
        future = self.submit(fn, *args, **kwargs)
        await ended([future])
        return future.result()

    def submit(self, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[R]:
        """Queue `fn` and return the future of its outcome, on the running event loop. Cancelling it does what
        cancelling `run` does.

        Raises:
            ClosedError: `close` has been called.
        """
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._put(_Call(lambda: fn(*args, **kwargs), future))
        return future

    def post(self, fn: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Queue `fn` and wait for nothing, from any thread. What it raises is logged; after `close` it does nothing."""
        try:
            self._put(_Call(lambda: fn(*args, **kwargs), None))
        except ClosedError:
            _log.debug("%s: closed, %r not started", self._name, fn)

    def close(self) -> None:
        """Let the threads end after what they are running. Calls still queued raise `ClosedError`. Waits for nothing;
        idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            started = self._started
        while True:
            try:
                call = self._calls.get_nowait()
            except queue.Empty:
                break
            if call is not None:
                self._post(call, None, ClosedError(f"{self._name}: closed"))
        for _ in range(started):
            self._calls.put(None)

    def _put(self, call: _Call) -> None:
        with self._lock:
            if self._closed:
                raise ClosedError(f"{self._name}: closed")
            self._open_calls += 1
            self._calls.put(call)
            if self._started < min(self._open_calls, self._limit):
                self._started += 1
                name = f"{self._name}-{self._started}"
                threading.Thread(target=self._work, name=name, daemon=True).start()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            value, error = None, None
            if call.future is None or not call.future.cancelled():
                try:
                    value = call.run()
                except BaseException as raised:  # noqa: BLE001  it is the caller's, whatever it is
                    error = raised
            with self._lock:
                self._open_calls -= 1
            self._post(call, value, error)
            del call, value, error

    def _post(self, call: _Call, value: object, error: BaseException | None) -> None:
        future = call.future
        if future is None:
            if error is not None:
                _log.error("%s: a call nobody waits for failed", self._name, exc_info=error)
            return
        try:
            future.get_loop().call_soon_threadsafe(_settle, future, value, error)
        except RuntimeError:
            _log.debug("%s: the event loop that waited is closed", self._name)


def _settle(future: asyncio.Future[Any], value: object, error: BaseException | None) -> None:
    if future.done():  # cancelled meanwhile
        return
    if error is None:
        future.set_result(value)
    elif isinstance(error, StopIteration):  # a future refuses it
        future.set_exception(RuntimeError("a blocking call raised StopIteration"))
    else:
        future.set_exception(error)


async def ended(futures: Collection[asyncio.Future[Any]]) -> None:
    """Wait until all `futures` are done, even when cancelled meanwhile, and only then raise the cancellation. What
    they raised stays in them, and counts as seen."""
    cancelled: asyncio.CancelledError | None = None
    waiting = set(futures)
    while waiting:
        try:
            _, waiting = await asyncio.wait(waiting)
        except asyncio.CancelledError as error:
            cancelled = error
            waiting = {future for future in waiting if not future.done()}
    for future in futures:
        if not future.cancelled():
            future.exception()
    if cancelled is not None:
        raise cancelled

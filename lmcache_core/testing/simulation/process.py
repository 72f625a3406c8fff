"""The machine as one simulated process sees it: its event loop, its workers and its log, on the virtual loop.

A process is killed by ending its scopes; the media that it wrote to live on.
"""

from __future__ import annotations

import asyncio
import logging
import random
from asyncio import futures
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, ParamSpec, TypeVar

from lmcache_core.errors import ClosedError
from lmcache_core.iothreads import ended
from lmcache_core.runtime import Runtime
from lmcache_core.testing.simulation.loop import Scope, VirtualLoop
from lmcache_core.testing.simulation.trace import Trace

__all__ = ["SimulatedRuntime"]

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

STOP_TIMEOUT = 5.0
"""As `lmcache_core.loop` has it."""


class SimulatedRuntime(Runtime):
    """What a node of the simulation runs on."""

    prefault = False

    def __init__(self, scope: Scope, loop: VirtualLoop, rng: random.Random, trace: Trace) -> None:
        self._scope = scope
        self._loop = loop
        self._rng = rng
        self._trace = trace

    def clock(self) -> float:
        """See `Runtime`."""
        return self._loop.time()

    def pause(self, seconds: float) -> None:
        """There are no other threads to wait for."""

    def loop(self) -> SimulatedNodeLoop:
        """See `Runtime`."""
        return SimulatedNodeLoop(self._scope, self._loop)

    def workers(self, name: str, threads: int) -> SimulatedWorkers:
        """See `Runtime`."""
        return SimulatedWorkers(self._loop, self._rng)

    def log_writer(self) -> TracedLines:
        """See `Runtime`."""
        return TracedLines(self._scope, self._trace)


class SimulatedNodeLoop:
    """What `LoopThread` is to a node: its part of the virtual loop. `run` and `stop` let virtual time pass until they
    have what they wait for, so they are for whoever drives the simulation, as a thread's own calls are."""

    def __init__(self, scope: Scope, loop: VirtualLoop) -> None:
        self._scope = scope
        self._loop = loop

    def call(self, work: Callable[[], None]) -> None:
        """See `NodeLoop`."""
        if self._scope.alive:
            self._loop.call_soon(work, context=self._scope.context)

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """See `NodeLoop`."""
        if not self._scope.alive:
            work.close()
            raise ClosedError("the node's event loop has stopped")
        future: Future[T] = Future()
        futures._chain_future(self._loop.spawn(self._scope, work), future)  # type: ignore[attr-defined]
        return future

    def run(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """See `NodeLoop`."""
        future = self.start(work)
        if not self._loop.run_until(future.done, 1e6 if timeout is None else timeout):
            raise TimeoutError
        try:
            return future.result()
        except CancelledError as error:
            raise ClosedError("the node has been closed meanwhile") from error

    def stop(self) -> None:
        """See `NodeLoop`."""
        until = self._loop.time() + STOP_TIMEOUT
        while (tasks := list(self._scope.pending)) and self._loop.time() < until:
            for task in tasks:
                task.cancel()
            self._loop.run_until(lambda tasks=tasks: all(t.done() for t in tasks), until - self._loop.time())  # type: ignore[misc]
        self._scope.alive = False


class SimulatedWorkers:
    """What `IoThreads` is to a node: a call runs some time after it was made, and its outcome is known some time after
    that, so that much can happen in between."""

    def __init__(self, loop: VirtualLoop, rng: random.Random) -> None:
        self._loop = loop
        self._rng = rng
        self._closed = False

    async def finish(self, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """See `Workers`."""
        future = self.submit(fn, *args, **kwargs)
        await ended([future])
        return future.result()

    def submit(self, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[R]:
        """See `Workers`."""
        if self._closed:
            raise ClosedError("closed")
        future: asyncio.Future[R] = self._loop.create_future()

        def settle(value: R | None, error: Exception | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(value)  # type: ignore[arg-type]
            else:
                future.set_exception(error)

        def work() -> None:
            if future.cancelled():
                return
            outcome: tuple[R | None, Exception | None]
            try:
                outcome = (fn(*args, **kwargs), None)
            except Exception as error:  # noqa: BLE001 it is the caller's, whatever it is
                outcome = (None, error)
            self._loop.call_later(self._seconds(), settle, *outcome)

        self._loop.call_later(self._seconds(), work)
        return future

    def _seconds(self) -> float:
        return self._rng.choice((0.0, 0.0001, 0.001, 0.005))

    def close(self) -> None:
        """See `Workers`."""
        self._closed = True


class TracedLines:
    """Log lines of a node go into the trace."""

    def __init__(self, scope: Scope, trace: Trace) -> None:
        self._scope = scope
        self._trace = trace

    def write(self, logger: logging.Logger, level: int, message: str, args: tuple[object, ...]) -> None:
        """See `LineWriter`."""
        self._trace.add(f"{self._scope.name} log: {message % args}")

    def close(self) -> None:
        """See `LineWriter`."""

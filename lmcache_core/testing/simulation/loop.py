"""An event loop in virtual time: nothing waits, no thread runs, and the seed decides what comes first.

Callbacks that are ready at the same time run in an order that is drawn, since on a real machine other threads, sockets
and disks decide it; but tasks begin in the order in which they were made, as asyncio promises. When none is ready, time
jumps to the next timer. A callback belongs to the `Scope` in whose context it was made; those of a scope that has ended
are dropped, as all that a process was about to do is when it is killed.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import random
import sys
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import Context, ContextVar, copy_context
from typing import Any

from lmcache_core.testing.simulation.trace import SimulationError, Trace

__all__ = ["Scope", "VirtualLoop"]

MOST_AT_ONCE = 50_000
"""Callbacks at one moment of virtual time, beyond which something spins."""

_scope: ContextVar[Scope] = ContextVar("scope")


class Scope:
    """Whose callbacks and tasks these are: a node's, an engine's, or the world's."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.tasks: list[asyncio.Task[Any]] = []
        self._context = copy_context()
        self._context.run(_scope.set, self)

    @property
    def context(self) -> Context:
        """A context in which what is made is this scope's."""
        return self._context.copy()

    @property
    def pending(self) -> list[asyncio.Task[Any]]:
        """Tasks that have not ended, in the order in which they were made."""
        self.tasks = [task for task in self.tasks if not task.done()]
        return self.tasks


class VirtualLoop(asyncio.BaseEventLoop):
    """See the module.

    Args:
        rng: Draws the order.
        trace: Its clock is this loop's.
        shuffled: Whether the order is drawn, or that in which callbacks became ready.
        after_each: Called after every callback.
    """

    _ready: list[asyncio.Handle | None]
    _scheduled: list[asyncio.TimerHandle]

    def __init__(self, rng: random.Random, trace: Trace, *, shuffled: bool, after_each: Callable[[], None]) -> None:
        super().__init__()
        self._ready = []
        """None stands for the first of those that begin."""
        self._begin: deque[asyncio.Handle] = deque()
        self._rng = rng
        self._trace = trace
        self._shuffled = shuffled
        self._after_each = after_each
        self._at_once = 0
        self._running = False
        self._scopes: dict[Scope, None] = {}
        self.world = Scope("world")
        """Of what has been made outside of all scopes."""
        self.failures: list[str] = []
        """Exceptions of callbacks and tasks that nobody has seen."""
        self.steps = 0
        self.set_task_factory(self._make_task)

    def time(self) -> float:
        """Virtual seconds since the run began."""
        return self._trace.now

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """There are no other threads."""
        return self.call_soon(callback, *args, context=context)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Keep what went wrong for the checks."""
        self.failures.append(f"{context.get('message')}: {context.get('exception')!r}")

    def spawn(self, scope: Scope, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine as a task of a scope."""
        return self.create_task(work, context=scope.context)

    def run_until(self, done: Callable[[], bool], seconds: float) -> bool:
        """Run what is ready and let time pass until `done`, for at most so many seconds. Returns whether it is.

        Raises:
            SimulationError: It spins: callbacks follow each other, and no time passes.
        """
        if self._running:
            raise SimulationError("a blocking call was made on the event loop")
        until = self._trace.now + seconds
        self._running = True
        before = sys.get_asyncgen_hooks()
        asyncio._set_running_loop(self)
        sys.set_asyncgen_hooks(self._asyncgen_firstiter_hook, self._asyncgen_finalizer_hook)  # type: ignore[attr-defined]
        try:
            while not done():
                if not self._step(until):
                    return False
            return True
        finally:
            self._running = False
            asyncio._set_running_loop(None)
            sys.set_asyncgen_hooks(*before)

    def pass_time(self, seconds: float) -> None:
        """Run all that happens in so many seconds."""
        self.run_until(lambda: False, seconds)

    def _step(self, until: float) -> bool:
        ready, scheduled = self._ready, self._scheduled
        if not ready:
            while scheduled and scheduled[0].cancelled():
                heapq.heappop(scheduled)
            when = scheduled[0].when() if scheduled else math.inf
            if when > until:
                self._trace.now = until
                return False
            self._trace.now = max(self._trace.now, when)
            self._at_once = 0
            while scheduled and scheduled[0].when() <= when:
                ready.append(heapq.heappop(scheduled))
        number = 0
        if len(ready) > 1 and self._shuffled:
            number = int(self._rng.random() * len(ready))
            ready[number], ready[-1] = ready[-1], ready[number]
            number = -1
        handle = ready.pop(number) or self._begin.popleft()
        self._at_once += 1
        if self._at_once > MOST_AT_ONCE:
            raise SimulationError(f"runaway: {MOST_AT_ONCE} callbacks and no time has passed")
        if not handle.cancelled() and handle._context.get(_scope, self.world).alive:  # type: ignore[attr-defined]
            self.steps += 1
            handle._run()
            self._after_each()
        return True

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, work: Any, context: Context | None = None
    ) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, context=context)
        first = self._ready.pop()
        assert first is not None
        self._begin.append(first)
        self._ready.append(None)
        scope = _scope.get(self.world) if context is None else context.get(_scope, self.world)
        if not scope.tasks:
            self._scopes[scope] = None
        scope.tasks.append(task)
        return task

    def end(self) -> None:
        """Drop all that still runs, quietly."""
        asyncio._set_running_loop(self)
        self._after_each = lambda: None
        try:
            for scope in self._scopes:
                scope.alive = False
            while pending := [task for scope in self._scopes for task in scope.pending]:  # some make more on their way
                for task in pending:
                    task._log_destroy_pending = False  # type: ignore[attr-defined]
                    with suppress(BaseException):  # what it raises on its way out is nobody's any more
                        task.get_coro().close()
                for scope in self._scopes:
                    scope.tasks = [task for task in scope.tasks if task not in pending]
            self._ready.clear()
            self._begin.clear()
            self._scheduled.clear()
        finally:
            asyncio._set_running_loop(None)
        self.close()

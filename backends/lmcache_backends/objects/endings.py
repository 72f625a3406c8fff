"""The end of the process while requests are under way: threads of Rust that call into an interpreter that is ending
abort the process, so that it ends by a signal and not with its own exit code. Requests are ended before."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import threading
import weakref
from collections.abc import Awaitable, Callable

__all__ = ["end_before_exit"]

_LONGEST = 1.0
"""Seconds that the end of the process is held up at most."""
_SETTLES = 0.05
"""Seconds in which the threads let go of requests that have been cancelled."""

_endings: weakref.WeakSet[_Ending] = weakref.WeakSet()


class _Ending:
    """How to end what one event loop runs; kept by whoever runs it."""

    def __init__(self, end: Callable[[], Awaitable[None]]) -> None:
        self._end = weakref.WeakMethod(end)
        self._loop = asyncio.get_running_loop()

    def run(self) -> None:
        end = self._end()
        if end is None or not self._loop.is_running():
            return
        ended = threading.Event()

        async def work() -> None:
            try:
                await end()
                await asyncio.sleep(_SETTLES)
            finally:
                ended.set()

        with contextlib.suppress(RuntimeError):  # the event loop has just been closed
            asyncio.run_coroutine_threadsafe(work(), self._loop)
            ended.wait(_LONGEST)


def end_before_exit(end: Callable[[], Awaitable[None]]) -> object:
    """Have the method `end` called on the running event loop before the interpreter ends, if what is returned, and the
    object of the method, still exist then."""
    ending = _Ending(end)
    _endings.add(ending)
    return ending


@atexit.register
def _end_all() -> None:
    for ending in list(_endings):
        ending.run()

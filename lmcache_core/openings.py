"""What a backend has between `open` and `close`: made anew each time, and never two at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, Protocol, TypeVar

from lmcache_core.errors import ClosedError

__all__ = ["Opening", "Openings", "to_the_end"]


class Opening(Protocol):
    """What can be opened, as one of them."""

    async def open(self) -> None:
        """Get what is needed; if that fails, it has let go of everything."""
        ...

    async def close(self) -> None:
        """Let go of everything."""
        ...


S = TypeVar("S", bound=Opening)


class Openings(Generic[S]):
    """The openings of a backend. To be used on one event loop.

    Args:
        name: Of the backend, for errors.
        make: Makes one that is not open yet.
    """

    def __init__(self, name: str, make: Callable[[], S]) -> None:
        self._name = name
        self._make = make
        self._open: S | None = None
        self._changing = asyncio.Lock()

    async def open(self) -> None:
        """End what is open, and open a new one."""
        async with self._changing:
            await self._end()
            made = self._make()
            await made.open()
            self._open = made

    async def close(self) -> None:
        """End what is open. Idempotent."""
        async with self._changing:
            await self._end()

    async def _end(self) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            await opened.close()

    @property
    def current(self) -> S:
        """What is open.

        Raises:
            ClosedError: Nothing is.
        """
        if self._open is None:
            raise ClosedError(f"{self._name}: the backend is not open")
        return self._open


async def to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Await work that nothing may break off, such as letting go of what was opened. When this is cancelled meanwhile it
    raises that, but only once the work has ended."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    failure = None if task.cancelled() else task.exception()
    if cancelled is not None:
        raise cancelled
    if failure is not None:
        raise failure

"""`IndexGuard`: the index under its one mutex, and the way of its decisions to the event loop.

Whoever uses the index writes

    with guard.turn, guard.mutex:
        index = guard.use()
        ...

The mutex is taken and left by `with` itself, in C, so that an interrupt (Ctrl-C raises at any line of the main thread)
never leaves it locked. Decisions stay in `index.out` until the event loop takes them, so that none is lost or overtaken
when a thread is interrupted or held up after its turn. An interrupt, or any other exception that nobody
foresaw, may leave the index half changed: then it is used no more.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence

from lmcache_core.errors import ClosedError, LMCacheError
from lmcache_core.index import Entry, Index
from lmcache_core.index.decisions import Decision

log = logging.getLogger(__name__)

MOST_AT_ONCE = 500
"""Chunks of very many that are changed in one turn: some milliseconds, in which all others wait."""


class IndexGuard:
    """See the module.

    Args:
        index: What is guarded.
        wake: Makes the event loop call `take` soon. Called from any thread, not under the mutex.
        broke: Called once when an interrupt has made the index unusable, from any thread, not under the mutex.
    """

    def __init__(self, index: Index, wake: Callable[[], None], broke: Callable[[], None]) -> None:
        self.mutex = threading.Lock()
        self.index = index
        self.turn = _Turn(self)
        self.refusal: str | None = None
        """Why nobody may use the index any more."""
        self.broken = False
        """An interrupt may have left the index half changed."""
        self._wake = wake
        self._broke = broke
        self._woken = False

    def use(self) -> Index:
        """The index. Called under the mutex.

        Raises:
            ClosedError: The node has been closed, or its index cannot be trusted any more.
        """
        if self.refusal is not None:
            raise ClosedError(self.refusal)
        return self.index

    @property
    def waiting(self) -> bool:
        """Whether there are decisions that nobody has taken."""
        return bool(self.index.out) and not self.broken

    def wake(self) -> None:
        """Have the decisions that wait carried out. Not called under the mutex."""
        if self.index.out and not self._woken:
            self._woken = True
            self._wake()

    def take(self) -> list[Decision]:
        """The decisions that wait, in the order in which they were taken. The caller carries them out. Called on the
        event loop only, so that their order is kept."""
        self._woken = False
        with self.mutex:
            if not self.index.out or self.broken:
                return []
            out, self.index.out = self.index.out, []
            return out

    def interrupted(self, error: BaseException) -> None:
        """A turn has ended by an exception that may have come at any line: an interrupt, or a defect."""
        with self.mutex:
            if self.broken:
                return
            self.broken = True
            self.refusal = self.refusal or (
                f"the node was interrupted by {type(error).__name__} while it changed its index, and serves nothing "
                "any more so that nothing wrong is served; close it and open it again"
            )
        log.error("%s", self.refusal, exc_info=error)
        self._broke()


def batches(entries: Sequence[Entry]) -> Iterator[Sequence[Entry]]:
    """Chunks as many at a time as may be changed in one turn."""
    for start in range(0, len(entries), MOST_AT_ONCE):
        yield entries[start : start + MOST_AT_ONCE]


class _Turn:
    """What comes after the mutex has been left."""

    __slots__ = ("_guard",)

    def __init__(self, guard: IndexGuard) -> None:
        self._guard = guard

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        guard = self._guard
        if error is None or isinstance(error, LMCacheError):  # which is raised before anything is changed
            if guard.index.out:
                guard.wake()
        else:
            self._guard.interrupted(error)

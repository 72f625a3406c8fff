"""Dynamic offloading: a window over an engine's free pages, so that few are in two places and few are waited for.

Pages that no request uses keep their KV until the engine takes them for something else, in an order that is known. All
of them copied ahead would be all of them twice; none copied ahead would make the engine wait for each. So only those
that it takes next are copied, up to a window's size:

      start            current               end
        |                 |                   |
        | copied          | to be copied      | free, left alone for now
        +-----------------+-------------------+-----------------------
        ^ the engine takes here                          is freed here ^

The engine moves start, a copy that has ended moves current, and end keeps its distance from start (LMCache, 2025,
section 5.3). How large the window must be is in `stalls`.

An object without I/O, time or locks: who has it tells what happened and asks what to do.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from enum import Enum
from typing import Generic, TypeVar

from lmcache_core.errors import UsageError

__all__ = ["Copy", "OffloadWindow"]

P = TypeVar("P", bound=Hashable)


class Copy(Enum):
    """What is to be done with a copy that has ended."""

    KEEP = "keep"
    """The page is free, and will be taken: the copy is what will be left of it."""
    DROP = "drop"
    """A request uses the page again meanwhile; the copy would be a second one."""


class _State(Enum):
    WAITS = "waits"
    UNDER_WAY = "under way"
    SAFE = "safe"
    """There is a copy, or it has been given up."""


class OffloadWindow(Generic[P]):
    """The free pages of an engine in the order in which it takes them.

    Of pages that are still in the engine's memory at most `size` have a copy or are being copied, whatever happens.

    Raises:
        UsageError: The size is no number of pages. All verbs raise it for a page that cannot be meant.
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise UsageError(f"a window has at least one page, not {size!r}")
        self.size = size
        self._window: OrderedDict[P, _State] = OrderedDict()
        self._beyond: OrderedDict[P, None] = OrderedDict()
        self._waiting: OrderedDict[P, None] = OrderedDict()
        """Of the window, those to be copied."""
        self._copied: set[P] = set()
        """Of the window."""
        self._under_way = 0
        """Of the window."""
        self._orphans: set[P] = set()
        """Being copied, though in use again since."""
        self._start = 0
        self.stalls = 0
        """How often `take` had nothing to give although pages were free."""

    @property
    def start(self) -> int:
        """Pages that have left the queue of free ones: where the next one is, counted from the first there ever was."""
        return self._start

    @property
    def current(self) -> int:
        """Where the first page is that cannot be taken yet."""
        ahead = 0
        for state in self._window.values():
            if state is not _State.SAFE:
                break
            ahead += 1
        return self._start + ahead

    @property
    def end(self) -> int:
        """Where the window ends."""
        return self._start + len(self._window)

    @property
    def free(self) -> int:
        """Pages that no request uses."""
        return len(self._window) + len(self._beyond)

    @property
    def duplicates(self) -> int:
        """Pages of the engine's memory that have a copy, or are being copied; at most `size`."""
        return len(self._copied) + self._under_way + len(self._orphans)

    def freed(self, page: P) -> None:
        """No request uses a page any more; the engine takes it after all that are free."""
        if page in self._window or page in self._beyond:
            raise UsageError(f"page {page!r} is free already")
        self._beyond[page] = None
        self._fill()

    def reused(self, page: P) -> bool:
        """A request uses a free page again, for the KV in it. Returns whether it has a copy, which the caller drops (it
        would be copied anew before the page is taken)."""
        if page in self._beyond:
            del self._beyond[page]
        elif page in self._window:
            if self._window.pop(page) is _State.UNDER_WAY:
                self._under_way -= 1
                self._orphans.add(page)
            self._waiting.pop(page, None)
        else:
            raise UsageError(f"page {page!r} is not free")
        self._start += 1
        had = page in self._copied
        self._copied.discard(page)
        self._fill()
        return had

    def offer(self, most: int) -> list[P]:
        """Pages to copy now, the next to be taken first. Each is being copied until `copied` or `failed` says more."""
        room = min(most, self.size - self.duplicates)
        chosen: list[P] = []
        for page in self._waiting:
            if len(chosen) >= room:
                break
            if page not in self._orphans:  # an older copy of it is still being made
                chosen.append(page)
        for page in chosen:
            del self._waiting[page]
            self._window[page] = _State.UNDER_WAY
        self._under_way += len(chosen)
        return chosen

    def copied(self, page: P) -> Copy:
        """A copy has ended."""
        if self._end(page):
            self._copied.add(page)
            self._window[page] = _State.SAFE
            return Copy.KEEP
        return Copy.DROP

    def failed(self, page: P) -> None:
        """A copy could not be made. The page may be taken without: what was in it is computed again."""
        if self._end(page):
            self._window[page] = _State.SAFE

    def _end(self, page: P) -> bool:
        """Whether a copy that has ended was that of a free page."""
        if page in self._orphans:
            self._orphans.remove(page)
            return False
        if self._window.get(page) is not _State.UNDER_WAY:
            raise UsageError(f"page {page!r} is not being copied")
        self._under_way -= 1
        return True

    def take(self, *, uncopied: bool = False) -> P | None:
        """The engine takes the first page; None if there is none, or if that stalls.

        Args:
            uncopied: Rather lose what is in a page than wait for it. One that is being copied is read meanwhile: it is
                waited for even so.
        """
        if not self._window:
            return None
        page, state = next(iter(self._window.items()))
        read = state is _State.UNDER_WAY or page in self._orphans
        if read or (state is _State.WAITS and not uncopied):
            self.stalls += 1
            return None
        del self._window[page]
        self._waiting.pop(page, None)
        self._copied.discard(page)
        self._start += 1
        self._fill()
        return page

    def _fill(self) -> None:
        """Move end on."""
        while self._beyond and len(self._window) < self.size:
            page, _ = self._beyond.popitem(last=False)
            self._window[page] = _State.WAITS
            self._waiting[page] = None

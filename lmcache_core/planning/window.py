"""Dynamic offloading: a window over an engine's free pages, so that few are in two places, and few lost or waited for.

Pages that no request uses keep their KV until the engine takes them for something else, in an order that is known. All
of them copied ahead would be all of them twice; none copied ahead would make the engine wait for each, or lose it. So
only those that it takes next are copied, up to a window's size:

      start            current               end
        |                 |                   |
        | copied          | to be copied      | free, left alone for now
        +-----------------+-------------------+-----------------------
        ^ the engine takes here                          is freed here ^

The engine moves start, a copy that has ended moves current, and end keeps its distance from start (LMCache, 2025,
section 5.3). How large the window must be is in `stalls`.

An object without I/O, time or locks: who has it shows it the engine's free pages and asks what to do.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from itertools import islice
from typing import Generic, TypeVar

from lmcache_core.errors import UsageError

__all__ = ["OffloadWindow"]

P = TypeVar("P", bound=Hashable)


class OffloadWindow(Generic[P]):
    """The pages that an engine takes next. A page is named by what is in it: one that is taken and filled with
    something else is another page, one that is used again and freed again is the same.

    Of the pages in the window all may have a copy, and no others are copied: so what is in two places because of the
    window is never more than `size`.

    Raises:
        UsageError: The size is no number of pages. All verbs raise it for a page that cannot be meant.
    """

    def __init__(self, size: int) -> None:
        self._window: dict[P, None] = {}
        self._safe: set[P] = set()
        """Of the window: there is a copy, or it has been given up."""
        self._under_way: set[P] = set()
        """Some may have left the window since."""
        self.size = size

    @property
    def size(self) -> int:
        """Pages from the next one on, at most."""
        return self._size

    @size.setter
    def size(self, size: int) -> None:
        if size < 1:
            raise UsageError(f"a window has at least one page, not {size!r}")
        self._size = size

    @property
    def ready(self) -> int:
        """How far current is from start: so many pages can be taken with nothing lost."""
        ahead = 0
        for page in self._window:
            if page not in self._safe:
                break
            ahead += 1
        return ahead

    @property
    def duplicates(self) -> int:
        """Pages that have been copied or given up and are in the window, and those that are being copied."""
        return len(self._safe) + len(self._under_way)

    def __iter__(self) -> Iterator[P]:
        """Its pages, the next to be taken first."""
        return iter(self._window)

    def look(self, free: Iterable[P]) -> None:
        """The engine's free pages, the one that it takes next first. Only `size` of them are looked at. What has been
        taken, or is used again, leaves the window; its copy is no longer this window's."""
        self._window = dict.fromkeys(islice(free, self._size))
        self._safe &= self._window.keys()

    def offer(self, most: int) -> list[P]:
        """Pages to copy now, the next to be taken first. Each is being copied until `copied` or `failed` says more."""
        room = min(most, self._size - self.duplicates)
        waiting = (page for page in self._window if page not in self._safe and page not in self._under_way)
        chosen = list(islice(waiting, max(0, room)))
        self._under_way.update(chosen)
        return chosen

    def copied(self, page: P) -> bool:
        """A copy has ended. Returns whether the page is still in the window; if not, it was taken or is used again."""
        return self._end(page)

    def failed(self, page: P) -> None:
        """A copy could not be made. The page may be taken without: what was in it is computed again."""
        self._end(page)

    def withdraw(self, page: P) -> None:
        """A page that was offered is not copied now."""
        self._check(page)
        self._under_way.remove(page)

    def forget(self, pages: Iterable[P]) -> None:
        """These are to be copied after all, if they are in the window: what was done is undone."""
        self._safe.difference_update(pages)

    def _check(self, page: P) -> None:
        if page not in self._under_way:
            raise UsageError(f"page {page!r} is not being copied")

    def _end(self, page: P) -> bool:
        self._check(page)
        self._under_way.remove(page)
        if page in self._window:
            self._safe.add(page)
            return True
        return False

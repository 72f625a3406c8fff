"""KV of one request, as the core copies it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lmcache_core.errors import LayoutError
from lmcache_core.protocols import KVView

__all__ = ["GroupedView", "Indexed", "PagedView", "Plan"]

INDEX_AHEAD = 1 << 20
"""Row numbers to compute ahead at most, 8 MiB of them."""


class Plan(Protocol):
    """How to copy pages. An index says which ones: one entry of `page_index_size` numbers for each page."""

    @property
    def page_index_size(self) -> int: ...
    def index(self, units: NDArray[np.intp]) -> NDArray[np.intp]: ...
    def gather(self, index: NDArray[np.intp], into: memoryview) -> None: ...
    def scatter(self, index: NDArray[np.intp], source: memoryview) -> None: ...


class PagedView:
    """KV of one request in one cache group. Satisfies `KVView`; the group is 0."""

    def __init__(self, gather: Indexed, scatter: Indexed, *, page_bytes: int, writable: bool) -> None:
        self._gather = gather
        self._scatter = scatter
        self._page_bytes = page_bytes
        self._writable = writable
        self.pages = len(gather.units)

    def gather(self, group: int, first_page: int, pages: int, into: memoryview) -> None:
        self._check(group, first_page, pages, into)
        if into.readonly:
            raise LayoutError("cannot gather into a buffer that is read-only")
        if pages:
            self._gather.plan.gather(self._gather.index(first_page, pages), into)

    def scatter(self, group: int, first_page: int, pages: int, source: memoryview) -> None:
        self._check(group, first_page, pages, source)
        if not self._writable:
            raise LayoutError("cannot scatter to tensors that are read-only")
        if pages:
            self._scatter.plan.scatter(self._scatter.index(first_page, pages), source)

    def _check(self, group: int, first_page: int, pages: int, buffer: memoryview) -> None:
        if group != 0:
            raise LayoutError(f"group {group} of a view that has one group")
        if first_page < 0 or pages < 0 or first_page + pages > self.pages:
            raise LayoutError(
                f"the view has {self.pages} whole pages, and pages {first_page} to {first_page + pages} are to be "
                f"copied; pass to `view` the blocks of all {first_page + pages}, or limit the call (`max_tokens` of a "
                "retrieve, fewer tokens of a store)"
            )
        size = pages * self._page_bytes
        if buffer.nbytes != size or not buffer.c_contiguous:
            raise LayoutError(f"{pages} pages take {size} bytes in one piece, the buffer has {buffer.nbytes}")


class Indexed:
    """Index of a view's pages, computed ahead: chunks are mostly copied one after another."""

    def __init__(self, plan: Plan, units: NDArray[np.intp]) -> None:
        self.plan = plan
        self.units = units
        self._ahead = (0, units[:0])

    def index(self, first_page: int, pages: int) -> NDArray[np.intp]:
        start, index = self._ahead  # one attribute, so that threads that share the view see a matching pair
        if first_page < start or first_page + pages > start + len(index):
            ahead = max(pages, min(4 * pages, INDEX_AHEAD // self.plan.page_index_size))
            start, index = self._ahead = first_page, self.plan.index(self.units[first_page : first_page + ahead])
        return index[first_page - start : first_page - start + pages]


class GroupedView:
    """KV of one request in several cache groups: group `i` is `views[i]`."""

    def __init__(self, views: Sequence[KVView]) -> None:
        self._views = tuple(views)

    def gather(self, group: int, first_page: int, pages: int, into: memoryview) -> None:
        self._view(group).gather(0, first_page, pages, into)

    def scatter(self, group: int, first_page: int, pages: int, source: memoryview) -> None:
        self._view(group).scatter(0, first_page, pages, source)

    def _view(self, group: int) -> KVView:
        if not 0 <= group < len(self._views):
            raise LayoutError(f"group {group} of a view that has {len(self._views)} groups")
        return self._views[group]

"""KV of one request, as the core copies it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lmcache_core.errors import LayoutError
from lmcache_core.protocols import KVView
from lmcache_transfer.paged import PagedLayout
from lmcache_transfer.plans import Plan

__all__ = ["GroupedView", "Indexed", "PagedView"]

INDEX_AHEAD = 1 << 20
"""Row numbers to compute ahead at most, 8 MiB of them."""


class PagedView:
    """KV of one request in one cache group. Satisfies `KVView`; the group is 0."""

    def __init__(self, kv: PagedLayout, gather: Indexed, scatter: Indexed) -> None:
        self._kv = kv
        self._gather = gather
        self._scatter = scatter
        self.pages = len(gather.units)

    def gather(self, group: int, first_page: int, pages: int, into: memoryview) -> None:
        self._check(group, first_page, pages, into)
        if into.readonly:
            raise LayoutError("cannot gather into a buffer that is read-only")
        if pages:
            self._gather.plan.gather(self._gather.index(first_page, pages), into)

    def scatter(self, group: int, first_page: int, pages: int, source: memoryview) -> None:
        self._check(group, first_page, pages, source)
        if not self._kv.writable:
            raise LayoutError("cannot scatter to tensors that are read-only")
        if pages:
            self._scatter.plan.scatter(self._scatter.index(first_page, pages), source)

    def _check(self, group: int, first_page: int, pages: int, buffer: memoryview) -> None:
        if group != 0:
            raise LayoutError(f"group {group} of a view that has one group")
        self._kv.check_buffer(first_page, pages, self.pages, buffer)


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

"""Transfers between the host pool and an engine whose KV is in host memory.

An engine registers its tensors once per cache group. For each request it then makes a view from its block table, which
is what the core gathers from and scatters to:

    kv = CpuTransfer().register(tensors, dims="2bthd", page_tokens=64)
    view = kv.view(block_ids)
    view.gather(0, first_page, pages, slot)

With the option `streams` the copies go as on a GPU, layer by layer on a thread of its own: see `streams`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from lmcache_core.config.conversion import convert
from lmcache_core.errors import ConfigError
from lmcache_core.hookspecs import hookimpl
from lmcache_core.protocols import Transfer
from lmcache_transfer.hostdevice import HostDevice
from lmcache_transfer.paged import Layer, Layout, PagedLayout
from lmcache_transfer.plans import plan_copies
from lmcache_transfer.streamed import StreamedTransfer, StreamOptions
from lmcache_transfer.views import GroupedView, Indexed, PagedView

__all__ = ["CpuTransfer", "GroupedView", "Layout", "PagedKV", "PagedView", "lmcache_create_transfer"]


@hookimpl
def lmcache_create_transfer(options: Mapping[str, Any]) -> Transfer:
    """Called once for each engine."""
    try:
        read = convert(dict(options), CpuOptions)
    except ConfigError as error:
        raise ConfigError(f"transfer cpu: {error}") from error
    read.check()
    return StreamedTransfer(HostDevice(), read) if read.streams else CpuTransfer()


class CpuOptions(StreamOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the transfer `cpu`. A field's docstring is its documentation everywhere."""

    streams: bool = False
    """Copy as on a GPU, layer by layer on a thread, instead of on the caller's."""


class CpuTransfer:
    """Satisfies `Transfer` for tensors in host memory."""

    def register(
        self,
        layers: Sequence[Layer],
        *,
        dims: str,
        page_tokens: int,
        block_tokens: int | None = None,
        layout: Layout = "native",
    ) -> PagedKV:
        """See `PagedLayout`."""
        return PagedKV(layers, dims=dims, page_tokens=page_tokens, block_tokens=block_tokens, layout=layout)


class PagedKV(PagedLayout):
    """The KV of one cache group of an engine in host memory, copied by whoever asks."""

    def __init__(
        self,
        layers: Sequence[Layer],
        *,
        dims: str,
        page_tokens: int,
        block_tokens: int | None = None,
        layout: Layout = "native",
    ) -> None:
        super().__init__(layers, dims=dims, page_tokens=page_tokens, block_tokens=block_tokens, layout=layout)
        planes = [plane for layer in self.planes for plane in layer]
        self._gather, self._scatter = plan_copies(planes, self.page_units, self.owners)

    def view(self, block_ids: ArrayLike) -> PagedView:
        """See the KV of one request, whose block table is `block_ids`. Blocks behind the last whole page are left out.

        Raises:
            LayoutError: There is no such block.
        """
        units = self.units_of(block_ids)
        gather = Indexed(self._gather, units)
        scatter = gather if self._scatter is self._gather else Indexed(self._scatter, units)
        return PagedView(self, gather, scatter)

    def view_all(self) -> PagedView:
        """See all blocks in order, for a cache that holds one request."""
        return self.view(np.arange(self.blocks))

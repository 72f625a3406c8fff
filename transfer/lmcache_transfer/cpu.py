"""Transfers between the host pool and an engine whose KV is in host memory.

An engine registers its tensors once per cache group. For each request it then makes a view from its block table, which
is what the core gathers from and scatters to:

    kv = CpuTransfer().register(tensors, dims="2bthd", page_tokens=64)
    view = kv.view(block_ids)
    view.gather(0, first_page, pages, slot)

The payload of a page is `[layer][bytes]`. The bytes are, `native`: K then V (where both are apart), of each the page's
blocks as they lie, without padding; `canonical`: `[K, V][token][kv_head][head_size]`, or `[token][latent]`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from lmcache_core.errors import ConfigError, LayoutError
from lmcache_core.hookspecs import hookimpl
from lmcache_core.namespace import Encoding
from lmcache_core.protocols import Transfer
from lmcache_transfer.layout import Plane, Tensor, TensorLayout, describe
from lmcache_transfer.rows import RowPlan, gather_rows, scatter_rows
from lmcache_transfer.strided import StridedPlan
from lmcache_transfer.views import GroupedView, Indexed, PagedView, Plan

__all__ = ["CpuTransfer", "GroupedView", "Layout", "PagedKV", "PagedView", "lmcache_create_transfer"]

Layout = Literal["native", "canonical"]
Layer = Tensor | np.ndarray[Any, Any] | Sequence[Tensor | np.ndarray[Any, Any]]

SHORTEST_ROW = 16
"""Rows shorter than this are slower than strided copies."""


@hookimpl
def lmcache_create_transfer(options: Mapping[str, Any]) -> Transfer:
    """Called once for each engine."""
    if options:
        raise ConfigError(f"the transfer 'cpu' has no options, and was given {', '.join(map(repr, options))}")
    return CpuTransfer()


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
        """See `PagedKV`."""
        return PagedKV(layers, dims=dims, page_tokens=page_tokens, block_tokens=block_tokens, layout=layout)


class PagedKV:
    """The KV of one cache group of an engine, as a table of blocks.

    `layers` are the tensors of each layer: one, or K and V. `dims` names their axes (see `describe`). Where there is no
    block axis, `block_tokens` consecutive tokens are a block; where there is no token axis, it says what a block holds.
    Holds on to the tensors; an engine that moves its cache registers again.

    Raises:
        LayoutError: Tensors, `dims` and sizes don't fit together, or cannot be had in this layout.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        *,
        dims: str,
        page_tokens: int,
        block_tokens: int | None = None,
        layout: Layout = "native",
    ) -> None:
        tensors = [tuple(layer) if isinstance(layer, (list, tuple)) else (layer,) for layer in layers]
        for tensor in (tensor for layer in tensors for tensor in layer):
            if not isinstance(tensor, np.ndarray) and not hasattr(tensor, "data_ptr"):
                raise LayoutError(f"a layer is a tensor of torch or numpy, or two, K and V, not {tensor!r:.100}")
        if not tensors or not all(tensors) or page_tokens < 1:
            raise LayoutError(f"{len(layers)} layers, pages of {page_tokens} tokens: neither may be empty")
        if layout not in ("native", "canonical"):
            raise LayoutError(f"layout must be native or canonical, not {layout!r}")
        described = [[describe(tensor, dims) for tensor in layer] for layer in tensors]
        # All but the addresses is worked out once for each kind of layer; mostly there is one kind.
        kinds = {tuple(tensor.layout for tensor in layer) for layer in described}
        blocked = {tensor: tensor.blocked(block_tokens) for kind in kinds for tensor in kind}
        self.layers = len(layers)
        self.page_tokens = page_tokens
        self.layout: Layout = layout
        self.block_tokens = _block_tokens(blocked.values(), block_tokens)
        self.dtype = next(iter(blocked)).dtype
        self.writable = all(tensor.writable for layer in described for tensor in layer)
        if layout == "native" and page_tokens % self.block_tokens:
            raise LayoutError(f"pages of {page_tokens} tokens are not whole blocks of {self.block_tokens}")
        planes = {
            key: tensor.native_planes() if layout == "native" else tensor.canonical_planes(page_tokens)
            for key, tensor in blocked.items()
        }
        shapes = [plane.shape for parts in planes.values() for plane in parts]
        self.blocks = min(shape.blocks for shape in shapes)
        self._units = shapes[0].units
        self._page_units = page_tokens * self._units // self.block_tokens
        sizes = {sum(plane.shape.unit_bytes for key in kind for plane in planes[key]) for kind in kinds}
        if len(sizes) > 1:
            raise LayoutError(f"layers of one group must hold the same number of bytes a block, not {sorted(sizes)}")
        self.strides = _strides(kinds, blocked) if layout == "native" else ()
        """With `block_tokens`, how native bytes lie: see `TensorLayout.native_strides`."""
        self.page_layer_bytes = sizes.pop() * self._page_units
        self.page_bytes = self.page_layer_bytes * self.layers
        self._gather, self._scatter = _plans(
            [
                Plane(tensor.address + plane.address, plane.shape)
                for layer in described
                for tensor in layer
                for plane in planes[tensor.layout]
            ],
            self._page_units,
            tensors,
        )

    def encoding(self, engine: str, *, backend: str = "", isa: str = "") -> Encoding:
        """How the bytes of its pages lie, for the namespace: see `RegisteredKV`."""
        if self.layout == "canonical":
            return Encoding(layout="canonical")
        return Encoding(
            layout="native",
            engine=engine,
            backend=backend,
            block_tokens=self.block_tokens,
            strides=self.strides,
            isa=isa,
        )

    def view(self, block_ids: ArrayLike) -> PagedView:
        """See the KV of one request, whose block table is `block_ids`. Blocks behind the last whole page are left out.

        Raises:
            LayoutError: There is no such block.
        """
        ids = np.asarray(block_ids)
        if ids.size == 0:
            ids = ids.astype(np.intp)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise LayoutError(f"block ids are one row of whole numbers, not {ids.dtype} of shape {ids.shape}")
        if ids.size and (ids.min() < 0 or ids.max() >= self.blocks):
            raise LayoutError(f"block ids {ids.min()} to {ids.max()}: there are {self.blocks} blocks")
        ids = ids.astype(np.intp)
        if self._units > 1:
            ids = np.add.outer(ids * self._units, np.arange(self._units)).ravel()
        pages = len(ids) // self._page_units
        units = ids[: pages * self._page_units].reshape(pages, self._page_units)
        gather = Indexed(self._gather, units)
        scatter = gather if self._scatter is self._gather else Indexed(self._scatter, units)
        return PagedView(gather, scatter, page_bytes=self.page_bytes, writable=self.writable)

    def view_all(self) -> PagedView:
        """See all blocks in order, for a cache that holds one request."""
        return self.view(np.arange(self.blocks))


def _plans(planes: Sequence[Plane], page_units: int, owners: object) -> tuple[Plan, Plan]:
    """How to gather and how to scatter; one object where it is the same."""
    gather, scatter = gather_rows(planes), scatter_rows(planes)
    if gather.row < SHORTEST_ROW:
        strided = StridedPlan(planes, page_units, owners)
        return strided, strided if scatter.row < SHORTEST_ROW else RowPlan(planes, page_units, scatter, owners)
    plan = RowPlan(planes, page_units, gather, owners)
    return plan, plan if scatter == gather else RowPlan(planes, page_units, scatter, owners)


def _block_tokens(layouts: Collection[TensorLayout], said: int | None) -> int:
    sizes = {token.size if (token := layout.axis("t")) else said for layout in layouts}
    if len(sizes) > 1 or len({layout.dtype for layout in layouts}) > 1:
        raise LayoutError("tensors of one group must have one data type and one number of tokens a block")
    size = sizes.pop()
    if not size:
        raise LayoutError("without a token axis 't' the number of tokens a block must be given")
    return size


def _strides(kinds: set[tuple[TensorLayout, ...]], blocked: Mapping[TensorLayout, TensorLayout]) -> tuple[int, ...]:
    """Strides inside a block, which must be the same in all layers; for each of a layer's tensors where they differ."""
    strides = {tuple(blocked[layout].native_strides() for layout in kind) for kind in kinds}
    if len(strides) > 1:
        raise LayoutError(f"layers of one group must have the same order inside a block, not {sorted(strides)}")
    tensors = strides.pop()
    return tensors[0] if len(set(tensors)) == 1 else tuple(stride for tensor in tensors for stride in tensor)

"""The KV of one cache group of an engine, as a table of blocks: where its pages lie, on whatever device.

The payload of a page is `[layer][bytes]`. The bytes are, `native`: K then V (where both are apart), of each the page's
blocks as they lie, without padding; `canonical`: `[K, V][token][kv_head][head_size]`, or `[token][latent]`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lmcache_core.errors import LayoutError
from lmcache_core.namespace import Encoding
from lmcache_transfer.layout import Plane, Tensor, TensorLayout, describe

__all__ = ["Layer", "Layout", "PagedLayout"]

Layout = Literal["native", "canonical"]
Layer = Tensor | np.ndarray[Any, Any] | Sequence[Tensor | np.ndarray[Any, Any]]


class PagedLayout:
    """See the module.

    `layers` are the tensors of each layer: one, or K and V. `dims` names their axes (see `describe`). Where there is no
    block axis, `block_tokens` consecutive tokens are a block; where there is no token axis, it says what a block holds.
    `device` is the kind of device on which they must be. Holds on to the tensors; an engine that moves its cache
    registers again.

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
        device: str = "cpu",
    ) -> None:
        tensors = [tuple(layer) if isinstance(layer, (list, tuple)) else (layer,) for layer in layers]
        for tensor in (tensor for layer in tensors for tensor in layer):
            if not isinstance(tensor, np.ndarray) and not hasattr(tensor, "data_ptr"):
                raise LayoutError(f"a layer is a tensor of torch or numpy, or two, K and V, not {tensor!r:.100}")
        if not tensors or not all(tensors) or page_tokens < 1:
            raise LayoutError(f"{len(layers)} layers, pages of {page_tokens} tokens: neither may be empty")
        if layout not in ("native", "canonical"):
            raise LayoutError(f"layout must be native or canonical, not {layout!r}")
        described = [[describe(tensor, dims, device) for tensor in layer] for layer in tensors]
        # All but the addresses is worked out once for each kind of layer; mostly there is one kind.
        kinds = {tuple(tensor.layout for tensor in layer) for layer in described}
        blocked = {tensor: tensor.blocked(block_tokens) for kind in kinds for tensor in kind}
        self.owners = tensors
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
        self.block_units = shapes[0].units
        """Units in a block: see `layout`."""
        self.page_units = page_tokens * self.block_units // self.block_tokens
        sizes = {sum(plane.shape.unit_bytes for key in kind for plane in planes[key]) for kind in kinds}
        if len(sizes) > 1:
            raise LayoutError(f"layers of one group must hold the same number of bytes a block, not {sorted(sizes)}")
        self.strides = _strides(kinds, blocked) if layout == "native" else ()
        """With `block_tokens`, how native bytes lie: see `TensorLayout.native_strides`."""
        self.page_layer_bytes = sizes.pop() * self.page_units
        self.page_bytes = self.page_layer_bytes * self.layers
        self.planes = [
            [Plane(tensor.address + plane.address, plane.shape) for tensor in layer for plane in planes[tensor.layout]]
            for layer in described
        ]
        """Of each layer, in the order of the payload."""

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

    def units_of(self, block_ids: ArrayLike, *, gaps: bool = False) -> NDArray[np.intp]:
        """The units of a request's pages, `[page, unit]`, by its block table. Blocks behind the last whole page are
        left out. With `gaps` a block may be -1, and so are its units then: nothing is copied of it.

        Raises:
            LayoutError: There is no such block.
        """
        ids = np.asarray(block_ids)
        if ids.size == 0:
            ids = ids.astype(np.intp)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise LayoutError(f"block ids are one row of whole numbers, not {ids.dtype} of shape {ids.shape}")
        if ids.size and (ids.min() < (-1 if gaps else 0) or ids.max() >= self.blocks):
            raise LayoutError(f"block ids {ids.min()} to {ids.max()}: there are {self.blocks} blocks")
        ids = ids.astype(np.intp)
        if self.block_units > 1:
            units = np.add.outer(ids * self.block_units, np.arange(self.block_units))
            if gaps:
                units[ids < 0] = -1
            ids = units.ravel()
        pages = len(ids) // self.page_units
        return ids[: pages * self.page_units].reshape(pages, self.page_units)

    def check_buffer(self, first_page: int, pages: int, there: int, buffer: memoryview) -> None:
        """See that some pages of a view that has `there`, and the buffer they come from or go to, fit together.

        Raises:
            LayoutError: They don't.
        """
        if first_page < 0 or pages < 0 or first_page + pages > there:
            raise LayoutError(
                f"the view has {there} whole pages, and pages {first_page} to {first_page + pages} are to be "
                f"copied; pass to `view` the blocks of all {first_page + pages}, or limit the call (`max_tokens` of a "
                "retrieve, fewer tokens of a store)"
            )
        size = pages * self.page_bytes
        if buffer.nbytes != size or not buffer.c_contiguous:
            raise LayoutError(f"{pages} pages take {size} bytes in one piece, the buffer has {buffer.nbytes}")


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

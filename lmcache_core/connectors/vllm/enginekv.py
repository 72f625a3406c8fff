"""The KV of an engine on one rank: where it lies, and that of a request as pages that can be copied."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmcache_core.connectors.vllm.plan import Blocks, Facts
from lmcache_core.errors import LayoutError
from lmcache_core.namespace import Encoding
from lmcache_core.plugins import load_transfer
from lmcache_core.protocols import KVView, RegisteredKV, Transfer
from lmcache_core.streaming import Copying, Layer, StreamingTransfer

__all__ = ["NULL_BLOCK", "EngineKV", "Geometry", "RequestView"]

NULL_BLOCK = 0
"""What vLLM writes in a block table where a window has moved on."""


@dataclass(frozen=True)
class Geometry:
    """The tensors of one cache group on this rank.

    Args:
        layers: In order.
        dims: What their axes mean; see `Transfer.register`.
        block_tokens: Of the engine's block table.
        kernel_blocks: Blocks of the tensors in one of those.
        apart: K and V of each layer, as `bhtd`, where chunks shall be in the canonical layout.
        names: Of the layers, as the engine calls them.
    """

    layers: Sequence[Any]
    dims: str
    block_tokens: int
    kernel_blocks: int = 1
    apart: Sequence[tuple[Any, Any]] | None = None
    names: Sequence[str] = ()


class EngineKV:
    """The tensors of all cache groups.

    Args:
        groups: In the engine's order.
        device: Where they are, as torch calls it.
        backend: Of attention.
        isa: Instruction set, where the content of blocks depends on it.
        options: Of the transfer.

    Raises:
        LayoutError: They lie in a way that cannot be copied.
        PluginError: There is no transfer for this device.
    """

    def __init__(
        self,
        groups: Sequence[Geometry],
        device: str,
        *,
        backend: str,
        isa: str,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.groups = list(groups)
        self.page_tokens = 0
        """Tokens of a page, once that is known."""
        self._transfer: Transfer = load_transfer(device).create(options or {})
        self.streams = self._transfer if isinstance(self._transfer, StreamingTransfer) else None
        """Of the device, if copies are made on them."""
        self.layers = _named(groups)
        """What the engine calls its layers."""
        self.order = [self.layers[name] for name in sorted(self.layers, key=_natural)]
        """Layers as the engine comes to them."""
        self._pages: list[RegisteredKV] = []
        self._blocks = [self._register(group, group.block_tokens) for group in groups]
        """The same, a block a page."""
        self._nowhere = [self._keep(group, np.array([NULL_BLOCK])) for group in range(len(groups))]
        named = [self._register(group, group.block_tokens, canonical=True) for group in groups]
        encodings = [each.encoding("vllm", backend=backend, isa=isa) for each in named]
        self.facts = Facts(_one_encoding(encodings, groups), tuple(each.page_layer_bytes for each in self._blocks))

    def _register(self, group: Geometry, page_tokens: int, *, canonical: bool = False) -> RegisteredKV:
        """As the blocks lie; where they shall be `canonical`, and can be, in that layout."""
        if canonical and group.apart is not None:
            size = group.block_tokens // group.kernel_blocks
            return self._transfer.register(
                group.apart, dims="bhtd", page_tokens=page_tokens, block_tokens=size, layout="canonical"
            )
        return self._transfer.register(
            group.layers,
            dims=group.dims,
            page_tokens=page_tokens,
            block_tokens=group.block_tokens // group.kernel_blocks,
        )

    def cut(self, page_tokens: int) -> None:
        """Pages have so many tokens from now on; 0 for as they were."""
        if page_tokens not in (0, self.page_tokens):
            self._pages = [self._register(group, page_tokens, canonical=True) for group in self.groups]
            self.page_tokens = page_tokens

    @property
    def page_bytes(self) -> int:
        """Of all groups, on this rank."""
        return sum(kv.page_layer_bytes * len(g.layers) for kv, g in zip(self._pages, self.groups, strict=True))

    def view(self, first_page: int, blocks: Blocks, skip_tokens: int = 0) -> RequestView:
        """The KV of a request from a page on. The first `skip_tokens` tokens of it lie in blocks that stay as they
        are."""
        page_blocks = [self.page_tokens // group.block_tokens for group in self.groups]
        tables = [np.array(ids, np.intp) for ids in blocks]
        null = [table == NULL_BLOCK for table in tables]
        if self.streams is not None:
            for table, none, group in zip(tables, null, self.groups, strict=True):
                table[none] = -1
                table[: skip_tokens // group.block_tokens] = -1
            return RequestView(first_page, self._views(tables), page_blocks, null, [])
        views = self._views(tables)
        kept = [
            self._keep(number, table[: skip_tokens // group.block_tokens])
            for number, (table, group) in enumerate(zip(tables, self.groups, strict=True))
            if skip_tokens
        ]
        return RequestView(first_page, views, page_blocks, null, self._nowhere, kept)

    def _views(self, tables: Sequence[NDArray[np.intp]]) -> list[KVView]:
        return [
            kv.view(_kernel(table, group)) for kv, table, group in zip(self._pages, tables, self.groups, strict=True)
        ]

    def close(self) -> None:
        """Wait for what is under way, and let go of the device."""
        if self.streams is not None:
            self.streams.close()

    def _keep(self, group: int, blocks: NDArray[np.intp]) -> Kept:
        kv, geometry = self._blocks[group], self.groups[group]
        nbytes = len(blocks) * kv.page_layer_bytes * len(geometry.layers)
        return Kept(kv.view(_kernel(blocks, geometry)), len(blocks), nbytes)


class Kept(NamedTuple):
    """Blocks that must stay as they are, each a page of `view`."""

    view: KVView
    blocks: int
    nbytes: int


class RequestView:
    """Satisfies `KVView` for the pages of a request from `first_page` on."""

    def __init__(
        self,
        first_page: int,
        views: Sequence[KVView],
        page_blocks: Sequence[int],
        null: Sequence[NDArray[np.bool_]],
        nowhere: Sequence[Kept],
        kept: Sequence[Kept] = (),
    ) -> None:
        self._first = first_page
        self._views = views
        self._page_blocks = page_blocks
        self._null = null
        self._nowhere = nowhere
        self._kept = kept

    def has(self, group: int, first_page: int, pages: int) -> bool:
        """Whether all of these pages lie in blocks of the request."""
        null = self._nulls(group, first_page, pages)
        return null is not None and not null.any()

    def _nulls(self, group: int, first_page: int, pages: int) -> NDArray[np.bool_] | None:
        """For each page and block, whether it is none of the request's; None if the pages are not in the view."""
        count = self._page_blocks[group]
        null = self._null[group][(first_page - self._first) * count : (first_page - self._first + pages) * count]
        return null.reshape(pages, count) if len(null) == pages * count and first_page >= self._first else None

    def copying(self, group: int, first_page: int, pages: int, buffer: memoryview) -> Copying:
        """The same, to be made on streams."""
        return Copying(group, self._views[group], first_page - self._first, pages, buffer)

    def gather(self, group: int, first_page: int, pages: int, into: memoryview) -> None:
        self._views[group].gather(0, first_page - self._first, pages, into)

    def scatter(self, group: int, first_page: int, pages: int, source: memoryview) -> None:
        """As in `KVView`. Pages that a window has left behind have no blocks, and are passed over."""
        null = self._nulls(group, first_page, pages)
        if null is None:
            raise LayoutError(f"pages {first_page} to {first_page + pages} of group {group} are not in the view")
        first = first_page - self._first
        view = self._views[group]
        if not null.any() and (first or not self._kept):
            view.scatter(0, first, pages, source)
            return
        page_bytes = len(source) // pages
        for page in np.flatnonzero(~null.all(axis=1)).tolist():
            part = source[page * page_bytes : (page + 1) * page_bytes]
            kept = self._kept[group] if self._kept and not first + page else None
            if kept is None and null[page].any():
                kept = self._nowhere[group]
            if kept is None:
                view.scatter(0, first + page, 1, part)
                continue
            # Blocks that are in use as they are, or nobody's, get their own bytes back.
            mine = memoryview(bytearray(kept.nbytes))
            kept.view.gather(0, 0, kept.blocks, mine)
            view.scatter(0, first + page, 1, part)
            kept.view.scatter(0, 0, kept.blocks, mine)


def _kernel(table: Any, group: Geometry) -> Any:
    """Numbers of the tensors' blocks, for those of the engine's block table."""
    count = group.kernel_blocks
    if count == 1:
        return table
    return np.where(table[:, None] < 0, -1, np.add.outer(table * count, np.arange(count))).ravel()


def _named(groups: Sequence[Geometry]) -> dict[str, Layer]:
    """Each layer by its name; where layers have none, by made up ones."""
    return {
        name: Layer(number, place)
        for number, group in enumerate(groups)
        for place, name in enumerate(group.names or [f"layer {n} group {number}" for n in range(len(group.layers))])
    }


def _natural(name: str) -> list[tuple[int, str]]:
    """In the order of the numbers in names."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _one_encoding(encodings: Sequence[Encoding], groups: Sequence[Geometry]) -> Encoding:
    """How the bytes of all groups lie: as of one, where they lie alike."""
    first = encodings[0]
    if all(each == first for each in encodings):
        return first
    if any(each.layout != "native" for each in encodings):
        raise LayoutError("the cache groups of this engine lie in different ways, and not in its own")
    return Encoding(
        layout="native",
        engine=first.engine,
        backend=first.backend,
        block_tokens=math.lcm(*(each.block_tokens for each in encodings)),
        strides=tuple(stride for each in encodings for stride in (each.block_tokens, *each.strides)),
        isa=first.isa,
    )

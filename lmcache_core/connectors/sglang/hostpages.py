"""The pages of an engine's host pool, by the addresses that the pool itself tells.

A page lies in one buffer or many, depending on the pool's layout: K and V of all layers, K and V of each layer, one of
latents. Where the buffers of a few pages begin says where those of all lie, and that is checked before anything is
copied, so nothing here knows a layout. The bytes of a page are its buffers one behind the other, in the pool's order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmcache_core.errors import LayoutError
from lmcache_core.plugins import load_transfer
from lmcache_core.protocols import KVView, RegisteredKV, Transfer

__all__ = ["Buffer", "FlatPages", "HostPages", "Locate", "buffers_of"]

Locate = Callable[[Sequence[int]], tuple[Sequence[int], Sequence[int]]]
"""Addresses and sizes of the buffers of pages, all of the first page first."""


class Buffer(NamedTuple):
    """One buffer of each page."""

    address: int
    """Of page 0."""
    nbytes: int
    stride: int
    """Bytes from a page's to the next page's."""


def buffers_of(locate: Locate, pages: int) -> list[Buffer]:
    """The buffers of a page, and how far apart those of its neighbours are.

    Raises:
        LayoutError: They don't lie at even distances, or overlap.
    """
    if pages < 1:
        raise LayoutError("the host pool has no pages")
    asked = sorted({0, min(1, pages - 1), pages // 2, pages - 1})
    addresses, sizes = locate(asked)
    count, left = divmod(len(addresses), len(asked))
    if not count or left or len(sizes) != len(addresses):
        raise LayoutError(f"{len(asked)} pages of the host pool are said to have {len(addresses)} buffers")
    first, size = list(addresses[:count]), list(sizes[:count])
    second = list(addresses[count : 2 * count]) if pages > 1 else [a + s for a, s in zip(first, size, strict=True)]
    found = [Buffer(a, s, b - a) for a, s, b in zip(first, size, second, strict=True)]
    for place, page in enumerate(asked):
        here = slice(place * count, (place + 1) * count)
        expected = [each.address + page * each.stride for each in found]
        if list(addresses[here]) != expected or list(sizes[here]) != size:
            raise LayoutError("the pages of the host pool do not lie at even distances, which is not supported")
    if any(each.nbytes < 1 or each.stride < each.nbytes for each in found):
        raise LayoutError("the pages of the host pool overlap, which is not supported")
    return found


class _Memory:
    """An array's memory, by its address."""

    def __init__(self, buffer: Buffer, pages: int, owner: object) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "version": 3,
            "data": (buffer.address, False),
            "shape": (pages, buffer.nbytes),
            "strides": (buffer.stride, 1),
            "typestr": "|u1",
        }


class HostPages:
    """All pages of a host pool, to be copied by their numbers.

    Args:
        buffers: Of each page.
        pages: How many there are.
        page_tokens: Tokens of a page.
        owner: What keeps the memory alive.

    Raises:
        LayoutError: They lie in a way that cannot be copied.
        PluginError: There is no transfer for host memory.
    """

    def __init__(self, buffers: Sequence[Buffer], pages: int, page_tokens: int, owner: object) -> None:
        self.pages = pages
        self.page_bytes = sum(each.nbytes for each in buffers)
        arrays = tuple(np.asarray(_Memory(each, pages, owner)) for each in buffers)
        transfer: Transfer = load_transfer("cpu").create({})
        self._kv: RegisteredKV = transfer.register(
            [arrays], dims="bo", page_tokens=page_tokens, block_tokens=page_tokens
        )
        if self._kv.page_layer_bytes != self.page_bytes:
            raise LayoutError(f"pages of {self.page_bytes} bytes are seen as {self._kv.page_layer_bytes}")

    def view(self, numbers: Sequence[int] | NDArray[np.intp]) -> KVView:
        """Pages by their numbers, as the pages of a prompt.

        Raises:
            LayoutError: There is no such page.
        """
        return self._kv.view(numbers)


class FlatPages:
    """Pages that an engine hands over as arrays of their own. Satisfies `KVView`.

    Args:
        pages: Each of the same number of bytes, in one piece.
        order: In which order the parts of a page are kept: `order[i]` is the part that comes i-th. None for as they
            are. All parts are of one size.
    """

    def __init__(self, pages: Sequence[NDArray[np.uint8]], order: NDArray[np.intp] | None = None) -> None:
        self._pages = pages
        self._order = order

    def gather(self, group: int, first_page: int, pages: int, into: memoryview) -> None:
        """See `KVView`."""
        rows = np.frombuffer(into, np.uint8).reshape(pages, -1)
        for row, page in zip(rows, self._part(first_page, pages, rows.shape[1]), strict=True):
            if self._order is None:
                row[:] = page
            else:
                parts = len(self._order)
                np.take(page.reshape(parts, -1), self._order, 0, row.reshape(parts, -1), "clip")

    def scatter(self, group: int, first_page: int, pages: int, source: memoryview) -> None:
        """See `KVView`."""
        rows = np.frombuffer(source, np.uint8).reshape(pages, -1)
        for row, page in zip(rows, self._part(first_page, pages, rows.shape[1]), strict=True):
            if self._order is None:
                page[:] = row
            else:
                parts = len(self._order)
                page.reshape(parts, -1)[self._order] = row.reshape(parts, -1)

    def _part(self, first: int, pages: int, nbytes: int) -> Sequence[NDArray[np.uint8]]:
        part = self._pages[first : first + pages]
        if len(part) != pages or any(page.nbytes != nbytes for page in part):
            raise LayoutError(f"pages {first} to {first + pages} of {nbytes} bytes are not among those given")
        return part


def as_page_numbers(token_indices: Any, page_tokens: int, pages: int) -> NDArray[np.intp]:
    """Numbers of the pages whose tokens have these places in the pool.

    Raises:
        LayoutError: They are no whole pages of the pool.
    """
    indices = np.asarray(token_indices)
    if indices.ndim != 1 or indices.dtype.kind not in "iu" or len(indices) % page_tokens:
        raise LayoutError(f"places of whole pages of {page_tokens} tokens are expected, not {indices.shape}")
    rows = indices.reshape(-1, page_tokens)
    numbers = rows[:, 0] // page_tokens
    whole = np.array_equal(rows, numbers[:, None] * page_tokens + np.arange(page_tokens))
    if not whole or (len(numbers) and (numbers.min() < 0 or numbers.max() >= pages)):
        raise LayoutError("these places are no whole pages of the host pool")
    return numbers.astype(np.intp)

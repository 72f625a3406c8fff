"""Copying pages whose bytes lie too scattered for rows: elements of a transposed block, heads of a few odd bytes.

Each plane is a strided numpy array of elements that is indexed by block, two calls per plane. Slower than rows where
rows have 16 bytes and more; with 2-byte elements 4 times as fast.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmcache_transfer.layout import Plane
from lmcache_transfer.memory import array_over

__all__ = ["StridedPlan"]

Index = NDArray[np.intp]


class StridedPlan:
    """The same as `RowPlan`, by other means."""

    def __init__(self, planes: Sequence[Plane], page_units: int, owners: object) -> None:
        self._planes = [(_array(plane, owners), plane.shape.units) for plane in planes]
        self._plane_bytes = [plane.shape.unit_bytes * page_units for plane in planes]
        self._page_units = page_units

    @property
    def page_index_size(self) -> int:
        return self._page_units

    def index(self, units: Index) -> Index:
        return units

    def gather(self, index: Index, into: memoryview) -> None:
        for plane, units, part in self._parts(index, np.frombuffer(into, np.uint8)):
            np.copyto(part, plane[index // units, index % units])

    def scatter(self, index: Index, source: memoryview) -> None:
        for plane, units, part in self._parts(index, np.frombuffer(source, np.uint8)):
            plane[index // units, index % units] = part

    def _parts(self, index: Index, buffer: NDArray[np.uint8]) -> Iterator[tuple[NDArray[Any], int, NDArray[Any]]]:
        """Each plane with its units a block and its bytes in the buffer: [page, unit, axes...]."""
        by_page = buffer.reshape(len(index), -1)
        first = 0
        for (plane, units), count in zip(self._planes, self._plane_bytes, strict=True):
            part = by_page[:, first : first + count].view(plane.dtype)
            yield plane, units, part.reshape(*index.shape, *plane.shape[2:])
            first += count


def _array(plane: Plane, owners: object) -> NDArray[Any]:
    """The plane as `[block, unit in block, axes...]`. Elements that numpy has a type for are copied faster as such."""
    layout = plane.shape
    shape = (layout.blocks, layout.units, *(axis.size for axis in layout.outer))
    strides = (layout.block_stride, layout.unit_stride, *(axis.stride for axis in layout.outer))
    typestr = {1: "|u1", 2: "=u2", 4: "=u4", 8: "=u8"}.get(layout.run, f"|V{layout.run}")
    return array_over(plane.address, shape, typestr, strides=strides, owners=owners)

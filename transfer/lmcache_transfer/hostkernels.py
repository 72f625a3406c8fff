"""Gather and scatter without hardware, by numpy.

Pages that lie one behind another are copied at once. Others go by way of a buffer, many at a time: two large copies
release the GIL twice, where one small copy for each page would take it from the engine's thread each time, or keep it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmcache_transfer.device import Part
from lmcache_transfer.layout import Plane
from lmcache_transfer.memory import array_over
from lmcache_transfer.paged import PagedLayout
from lmcache_transfer.plans import SHORTEST_ROW, Plan, plan_copies
from lmcache_transfer.rows import LONGEST_ROW, largest_divisor

__all__ = ["HostKernels"]

BUFFER = 4 << 20
"""Bytes that are copied at a time of pages that lie apart."""


class HostKernels:
    """Satisfies `Kernels`; streams are such as have `do`. One thread at a time gathers, and one scatters."""

    def __init__(self, layout: PagedLayout) -> None:
        self._layout = layout
        self._plans: dict[range, tuple[Plan, Plan]] = {}
        self._buffers: dict[bool, NDArray[np.uint8]] = {}

    def gather(self, layers: range, numbers: int, parts: Sequence[Part], page_stride: int, stream: Any) -> None:
        stream.do(lambda: self._copy(layers, numbers, parts, page_stride, gather=True))

    def scatter(self, layers: range, numbers: int, parts: Sequence[Part], page_stride: int, stream: Any) -> None:
        stream.do(lambda: self._copy(layers, numbers, parts, page_stride, gather=False))

    def _copy(self, layers: range, numbers: int, parts: Sequence[Part], page_stride: int, *, gather: bool) -> None:
        layout = self._layout
        pages = np.concatenate([part.address + np.arange(part.pages) * page_stride for part in parts])
        units = array_over(numbers, (len(pages), layout.page_units), "=i8", owners=None).astype(np.intp)
        present = units >= 0
        whole = present.all(axis=1)
        if not whole.all():
            planes = [plane for layer in layers for plane in layout.planes[layer]]
            _copy_units(planes, units[~whole], present[~whole], pages[~whole], gather=gather)
            units, pages = units[whole], pages[whole]
        if len(pages):
            nbytes = len(layers) * layout.page_layer_bytes
            plan = self._plan(layers)[0 if gather else 1]
            if (np.diff(pages) == nbytes).all():
                _run(plan, units, _bytes_at(int(pages[0]), len(pages) * nbytes), gather=gather)
            else:
                self._copy_apart(plan, units, pages, nbytes, gather=gather)

    def _copy_apart(
        self, plan: Plan, units: NDArray[np.intp], pages: NDArray[np.int64], nbytes: int, *, gather: bool
    ) -> None:
        """Copy pages of so many bytes at these addresses."""
        base = int(pages.min())
        row = largest_divisor(int(np.gcd.reduce(pages - base, initial=nbytes)), LONGEST_ROW)
        if nbytes * 2 > BUFFER or row < SHORTEST_ROW:
            for page, address in enumerate(pages.tolist()):
                _run(plan, units[page : page + 1], _bytes_at(address, nbytes), gather=gather)
            return
        table = array_over(base, ((int(pages.max()) + nbytes - base) // row,), f"|V{row}", owners=None)
        rows = np.add.outer((pages - base) // row, np.arange(nbytes // row))
        step = BUFFER // nbytes
        buffer = self._buffer(gather=gather)
        for first in range(0, len(pages), step):
            turn = rows[first : first + step]
            held = buffer[: len(turn) * nbytes]
            if gather:
                plan.gather(plan.index(units[first : first + step]), held.data)
                table[turn.reshape(-1)] = held.view(table.dtype)
            else:
                table.take(turn.reshape(-1), 0, held.view(table.dtype), "clip")
                plan.scatter(plan.index(units[first : first + step]), held.data)

    def _buffer(self, *, gather: bool) -> NDArray[np.uint8]:
        if gather not in self._buffers:
            self._buffers[gather] = np.empty(BUFFER, np.uint8)
        return self._buffers[gather]

    def _plan(self, layers: range) -> tuple[Plan, Plan]:
        found = self._plans.get(layers)
        if found is None:
            planes = [plane for layer in layers for plane in self._layout.planes[layer]]
            found = self._plans[layers] = plan_copies(planes, self._layout.page_units, self._layout.owners)
        return found

    def close(self) -> None:
        """No copies are made any more."""
        self._buffers.clear()


def _run(plan: Plan, units: NDArray[np.intp], memory: memoryview, *, gather: bool) -> None:
    copy: Callable[[NDArray[np.intp], memoryview], None] = plan.gather if gather else plan.scatter
    copy(plan.index(units), memory)


def _bytes_at(address: int, nbytes: int) -> memoryview:
    return array_over(address, (nbytes,), "|u1", owners=None).data


def _copy_units(
    planes: Sequence[Plane],
    units: NDArray[np.intp],
    present: NDArray[np.bool_],
    pages: NDArray[np.int64],
    *,
    gather: bool,
) -> None:
    """Copy units one by one, those that are present."""
    start = 0
    for plane in planes:
        shape = plane.shape
        sizes = tuple(axis.size for axis in shape.outer)
        strides = tuple(axis.stride for axis in shape.outer)
        for page, place in np.argwhere(present).tolist():
            block, unit = divmod(int(units[page, place]), shape.units)
            paged = array_over(
                plane.address + block * shape.block_stride + unit * shape.unit_stride,
                (*sizes, shape.run),
                "|u1",
                strides=(*strides, 1),
                owners=None,
            )
            at = int(pages[page]) + start + place * shape.unit_bytes
            flat = array_over(at, (*sizes, shape.run), "|u1", owners=None)
            if gather:
                flat[...] = paged
            else:
                paged[...] = flat
        start += shape.unit_bytes * units.shape[1]

"""Copying pages as rows of one table that spans all of an engine's memory.

One numpy array of rows starts at the lowest tensor and ends with the highest; what lies between the tensors is never
touched, since row numbers are computed only from block ids that have been checked. However many layers and allocations
there are, a chunk is then one `take` (gather) or one assignment (scatter), and each releases the GIL once. Row numbers
are computed ahead for several chunks, since that too releases the GIL.

    address of a row = table + step * row number
    row number       = (block * block_stride + unit in block * unit_stride + offsets[plane, row in unit]) / step
    payload          = [page][plane][unit of page][row in unit]

`step` divides all distances between rows. For `take` the table must be contiguous, so rows are no longer than a step;
an assignment may go to a table of rows that overlap.

Rows of 512 bytes beat longer ones: glibc copies up to 512 bytes straight through registers, while its loop for longer
ones runs backwards when source and target agree in the lower 12 bits of their addresses, which pages always do
(gather 0.8, scatter 0.85 of memcpy with rows of 512 bytes; 0.7 and 0.5 with rows of 4 KiB and more).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmcache_transfer.layout import Plane, PlaneShape
from lmcache_transfer.memory import array_over

__all__ = ["LONGEST_ROW", "RowPlan", "gather_rows", "largest_divisor", "scatter_rows"]

LONGEST_ROW = 512
LONGEST_OVERLAPPING_ROW = 256
"""Such rows cross cache lines, which costs long ones more."""

Index = NDArray[np.intp]


class Rows(NamedTuple):
    row: int
    step: int


def gather_rows(planes: Sequence[Plane]) -> Rows:
    """Rows side by side."""
    row = largest_divisor(_common_step(planes), LONGEST_ROW)
    return Rows(row, row)


def scatter_rows(planes: Sequence[Plane]) -> Rows:
    """The same, or longer ones that overlap: what they must divide is only what lies together."""
    side_by_side = gather_rows(planes)
    row = largest_divisor(math.gcd(*(plane.shape.run for plane in planes)), LONGEST_OVERLAPPING_ROW)
    return Rows(row, math.gcd(row, _common_step(planes))) if row > side_by_side.row else side_by_side


def _common_step(planes: Sequence[Plane]) -> int:
    first = planes[0].address
    steps = {plane.shape.step for plane in planes}
    return math.gcd(*steps, *(plane.address - first for plane in planes))


def largest_divisor(number: int, limit: int) -> int:
    """The largest up to a limit."""
    return next(size for size in range(min(number, limit), 0, -1) if number % size == 0)


class _Stripe(NamedTuple):
    """Neighbours in the payload that differ in their addresses only."""

    rows: slice
    """In the rows of a page."""
    shape: PlaneShape
    offsets: NDArray[np.intp]
    """[plane, 1, row in unit]"""


class RowPlan:
    """How to copy pages that consist of `planes`, each with `page_units` units."""

    def __init__(self, planes: Sequence[Plane], page_units: int, rows: Rows, owners: object) -> None:
        self._row, self._step = rows
        self._dtype = np.dtype(f"V{self._row}")
        self._base = min(plane.address for plane in planes)
        self._end = max(plane.end for plane in planes)
        count = self._rows_before(self._end)
        self._table = array_over(self._base, (count,), f"|V{self._row}", strides=(self._step,), owners=owners)
        self._page_units = page_units
        self._planes = planes
        self._plane_rows = [plane.shape.unit_bytes // self._row * page_units for plane in planes]
        self._page_rows = sum(self._plane_rows)
        self._stripes = list(self._striped(planes))

    def _striped(self, planes: Sequence[Plane]) -> Iterator[_Stripe]:
        first = 0
        for shape, group in groupby(planes, key=lambda plane: plane.shape):
            planes_at = np.array([plane.address - self._base for plane in group], np.intp)
            inside = np.zeros(1, np.intp)
            for axis in shape.outer:
                inside = np.add.outer(inside, np.arange(axis.size) * axis.stride).ravel()
            inside = np.add.outer(inside, np.arange(0, shape.run, self._row)).ravel()
            offsets = (planes_at[:, None, None] + inside) // self._step
            count = len(planes_at) * self._page_units * len(inside)
            yield _Stripe(slice(first, first + count), shape, offsets)
            first += count

    def _rows_before(self, address: int) -> int:
        """Number of rows of the table that end at `address` or before it."""
        return (address - self._base - self._row) // self._step + 1

    @property
    def page_index_size(self) -> int:
        return self._page_rows

    def index(self, units: Index) -> Index:
        """Row numbers `[page, row]` of pages whose units are `units[page]`, counted over all blocks."""
        index = np.empty((len(units), self._page_rows), np.intp)
        for rows, shape, offsets in self._stripes:
            starts = _starts(units, shape, self._step)
            # Splitting the last axis of a slice gives a view, so this fills `index`.
            part = index[:, rows].reshape(len(units), len(offsets), self._page_units, offsets.shape[-1])
            np.add(starts[:, None, :, None], offsets, out=part)
        return index

    def gather(self, index: Index, into: memoryview) -> None:
        for table, numbers, rows in self._passes(index, np.frombuffer(into, self._dtype)):
            table.take(numbers, 0, rows, "clip")  # "clip" writes to `rows` at once; "raise" would fill a copy first

    def scatter(self, index: Index, source: memoryview) -> None:
        for table, numbers, rows in self._passes(index, np.frombuffer(source, self._dtype)):
            table[numbers] = rows

    def _passes(self, index: Index, rows: NDArray[Any]) -> Iterator[tuple[NDArray[Any], Index, NDArray[Any]]]:
        """The copies to make: table, row numbers, part of the buffer, which is in one piece. Mostly it is one copy.

        A buffer that lies inside the table, between tensors, numpy would take for a part of it and copy as a whole, so
        then each page is copied by runs of planes that don't have the buffer between them.
        """
        start: int = rows.__array_interface__["data"][0]
        end = start + rows.nbytes
        if start >= self._end or end <= self._base:
            yield self._table, index.reshape(-1), rows
            return
        by_page = rows.reshape(index.shape)
        for part, low, high in self._runs(start, end):
            table = self._table[low:high]
            for numbers, page_rows in zip(index, by_page, strict=True):
                yield table, numbers[part] - low, page_rows[part]

    def _runs(self, start: int, end: int) -> Iterator[tuple[slice, int, int]]:
        """Longest runs of planes without `[start, end)` between them: rows of a page, first and end of the table."""
        first = last = low = high = 0
        for plane, count in zip(self._planes, self._plane_rows, strict=True):
            joined = min(low, plane.address), max(high, plane.end)
            if last == first:
                joined = plane.address, plane.end
            elif joined[0] < end and start < joined[1]:
                yield slice(first, last), (low - self._base) // self._step, self._rows_before(high)
                first, joined = last, (plane.address, plane.end)
            low, high = joined
            last += count
        yield slice(first, last), (low - self._base) // self._step, self._rows_before(high)


def _starts(units: Index, shape: PlaneShape, step: int) -> Index:
    """Distance of each unit from the start of the plane, in steps."""
    block, unit = shape.block_stride // step, shape.unit_stride // step
    if shape.units == 1:
        return units * block
    if block == unit * shape.units:
        return units * unit
    return units // shape.units * block + units % shape.units * unit

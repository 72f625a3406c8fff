"""Engines made up at random, and what a gather or a scatter has to do, by numpy's own indexing.

Memory is one array per allocation, padded on any axis, with its axes in any order. A plane is a view of it whose first
axes say which unit (block, or block and token) and whose others are inside a unit, in the order of the payload.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmcache_cuda.geometry import Call, Payload, Planes, Units, arrange

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.int64]

ITEMSIZES = {"float8": 1, "bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


@dataclass
class Case:
    """One copy: memory, chunk, and which units go where."""

    name: str
    memory: list[Bytes]
    planes: list[Bytes]
    """[unit's axes, axes inside, byte], views of `memory`."""
    per_block: int | None
    """Tokens of a block, if units are tokens."""
    units: Units
    payload: Payload
    chunk: Bytes
    first: int
    """Where in `chunk` the payload begins."""
    numbers: Numbers

    def expected(self, *, gather: bool) -> tuple[Bytes, list[Bytes]]:
        """Chunk and memory afterwards. Leaves those here as they were."""
        saved = self.chunk.copy(), [each.copy() for each in self.memory]
        for plane, view in enumerate(self.planes):
            for unit, number in enumerate(self.numbers.tolist()):
                if number < 0:
                    continue
                where = (number,) if self.per_block is None else divmod(number, self.per_block)
                page, inside = divmod(unit, self.payload.page_units)
                start = self.first + page * self.payload.page_stride + plane * self.payload.plane_stride
                start += inside * self.payload.unit_stride
                part = self.chunk[start : start + self.units.unit_bytes]
                if gather:
                    part[:] = view[where].ravel()
                else:
                    view[where] = part.reshape(view[where].shape)
        result = self.chunk.copy(), [each.copy() for each in self.memory]
        self.chunk[:] = saved[0]
        for each, before in zip(self.memory, saved[1], strict=True):
            each[:] = before
        return result

    def call(self, table: NDArray[np.uint64], at: Callable[[NDArray[Any]], int] | None = None) -> Call:
        """What the kernel is told. `table` gets the planes' addresses. `at` says where an array is, if not here."""
        at = at or address
        addresses = [address(view) + at(whole) - address(whole) for view, whole in self._owned()]
        table[: len(addresses)] = addresses
        return arrange(
            self.units,
            self.payload,
            planes=Planes(at(table), len(addresses), Planes.alignment_of(addresses)),
            chunk=at(self.chunk) + self.first,
            numbers=at(self.numbers),
            count=len(self.numbers),
        )

    def _owned(self) -> Iterator[tuple[Bytes, Bytes]]:
        for view in self.planes:
            yield view, next(whole for whole in self.memory if np.may_share_memory(view, whole))


def address(array: NDArray[Any]) -> int:
    where: int = array.__array_interface__["data"][0]
    return where


def case(seed: int) -> Case:
    """Every seed another engine; the same one again for the same seed."""
    draw = random.Random(seed)
    dtype, itemsize = draw.choice(list(ITEMSIZES.items()))
    tokens = draw.random() < 0.5
    kind = draw.choice(["mla", "mla", "apart", "apart", "in block", "in head", "separate"])
    sizes = {
        "b": draw.randint(2, 9),
        "t": draw.choice([1, 2, 3, 5, 8, 16]),
        "h": 1 if kind == "mla" else draw.choice([1, 2, 3, 8]),
        "d": draw.choice([576, 328, 64] if kind == "mla" else [1, 8, 20, 64, 80, 128, 136]),
        "2": 2,
    }
    layers = draw.randint(1, 3)
    axes = [*"bthd"]
    if kind in ("in block", "in head"):
        axes.insert(draw.randint(1, 2) if kind == "in block" else 3, "2")
    # The order in memory: mostly heads and tokens swapped or not, at times anything at all.
    if draw.random() < 0.4:
        place = axes.index("t"), axes.index("h")
        axes[place[0]], axes[place[1]] = "h", "t"
    if draw.random() < 0.15:
        draw.shuffle(axes)
    if kind == "apart":
        axes.insert(draw.choice([0, 0, 0, 1]), "2")
    padding = {axis: draw.choice([0, 0, 0, 0, 1, 2]) if axis not in "2" else 0 for axis in axes}
    if draw.random() < 0.5:
        padding = dict.fromkeys(axes, 0)
    memory, planes = [], []
    inside = [axis for axis in axes if axis not in ("b", *("2" if kind == "apart" else ()), *("t" if tokens else ""))]
    order = [axis for axis in "2thd" if axis in inside] if draw.random() < 0.5 else inside
    front = ["b", "t"] if tokens else ["b"]
    generator = np.random.default_rng(seed)
    strides: dict[str, int] = {}
    for _ in range(layers * (2 if kind == "separate" else 1)):
        shape = [sizes[axis] + padding[axis] for axis in axes]
        whole = generator.integers(0, 256, (*shape, itemsize), np.uint8)
        memory.append(whole)
        part = whole[tuple(slice(padding[axis] // 2, padding[axis] // 2 + sizes[axis]) for axis in axes)]
        strides = dict(zip(axes, part.strides, strict=False))
        for pair in range(2 if kind == "apart" else 1):
            view, names = part, [*axes]
            if kind == "apart":
                view = view[(slice(None),) * axes.index("2") + (pair,)]
                names.remove("2")
            planes.append(view.transpose([*(names.index(axis) for axis in [*front, *order]), len(names)]))
    if tokens:
        block_units, unit_stride, per_block = sizes["t"], strides["t"], sizes["t"]
    else:
        block_units, unit_stride, per_block = 1, 0, None
    units = Units(
        blocks=sizes["b"],
        block_stride=strides["b"],
        block_units=block_units,
        unit_stride=unit_stride,
        axes=tuple((sizes[axis], strides[axis]) for axis in order),
        run=itemsize,
    )
    total = sizes["b"] * block_units
    count = draw.randint(1, total)
    numbers = generator.permutation(total)[:count].astype(np.int64)
    if draw.random() < 0.6:
        absent = generator.random(count) < 0.2
        numbers[absent] = generator.choice([-1, -1, -2, -(1 << 31), -(1 << 62)], absent.sum())
    page_units = draw.choice([1, 2, 4, 7, count])
    payload, form = _payload(draw, page_units, len(planes), count, units.unit_bytes)
    first = draw.choice([0, 0, 0, 16, 2, 1])
    behind = draw.choice([0, 5])
    # numpy aligns to 16 bytes what is large, so what is not aligned here is so by `first`.
    chunk = generator.integers(0, 256, first + payload.span(len(planes), count, units.unit_bytes) + behind, np.uint8)
    name = f"seed {seed}: {kind} {''.join(axes)} as {''.join(order)}, {dtype} {sizes}, {layers} layers, {form}"
    return Case(name, memory, planes, per_block, units, payload, chunk, first, numbers)


def _payload(draw: random.Random, page_units: int, planes: int, count: int, unit: int) -> tuple[Payload, str]:
    gap = draw.choice([0, 0, 0, 16, 3])
    form = draw.choice(["page plane unit", "page plane unit", "plane unit", "unit plane"])
    if form == "page plane unit":
        plane_stride = page_units * (unit + gap)
        return Payload(page_units, planes * plane_stride, plane_stride, unit + gap), form
    if form == "plane unit":
        return Payload(count, 0, count * (unit + gap), unit + gap), form
    return Payload(count, 0, unit + gap, planes * (unit + gap)), form

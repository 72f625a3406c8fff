"""What the kernels are told: how KV lies in an engine's memory and in a chunk, as words of 8 bytes.

See `kernels.cu` for what the numbers mean. All that a kernel relies on is checked here, since it checks nothing itself.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from lmcache_cuda.errors import GeometryError

__all__ = ["AXES", "Call", "KvCopy", "Payload", "Planes", "Units", "arrange"]

AXES = 4
WIDTHS = (16, 8, 4, 2, 1)
WARP_BYTES = 32 * 4
"""Times the width: what a warp copies at a time."""
LIMIT = 1 << 31
"""The kernels count in 32 bits; one bit is left for what is added to a count."""


class KvCopy(ctypes.Structure):
    """The argument of every kernel."""

    _fields_ = (
        ("chunk", ctypes.c_uint64),
        ("planes", ctypes.c_uint64),
        ("units", ctypes.c_uint64),
        ("n_planes", ctypes.c_int64),
        ("n_units", ctypes.c_int64),
        ("block_units", ctypes.c_int64),
        ("block_stride", ctypes.c_int64),
        ("unit_stride", ctypes.c_int64),
        ("axis_size", ctypes.c_int64 * AXES),
        ("axis_stride", ctypes.c_int64 * AXES),
        ("run", ctypes.c_int64),
        ("page_units", ctypes.c_int64),
        ("chunk_page_stride", ctypes.c_int64),
        ("chunk_plane_stride", ctypes.c_int64),
        ("chunk_unit_stride", ctypes.c_int64),
    )


@dataclass(frozen=True)
class Units:
    """How the units of a plane lie in an engine's memory. A unit is a block, a part of one, or a token.

    Raises:
        GeometryError: Two bytes would lie in one place, or there are more axes than the kernels know.
    """

    blocks: int
    block_stride: int
    block_units: int
    """Units in a block."""
    unit_stride: int
    axes: tuple[tuple[int, int], ...]
    """Size and stride of each axis inside a unit, in the order of the payload, outermost first."""
    run: int
    """Bytes in one piece, below all axes."""

    def __post_init__(self) -> None:
        axes: list[tuple[int, int]] = []
        run = self.run
        for size, stride in reversed(self.axes):
            if not axes and stride == run:
                run *= size
            elif axes and stride == axes[0][0] * axes[0][1]:
                axes[0] = (axes[0][0] * size, axes[0][1])
            elif size != 1:
                axes.insert(0, (size, stride))
        object.__setattr__(self, "axes", tuple(axes))
        object.__setattr__(self, "run", run)
        if len(axes) > AXES:
            raise GeometryError(f"a unit of {len(axes)} axes, {axes}: the kernels know {AXES} and a run of bytes")
        if self.blocks * self.block_units >= LIMIT:
            raise GeometryError(f"{self.blocks} blocks of {self.block_units} units: there may be {LIMIT - 1} units")
        places = [(self.blocks, self.block_stride), (self.block_units, self.unit_stride), *axes]
        _check_apart("in the engine's memory", places, run)

    @property
    def unit_bytes(self) -> int:
        return self.run * math.prod(size for size, _ in self.axes)

    @property
    def step(self) -> int:
        """What divides all distances between runs, and their length."""
        blocks = self.block_stride if self.blocks > 1 else 0
        units = self.unit_stride if self.block_units > 1 else 0
        return math.gcd(self.run, blocks, units, *(stride for _, stride in self.axes))


@dataclass(frozen=True)
class Payload:
    """How units lie in a chunk: `page_units` of them are a page of one plane."""

    page_units: int
    page_stride: int
    plane_stride: int
    unit_stride: int

    def span(self, planes: int, units: int, unit_bytes: int) -> int:
        """Bytes that so many units take, from the first to behind the last."""
        places = self._places(planes, units)
        return sum((size - 1) * stride for size, stride in places) + unit_bytes if planes and units else 0

    def _places(self, planes: int, units: int) -> list[tuple[int, int]]:
        pages = -(-units // self.page_units)
        in_page = min(units, self.page_units)
        return [(pages, self.page_stride), (planes, self.plane_stride), (in_page, self.unit_stride)]

    def step(self, planes: int, units: int) -> int:
        return math.gcd(*(stride for size, stride in self._places(planes, units) if size > 1))

    def check(self, planes: int, units: int, unit_bytes: int) -> None:
        """See that no two units lie in one place.

        Raises:
            GeometryError: They do.
        """
        _check_apart("in the chunk", self._places(planes, units), unit_bytes)


class Planes(NamedTuple):
    """A table of addresses in the device's memory, which are those of planes of one kind."""

    table: int
    length: int
    alignment: int
    """What divides all addresses in it: see `alignment_of`."""

    @staticmethod
    def alignment_of(addresses: Iterable[int]) -> int:
        return math.gcd(*addresses, WIDTHS[0])

    def layers(self, first: int, count: int, planes_a_layer: int) -> Planes:
        """Those of some layers only."""
        start, size = first * planes_a_layer, count * planes_a_layer
        if first < 0 or count < 0 or start + size > self.length:
            raise GeometryError(f"layers {first} to {first + count} of {self.length // planes_a_layer}")
        return Planes(self.table + 8 * start, size, self.alignment)


class Call(NamedTuple):
    """Which kernel to launch, and with what."""

    width: int
    """Bytes of an access; part of the kernel's name."""
    warps: int
    """As many as have something to do."""
    copy: KvCopy


def arrange(units: Units, payload: Payload, *, planes: Planes, chunk: int, numbers: int, count: int) -> Call:
    """Make the arguments for copying `count` units, whose numbers are at `numbers`, between all planes and a chunk.

    Numbers are of 8 bytes, in the order of the payload; negative ones are passed over. Each other number must be below
    `blocks * block_units`, and in a scatter none may come twice: neither can be seen from here.

    Raises:
        GeometryError: Parts of the chunk lie in one place, or it is too large for one launch.
    """
    payload.check(planes.length, count, units.unit_bytes)
    divides = math.gcd(planes.alignment, chunk, units.step, payload.step(planes.length, count), WIDTHS[0])
    width = next(width for width in WIDTHS if divides % width == 0)
    warps = planes.length * count * -(-units.unit_bytes // (width * WARP_BYTES))
    if max(warps, units.unit_bytes) >= LIMIT:
        raise GeometryError(
            f"{count} units of {planes.length} planes, {units.unit_bytes} B each, are too many for one launch; "
            "copy fewer pages at a time"
        )
    size, stride = [1] * AXES, [0] * AXES
    for place, axis in enumerate(units.axes, AXES - len(units.axes)):
        size[place], stride[place] = axis
    copy = KvCopy(
        chunk=chunk,
        planes=planes.table,
        units=numbers,
        n_planes=planes.length,
        n_units=count,
        block_units=units.block_units,
        block_stride=units.block_stride,
        unit_stride=units.unit_stride,
        axis_size=(ctypes.c_int64 * AXES)(*size),
        axis_stride=(ctypes.c_int64 * AXES)(*stride),
        run=units.run,
        page_units=payload.page_units,
        chunk_page_stride=payload.page_stride,
        chunk_plane_stride=payload.plane_stride,
        chunk_unit_stride=payload.unit_stride,
    )
    return Call(width, warps, copy)


def _check_apart(where: str, places: list[tuple[int, int]], taken: int) -> None:
    if taken < 1 or any(size < 1 for size, _ in places):
        raise GeometryError(f"nothing to copy {where}: sizes and strides {places}, runs of {taken} B")
    for size, stride in sorted(places, key=lambda place: place[1]):
        if size > 1:
            if stride < taken:
                raise GeometryError(f"a stride of {stride} B {where} over parts of {taken} B: bytes share memory")
            taken += (size - 1) * stride

"""Pages between an engine's memory and the host's, in both directions: kernels and copies on two streams each.

A kernel gathers the pages of a layer from where they lie apart into a fixed buffer of the device, and one copy takes
them to the host; loads go the other way round. There are two such buffers a direction, so that the kernel fills one
while the copy empties the other. Pages that lie in long runs are copied as they lie, and where the device's kernels
reach the host's memory at little cost they copy from and to it, both without a buffer.

Everything here submits work and returns. Whoever calls is on the one thread that does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lmcache_core.errors import LayoutError
from lmcache_transfer.device import Device, Event, Kernels, Memory, Numbers, Part, Piece, Stream
from lmcache_transfer.layout import Plane
from lmcache_transfer.paged import PagedLayout

__all__ = ["Inward", "Move", "Outward", "way_of"]

MOST_UNDER_WAY = 32
"""Turns of a direction, each of some ten operations. A driver takes about a thousand."""

Split = Callable[[Sequence[Piece]], Sequence[Piece]]
"""Cuts pieces where memory of the host was pinned in parts."""


@dataclass
class Move:
    """Pages of one request and cache group, and where they go to or come from."""

    layout: PagedLayout
    kernels: Kernels
    units: NDArray[np.int64]
    """Their units, `[page, unit]`, those of all parts one behind another."""
    parts: Sequence[Part]
    """In host memory, `[page][layer][bytes]` each."""
    owners: object = None
    """Kept until all copies have ended."""
    numbers: Numbers | None = None
    """`units`, where the device sees them; None until they are sent."""

    def __post_init__(self) -> None:
        assert len(self.units) == sum(part.pages for part in self.parts)

    def send(self, device: Device, stream: Stream) -> None:
        """Tell the device the numbers of the units."""
        if self.numbers is None:
            self.numbers = device.numbers(self.units.size)
            self.numbers.send(self.units.reshape(-1), stream)

    def close(self) -> None:
        """All copies have ended."""
        if self.numbers is not None:
            self.numbers.close()

    def numbers_from(self, page: int) -> int:
        assert self.numbers is not None
        return self.numbers.address + 8 * page * self.layout.page_units

    def parts_of(self, layers: range) -> list[Part]:
        """Where these layers begin in each part."""
        inside = layers.start * self.layout.page_layer_bytes
        return [Part(part.pages, part.address + inside) for part in self.parts]

    def rounds(self, layers: range, room: int) -> Iterator[range]:
        """Pages, as many at a time as there is room for."""
        step = room // (len(layers) * self.layout.page_layer_bytes)
        if step < 1:
            raise LayoutError(
                f"a page of {self.layout.page_tokens} tokens takes {len(layers) * self.layout.page_layer_bytes} bytes "
                f"of {len(layers)} layers, and the staging buffer has {room}; make `staging` larger"
            )
        for first in range(0, len(self.units), step):
            yield range(first, min(first + step, len(self.units)))

    def within(self, pages: range) -> Iterator[tuple[int, Part]]:
        """The parts of these pages: the first page, and what there is of it."""
        first = 0
        for part in self.parts:
            start, end = max(first, pages.start), min(first + part.pages, pages.stop)
            if start < end:
                yield start, Part(end - start, part.address + (start - first) * self.layout.page_bytes)
            first += part.pages

    def slices(self, layers: range, pages: range, staging: int) -> Iterator[tuple[int, int, int]]:
        """What lies together both in a staging buffer of these pages and layers and in host memory: addresses there
        and here, and bytes."""
        layout = self.layout
        nbytes = len(layers) * layout.page_layer_bytes
        for first, part in self.within(pages):
            at = staging + (first - pages.start) * nbytes
            if nbytes == layout.page_bytes:
                yield at, part.address, part.pages * nbytes
                continue
            inside = part.address + layers.start * layout.page_layer_bytes
            for page in range(part.pages):
                yield at + page * nbytes, inside + page * layout.page_bytes, nbytes

    def runs(self, layers: range) -> Iterator[tuple[int, int, int]]:
        """Addresses in the engine's memory and in the host's, and bytes, of units that lie in one piece each; of those
        that are neighbours in both together."""
        layout = self.layout
        for first, part in self.within(range(len(self.units))):
            units = self.units[first : first + part.pages]
            pages = part.address + layers.start * layout.page_layer_bytes + np.arange(part.pages) * layout.page_bytes
            for plane in (plane for layer in layers for plane in layout.planes[layer]):
                yield from _joined(plane, units, pages)
                pages = pages + layout.page_units * plane.shape.unit_bytes


def _joined(plane: Plane, units: NDArray[np.int64], pages: NDArray[np.int64]) -> Iterator[tuple[int, int, int]]:
    """The same of one plane, whose units of each page begin at `pages`."""
    shape = plane.shape
    size = shape.unit_bytes
    blocks, inside = np.divmod(units, shape.units)
    there = (plane.address + blocks * shape.block_stride + inside * shape.unit_stride)[units >= 0]
    here = np.add.outer(pages, np.arange(units.shape[1]) * size)[units >= 0]
    if len(there):
        apart = (np.diff(there) != size) | (np.diff(here) != size)
        starts = np.flatnonzero(np.concatenate([[True], apart]))
        lengths = np.diff(np.append(starts, len(there))) * size
        yield from zip(there[starts].tolist(), here[starts].tolist(), lengths.tolist(), strict=True)


def way_of(device: Device, layout: PagedLayout) -> str:
    """How pages are copied: `direct` as they lie, by a kernel and a buffer (`staged`), or by a kernel alone
    (`mapped`)."""
    planes = [plane.shape for layer in layout.planes for plane in layer]
    if device.direct and all(not shape.outer and shape.run >= device.direct for shape in planes):
        return "direct"
    return "mapped" if device.mapped else "staged"


class Direction:
    """Both streams of one direction, and its two staging buffers."""

    def __init__(self, device: Device, staging: int, split: Split) -> None:
        self._device = device
        self._split = split
        self._room = staging
        self.kernel = device.stream()
        self.dma = device.stream()
        self._buffers: list[Memory] = []
        self._full = [device.event() for _ in range(2)]
        self._empty = [device.event() for _ in range(2)]
        self._turn = 0
        self._joined = device.event()
        self._last = device.event()
        self._under_way: deque[Event] = deque()

    def _next(self) -> tuple[Memory, Event, Event]:
        """The buffer whose turn it is, and the events that it is full and that it is empty."""
        while len(self._buffers) < 2:
            self._buffers.append(self._device.memory(self._room))
        self._turn ^= 1
        return self._buffers[self._turn], self._full[self._turn], self._empty[self._turn]

    def _bound(self, last: Stream) -> None:
        """Submit no more than is of use. A driver whose queue is full has its callers wait, and with them all of the
        process, as calls of microseconds keep the GIL; so rather this thread waits, for what was submitted long ago."""
        event = self._device.event()
        last.record(event)
        self._under_way.append(event)
        if len(self._under_way) > MOST_UNDER_WAY:
            oldest = self._under_way.popleft()
            if not oldest.query():
                oldest.synchronize()
            oldest.close()

    def whole(self, move: Move) -> list[range]:
        """How to take the layers of a move: all together, where a page of them fits a staging buffer."""
        layers = range(move.layout.layers)
        if way_of(self._device, move.layout) != "staged" or move.layout.page_bytes <= self._room:
            return [layers]
        return [range(layer, layer + 1) for layer in layers]

    def wait(self) -> None:
        """Wait for all that was submitted."""
        for stream in (self.kernel, self.dma):
            stream.record(self._last)
            self._last.synchronize()

    def close(self) -> None:
        """Nothing is under way any more."""
        closing: list[Stream | Memory | Event] = [self.kernel, self.dma, *self._buffers, *self._under_way]
        for each in (*closing, *self._full, *self._empty, self._joined, self._last):
            each.close()


class Outward(Direction):
    """From an engine's memory to the host's."""

    _direct = False
    """Copies read the engine's memory since `read` was last called."""

    def submit(self, move: Move, layers: range, computed: Event) -> None:
        """Copy some layers of pages, once the engine has computed them."""
        way = way_of(self._device, move.layout)
        if way == "direct":
            self._direct = True
            self.dma.wait(computed)
            self.dma.copy_all(self._split([Piece(here, there, size) for there, here, size in move.runs(layers)]))
            self._bound(self.dma)
            return
        self.kernel.wait(computed)
        move.send(self._device, self.kernel)
        if way == "mapped":
            numbers, parts = move.numbers_from(0), move.parts_of(layers)
            move.kernels.gather(layers, numbers, parts, move.layout.page_bytes, self.kernel)
            self._bound(self.kernel)
            return
        stride = len(layers) * move.layout.page_layer_bytes
        for pages in move.rounds(layers, self._room):
            buffer, full, empty = self._next()
            self.kernel.wait(empty)
            numbers = move.numbers_from(pages.start)
            staged = [Part(len(pages), buffer.address)]
            move.kernels.gather(layers, numbers, staged, stride, self.kernel)
            self.kernel.record(full)
            self.dma.wait(full)
            pieces = [Piece(here, there, size) for there, here, size in move.slices(layers, pages, buffer.address)]
            self.dma.copy_all(self._split(pieces))
            self.dma.record(empty)
            self._bound(self.dma)

    def read(self, event: Event) -> None:
        """Record when the engine's memory has been read, so that it may be overwritten."""
        if self._direct:
            self._direct = False
            self.dma.record(self._joined)
            self.kernel.wait(self._joined)
        self.kernel.record(event)

    def end(self, event: Event) -> None:
        """Record when all that was submitted has ended."""
        self.kernel.record(self._joined)
        self.dma.wait(self._joined)
        self.dma.record(event)


class Inward(Direction):
    """From the host's memory to an engine's."""

    def submit(self, move: Move, layers: range, start: Event) -> None:
        """Copy some layers of pages, once the engine has done what it does to these pages."""
        way = way_of(self._device, move.layout)
        if way == "direct":
            self.dma.wait(start)
            self.dma.copy_all(self._split([Piece(there, here, size) for there, here, size in move.runs(layers)]))
            self._bound(self.dma)
            return
        move.send(self._device, self.kernel)
        if way == "mapped":
            self.kernel.wait(start)
            numbers, parts = move.numbers_from(0), move.parts_of(layers)
            move.kernels.scatter(layers, numbers, parts, move.layout.page_bytes, self.kernel)
            self._bound(self.kernel)
            return
        stride = len(layers) * move.layout.page_layer_bytes
        for pages in move.rounds(layers, self._room):
            buffer, full, empty = self._next()
            self.dma.wait(empty)
            pieces = [Piece(there, here, size) for there, here, size in move.slices(layers, pages, buffer.address)]
            self.dma.copy_all(self._split(pieces))
            self.dma.record(full)
            self.kernel.wait(full)
            self.kernel.wait(start)
            numbers = move.numbers_from(pages.start)
            staged = [Part(len(pages), buffer.address)]
            move.kernels.scatter(layers, numbers, staged, stride, self.kernel)
            self.kernel.record(empty)
            self._bound(self.kernel)

    def end(self, event: Event) -> None:
        """Record when all that was submitted has ended."""
        self.dma.record(self._joined)
        self.kernel.wait(self._joined)
        self.kernel.record(event)

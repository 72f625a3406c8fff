"""NVIDIA's GPUs as a `Device`: kernels compiled for the one that is there, launched through its driver.

See `lmcache_cuda` for how; nothing of torch is needed but the number of the stream on which the engine computes.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmcache_cuda.device import Device, EngineStream, Event, Memory, Stream
from lmcache_cuda.errors import DriverError
from lmcache_cuda.geometry import Payload, Planes, Units, arrange
from lmcache_cuda.kernels import Kernels
from lmcache_transfer import device as interface
from lmcache_transfer.layout import Plane, PlaneShape
from lmcache_transfer.paged import PagedLayout

__all__ = ["CudaDevice"]


class CudaDevice:
    """Satisfies `Device`.

    Args:
        device: The GPU. Closed with this.
        cubin: The kernels for it.
        max_blocks: Multiprocessors that kernels may take at most; the others are left to the engine.
        direct: See `Device`.
    """

    kind = "cuda"
    mapped = False

    def __init__(self, device: Device, cubin: bytes, *, number: int, max_blocks: int, direct: int) -> None:
        self.direct = direct
        self.number = number
        self.name = device.name
        self._device = device
        self._max_blocks = max_blocks
        self._unused: dict[int, list[CudaNumbers]] = {}
        with device.current():
            self._kernels = Kernels(device, cubin)
            self._setup = Stream(device)

    def entered(self) -> AbstractContextManager[None]:
        return self._device.current()

    def stream(self) -> Stream:
        return Stream(self._device)

    def engine_stream(self) -> Stream:
        torch: Any = sys.modules.get("torch")
        handle = 0 if torch is None else torch.cuda.current_stream(self.number).cuda_stream
        return EngineStream(self._device, handle)

    def event(self) -> Event:
        return Event(self._device)

    def memory(self, nbytes: int) -> CudaMemory:
        return CudaMemory(self._device, nbytes)

    def numbers(self, count: int) -> CudaNumbers:
        size = max(512, 1 << (count - 1).bit_length())
        unused = self._unused.setdefault(size, [])
        return unused.pop() if unused else CudaNumbers(self._device, size, unused)

    def pin(self, address: int, nbytes: int) -> None:
        self._device.register(address, nbytes)

    def unpin(self, address: int) -> None:
        self._device.unregister(address)

    def kernels(self, layout: PagedLayout) -> CudaKernels:
        return CudaKernels(self._device, self._kernels, self._setup, layout, self._max_blocks)

    def close(self) -> None:
        with self._device.current():
            for each in (number for unused in self._unused.values() for number in unused):
                each.free()
            self._unused.clear()
            self._setup.close()
            self._kernels.close()
        self._device.close()


class CudaMemory(Memory):
    """Satisfies `Memory`."""

    @property
    def address(self) -> int:
        return self.handle


class CudaNumbers:
    """Satisfies `Numbers`: room on the device, and as much pinned memory of the host from where it is filled."""

    def __init__(self, device: Device, size: int, unused: list[CudaNumbers]) -> None:
        self._device = device
        self._unused = unused
        self._host = np.frombuffer(mmap.mmap(-1, 8 * size), np.int64)  # pages of its own, as whole ones are pinned
        self._memory = CudaMemory(device, 8 * size)
        try:
            device.register(self._host.ctypes.data, self._host.nbytes)
            self._pinned = True
        except DriverError:  # copies of it are made by way of the driver's own buffers then
            self._pinned = False

    @property
    def address(self) -> int:
        return self._memory.address

    def send(self, numbers: NDArray[np.int64], stream: interface.Stream) -> None:
        self._host[: len(numbers)] = numbers
        stream.copy_all([interface.Piece(self.address, self._host.ctypes.data, numbers.nbytes)])

    def close(self) -> None:
        self._unused.append(self)

    def free(self) -> None:
        """Give it back to the system."""
        if self._pinned:
            self._device.unregister(self._host.ctypes.data)
        self._memory.close()


class _Launch(NamedTuple):
    """Planes of one shape that lie evenly in a page."""

    units: Units
    planes: Planes
    plane_stride: int
    offset: int
    """Of the first in a page."""


class CudaKernels:
    """Satisfies `Kernels`."""

    def __init__(self, device: Device, kernels: Kernels, setup: Stream, layout: PagedLayout, max_blocks: int) -> None:
        self._layout = layout
        self._kernels = kernels
        self._max_blocks = max_blocks
        every = range(layout.layers)
        ranges = dict.fromkeys([every, *(range(layer, layer + 1) for layer in every)])
        groups = {layers: _even(_planes(layout, layers), layout.page_units) for layers in ranges}
        addresses = [plane.address for found in groups.values() for group in found for plane in group.planes]
        table = np.array(addresses, np.uint64)
        self._table = CudaMemory(device, table.nbytes)
        setup.copy(self._table.address, table.ctypes.data, table.nbytes)
        setup.synchronize()
        self._launches: dict[range, list[_Launch]] = {}
        at = 0
        for layers, found in groups.items():
            self._launches[layers] = launches = []
            for group in found:
                alignment = Planes.alignment_of(plane.address for plane in group.planes)
                planes = Planes(self._table.address + 8 * at, len(group.planes), alignment)
                launches.append(_Launch(_units(group.planes[0].shape), planes, group.stride, group.offset))
                at += len(group.planes)

    def gather(
        self, layers: range, numbers: int, parts: Sequence[interface.Part], page_stride: int, stream: interface.Stream
    ) -> None:
        self._launch(self._kernels.gather, layers, numbers, parts, page_stride, stream)

    def scatter(
        self, layers: range, numbers: int, parts: Sequence[interface.Part], page_stride: int, stream: interface.Stream
    ) -> None:
        self._launch(self._kernels.scatter, layers, numbers, parts, page_stride, stream)

    def _launch(
        self,
        kernel: Any,
        layers: range,
        numbers: int,
        parts: Sequence[interface.Part],
        page_stride: int,
        stream: interface.Stream,
    ) -> None:
        page_units = self._layout.page_units
        for pages, address in parts:
            for launch in self._launches[layers]:
                payload = Payload(page_units, page_stride, launch.plane_stride, launch.units.unit_bytes)
                call = arrange(
                    launch.units,
                    payload,
                    planes=launch.planes,
                    chunk=address + launch.offset,
                    numbers=numbers,
                    count=pages * page_units,
                )
                kernel(call, stream, max_blocks=self._max_blocks)
            numbers += 8 * pages * page_units

    def close(self) -> None:
        self._table.close()


class _Even(NamedTuple):
    planes: Sequence[Plane]
    stride: int
    offset: int


def _planes(layout: PagedLayout, layers: Iterable[int]) -> list[Plane]:
    return [plane for layer in layers for plane in layout.planes[layer]]


def _even(planes: Sequence[Plane], page_units: int) -> list[_Even]:
    """Planes in groups that one launch copies each: of one shape, and in a page at one distance. Mostly it is one."""
    sizes = [plane.shape.unit_bytes * page_units for plane in planes]
    starts = np.cumsum([0, *sizes]).tolist()
    found = []
    for shape in dict.fromkeys(plane.shape for plane in planes):
        chosen = [place for place, plane in enumerate(planes) if plane.shape == shape]
        gaps = {starts[b] - starts[a] for a, b in pairwise(chosen)}
        for group in [chosen] if len(gaps) < 2 else [[place] for place in chosen]:
            stride = max(gaps) if len(group) > 1 else sizes[group[0]]
            found.append(_Even([planes[place] for place in group], stride, starts[group[0]]))
    return found


def _units(shape: PlaneShape) -> Units:
    return Units(
        blocks=shape.blocks,
        block_stride=shape.block_stride,
        block_units=shape.units,
        unit_stride=shape.unit_stride,
        axes=tuple((axis.size, axis.stride) for axis in shape.outer),
        run=shape.run,
    )

"""The GPU that is measured: memory, an engine's KV in it, and clocks."""

from __future__ import annotations

import mmap
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmcache_cuda.compiling import compile_kernels
from lmcache_cuda.device import Device, EngineStream, Memory, Piece, Stream
from lmcache_cuda.driver import LIBRARY, Driver
from lmcache_cuda.errors import CudaError
from lmcache_cuda.kernels import Kernels
from lmcache_transfer.cudadevice import CudaDevice

__all__ = ["Gpu", "Host", "Tensor", "address", "line_rate", "opened"]


def address(array: NDArray[Any]) -> int:
    """Where an array lies."""
    return int(array.ctypes.data)


class Tensor:
    """A tensor in the GPU's memory, as a transfer sees one."""

    def __init__(self, where: int, shape: Sequence[int], strides: Sequence[int], itemsize: int, number: int) -> None:
        self.shape = tuple(shape)
        self.dtype = {1: "uint8", 2: "bfloat16", 4: "float32", 8: "float64"}[itemsize]
        self.device = SimpleNamespace(type="cuda", index=number)
        self._where, self._strides, self._itemsize = where, tuple(strides), itemsize

    def data_ptr(self) -> int:
        return self._where

    def stride(self) -> tuple[int, ...]:
        return self._strides

    def element_size(self) -> int:
        return self._itemsize


class Host:
    """Memory of the host that the GPU copies from and to by itself."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device = device
        self._map = mmap.mmap(-1, nbytes)
        self.array = np.frombuffer(self._map, np.uint8)
        self.array[:] = 0
        self.memory = memoryview(self._map)[:]
        self.address = address(self.array)
        device.register(self.address, nbytes)

    def close(self) -> None:
        self._device.unregister(self.address)


@dataclass
class Gpu:
    """See the module."""

    device: Device
    cubin: bytes
    kernels: Kernels
    number: int
    compiled: float
    """Seconds that compiling took, or finding what had been compiled."""

    def wrapped(self, *, max_blocks: int = 8, direct: int = 0) -> CudaDevice:
        """For a transfer, which closes it."""
        return CudaDevice(
            Device(self.device.driver, self.number),
            self.cubin,
            number=self.number,
            max_blocks=max_blocks,
            direct=direct,
        )

    @contextmanager
    def memory(self, *sizes: int) -> Iterator[list[int]]:
        """Memory of the GPU: addresses."""
        with ExitStack() as stack:
            found = []
            for size in sizes:
                memory = Memory(self.device, size)
                stack.callback(memory.close)
                found.append(memory.handle)
            yield found

    @contextmanager
    def host(self, nbytes: int) -> Iterator[Host]:
        """Pinned memory of the host."""
        memory = Host(self.device, nbytes)
        try:
            yield memory
        finally:
            memory.close()

    @contextmanager
    def stream(self) -> Iterator[Stream]:
        """A stream, until it is idle."""
        stream = Stream(self.device)
        try:
            yield stream
            stream.synchronize()
        finally:
            stream.close()

    @property
    def engine(self) -> Stream:
        """The stream on which an engine computes, where torch is not there: the default one."""
        return EngineStream(self.device, 0)

    def send(self, where: int, array: NDArray[Any]) -> None:
        """Copy an array to the GPU, and wait."""
        with self.stream() as stream:
            stream.copy_all([Piece(where, address(array), array.nbytes)])

    def fetch(self, where: int, nbytes: int) -> NDArray[np.uint8]:
        """Copy from the GPU, and wait."""
        array = np.empty(nbytes, np.uint8)
        with self.stream() as stream:
            stream.copy_all([Piece(address(array), where, nbytes)])
        return array

    def seconds(self, work: Callable[[Stream], object], *, times: int = 5) -> float:
        """How long work takes on a stream, at best, from its submission until it has ended."""
        best = float("inf")
        with self.stream() as stream:
            for _ in range(times):
                started = time.perf_counter()
                work(stream)
                stream.synchronize()
                best = min(best, time.perf_counter() - started)
        return best


@contextmanager
def opened(number: int, library: str = LIBRARY, cubin: bytes | None = None) -> Iterator[Gpu]:
    """A GPU.

    Raises:
        CudaError: There is none, or it cannot be used; the message says why.
    """
    device = Device(Driver(library), number)
    started = time.perf_counter()
    image = compile_kernels(device.capability, driver=device.driver.version) if cubin is None else cubin
    took = time.perf_counter() - started
    try:
        with device.current():
            kernels = Kernels(device, image)
            yield Gpu(device, image, kernels, number, took)
            kernels.close()
    finally:
        device.close()


def line_rate(number: int) -> float | None:
    """Bytes a second that the GPU's link to the host can carry at most, in one direction, as nvidia-smi tells."""
    query = [
        "nvidia-smi",
        "-i",
        str(number),
        "--query-gpu=pcie.link.gen.max,pcie.link.width.max",
        "--format=csv,noheader",
    ]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
        generation, width = (int(each) for each in told.strip().split(","))
    except (OSError, subprocess.SubprocessError, ValueError, CudaError):
        return None
    # Transfers a second and lane, and the part of the bits that are bytes: PCI Express Base Specification
    rates = {
        1: 2.5e9 * 8 / 10,
        2: 5e9 * 8 / 10,
        3: 8e9 * 128 / 130,
        4: 16e9 * 128 / 130,
        5: 32e9 * 128 / 130,
        6: 64e9 * 242 / 256,
    }
    return rates[generation] * width / 8 if generation in rates else None

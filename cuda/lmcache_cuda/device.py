"""One GPU: streams, events, memory, modules, and the copies between its memory and the host's.

Whoever calls is on a thread on which `Device.current` is entered. Nothing here waits for the device but `synchronize`,
and copies of host memory that is not registered.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from lmcache_cuda.driver import Attributes, Driver
from lmcache_cuda.errors import ClosedError, GeometryError

__all__ = ["Device", "EngineStream", "Event", "Memory", "Module", "Piece", "Stream"]

_MULTIPROCESSORS, _MAJOR, _MINOR = 16, 75, 76
_NON_BLOCKING = 1
_BLOCKING, _NO_TIMING = 1, 2
_PORTABLE, _MAPPED = 1, 2
_IN_STREAM_ORDER = 1
_LEGACY_STREAMS = (0, 1, 2)
MOST_THREADS = 1024


class Piece(NamedTuple):
    """A copy of a batch. Addresses are of the device's memory or the host's."""

    target: int
    source: int
    nbytes: int


class Device:
    """A GPU by its number, with its primary context, which it shares with the engine, kept alive until `close`.

    Raises:
        DriverError: There is no such device, or it cannot be used.
    """

    def __init__(self, driver: Driver, number: int = 0) -> None:
        self.driver = driver
        device = ctypes.c_int()
        driver.call("cuDeviceGet", ctypes.byref(device), number)
        self._device = device.value
        name = ctypes.create_string_buffer(256)
        driver.call("cuDeviceGetName", name, len(name), self._device)
        self.name = name.value.decode(errors="replace")
        self.capability = (self._attribute(_MAJOR), self._attribute(_MINOR))
        self.multiprocessors = self._attribute(_MULTIPROCESSORS)
        self._context = ctypes.c_void_p()
        driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)
        self._open = True

    def _attribute(self, which: int) -> int:
        value = ctypes.c_int()
        self.driver.call("cuDeviceGetAttribute", ctypes.byref(value), which, self._device)
        return value.value

    @staticmethod
    def count(driver: Driver) -> int:
        value = ctypes.c_int()
        driver.call("cuDeviceGetCount", ctypes.byref(value))
        return value.value

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make it this thread's device, and what was so before it afterwards."""
        self.driver.call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self.driver.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def close(self) -> None:
        """Let go of the context. Streams, events, memory and modules must be closed before."""
        if self._open:
            self._open = False
            self.driver.call("cuDevicePrimaryCtxRelease_v2", self._device)

    def register(self, address: int, nbytes: int) -> None:
        """Pin a mapping of the host's memory, so that the device copies from and to it by itself."""
        self.driver.call("cuMemHostRegister_v2", address, nbytes, _PORTABLE | _MAPPED)

    def unregister(self, address: int) -> None:
        self.driver.call("cuMemHostUnregister", address)

    def mapped(self, address: int) -> int:
        """Where the device sees registered memory of the host."""
        found = ctypes.c_uint64()
        self.driver.call("cuMemHostGetDevicePointer_v2", ctypes.byref(found), address, 0)
        return found.value


class _Handle:
    """Something that the driver has made, until `close`."""

    _destroy: str

    def __init__(self, driver: Driver, handle: int | None) -> None:
        self.driver = driver
        self._handle = handle

    @property
    def handle(self) -> int:
        if self._handle is None:  # 0 would be something else: the default stream, for one
            raise ClosedError(f"this {type(self).__name__.lower()} has been closed")
        return self._handle

    def close(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            self.driver.call(self._destroy, handle)


class Event(_Handle):
    """A moment of a stream, as of its latest `Stream.record`. Who waits for it leaves the CPU to others."""

    _destroy = "cuEventDestroy_v2"

    def __init__(self, device: Device) -> None:
        made = ctypes.c_void_p()
        device.driver.call("cuEventCreate", ctypes.byref(made), _BLOCKING | _NO_TIMING)
        super().__init__(device.driver, made.value)

    def query(self) -> bool:
        """Whether the moment has come. True for an event that was never recorded."""
        return self.driver.ready("cuEventQuery", self.handle)

    def synchronize(self) -> None:
        """Wait for the moment; other Python threads go on."""
        self.driver.call("cuEventSynchronize", self.handle)


class Stream(_Handle):
    """Work of the device, done in order. It does not wait for the legacy default stream."""

    _destroy = "cuStreamDestroy_v2"

    def __init__(self, device: Device, *, urgent: bool = False) -> None:
        least, greatest, made = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
        device.driver.call("cuCtxGetStreamPriorityRange", ctypes.byref(least), ctypes.byref(greatest))
        priority = greatest.value if urgent else least.value
        device.driver.call("cuStreamCreateWithPriority", ctypes.byref(made), _NON_BLOCKING, priority)
        super().__init__(device.driver, made.value)

    def record(self, event: Event) -> None:
        self.driver.call("cuEventRecord", event.handle, self.handle)

    def wait(self, event: Event) -> None:
        """Have what comes next in the stream wait for the event. The host does not wait."""
        self.driver.call("cuStreamWaitEvent", self.handle, event.handle, 0)

    def query(self) -> bool:
        return self.driver.ready("cuStreamQuery", self.handle)

    def synchronize(self) -> None:
        self.driver.call("cuStreamSynchronize", self.handle)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy between any two of the device's memory and the host's."""
        self.driver.call("cuMemcpyAsync", target, source, nbytes, self.handle)

    def copy_all(self, pieces: Sequence[Piece]) -> None:
        """The same for many pieces, in any order, by one call where the driver has it. None may be empty."""
        if any(piece.nbytes < 1 for piece in pieces):
            raise GeometryError("an empty piece in a batch of copies")
        if self.driver.batch is None or len(pieces) < 2 or self.handle in _LEGACY_STREAMS:
            for piece in pieces:
                self.copy(*piece)
            return
        count = len(pieces)
        targets, sources = ((ctypes.c_uint64 * count)(*column) for column in list(zip(*pieces, strict=True))[:2])
        sizes = (ctypes.c_size_t * count)(*(piece.nbytes for piece in pieces))
        attributes, first, failed = Attributes(source_order=_IN_STREAM_ORDER), ctypes.c_size_t(), ctypes.c_size_t()
        code = self.driver.batch(
            targets, sources, sizes, count, attributes, ctypes.byref(first), 1, ctypes.byref(failed), self.handle
        )
        self.driver.check(f"cuMemcpyBatchAsync of {count} pieces", code)

    def launch(self, function: int, grid: int, threads: int, *arguments: Any) -> None:
        """Launch a kernel. Arguments are ctypes values or structures of exactly the types of its parameters."""
        if not (0 < grid < 1 << 31 and 0 < threads <= MOST_THREADS):
            raise GeometryError(f"a launch of {grid} blocks of {threads} threads")
        if not all(isinstance(each, (ctypes.Structure, ctypes._SimpleCData)) for each in arguments):
            raise GeometryError("an argument of a kernel that is neither a ctypes value nor a structure")
        # The driver reads each argument through its address, as many bytes as the kernel's parameter has.
        packed = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(each) for each in arguments))
        self.driver.call("cuLaunchKernel", function, grid, 1, 1, threads, 1, 1, 0, self.handle, packed, None)


class EngineStream(Stream):
    """A stream of the engine's, by its handle. Closing it leaves it to the engine."""

    def __init__(self, device: Device, handle: int) -> None:
        _Handle.__init__(self, device.driver, handle)

    def close(self) -> None:
        self._handle = None


class Memory(_Handle):
    """Memory of the device; `handle` is its address."""

    _destroy = "cuMemFree_v2"

    def __init__(self, device: Device, nbytes: int) -> None:
        address = ctypes.c_uint64()
        device.driver.call("cuMemAlloc_v2", ctypes.byref(address), nbytes)
        super().__init__(device.driver, address.value)
        self.nbytes = nbytes


class Module(_Handle):
    """Compiled kernels on the device."""

    _destroy = "cuModuleUnload"

    def __init__(self, device: Device, image: bytes) -> None:
        made = ctypes.c_void_p()
        device.driver.call("cuModuleLoadData", ctypes.byref(made), image)
        super().__init__(device.driver, made.value)

    def function(self, name: str) -> int:
        found = ctypes.c_void_p()
        self.driver.call("cuModuleGetFunction", ctypes.byref(found), self.handle, name.encode())
        return found.value or 0

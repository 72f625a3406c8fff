"""Memory of a device that others write to, as storage does that goes past the host."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from lmcache_core.errors import ClosedError, TransferError
from lmcache_cuda.errors import CudaError
from lmcache_transfer.device import Device, Event, Memory, Piece, Stream
from lmcache_transfer.memory import array_over

__all__ = ["Room", "Rooms"]


class Room:
    """Satisfies `DeviceRoom`."""

    def __init__(self, device: Device, memory: Memory) -> None:
        self._device = device
        self._memory = memory
        self.address = memory.address
        self.memory = array_over(memory.address, (memory.nbytes,), "|u1", owners=memory).data.toreadonly()

    def close(self) -> None:
        """See `DeviceRoom`.

        Raises:
            TransferError: The device failed.
        """
        try:
            with self._device.entered():
                self._memory.close()
        except CudaError as error:
            raise TransferError(f"memory of the device could not be given back: {error}") from error


class Rooms:
    """Satisfies `DeviceRooms`, for one device."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lock = threading.Lock()
        """Of the stream: copies back wait for the device, others must not wait for those."""
        self._stream: Stream | None = None
        self._event: Event | None = None
        self._closed = False

    def room(self, nbytes: int) -> Room:
        """See `DeviceRooms`."""
        with self._in_use():
            return Room(self._device, self._device.memory(nbytes))

    def copy_back(self, address: int, into: memoryview) -> None:
        """See `DeviceRooms`: one copy at a time, on a stream of its own."""
        with self._lock, self._in_use():
            if self._stream is None or self._event is None:
                self._stream, self._event = self._device.stream(), self._device.event()
            target = np.frombuffer(into, np.uint8)
            self._stream.copy_all([Piece(target.ctypes.data, address, target.nbytes)])
            self._stream.record(self._event)
            self._event.synchronize()

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        if self._closed:
            raise ClosedError("the transfer has been closed; the device's memory can no longer be used")
        try:
            with self._device.entered():
                yield
        except CudaError as error:
            raise TransferError(f"the device on which the engine's KV is has failed: {error}") from error

    def close(self) -> None:
        """Nothing is copied back any more. Rooms are closed by whoever has them."""
        with self._lock:
            self._closed = True
            with self._device.entered():
                for each in (self._stream, self._event):
                    if each is not None:
                        each.close()

"""What is asked of a device on which KV is: streams, events, memory, copies, and gather and scatter of pages.

The meaning is CUDA's. A stream does its work in order and beside other streams. An event is a moment of a stream;
waiting for it means the latest that was recorded when `wait` was called, and nothing at all if none was. Nothing here
waits for the device but `Event.synchronize`, and copies of host memory that is not pinned.

`hostdevice` has one that needs no hardware, `cudadevice` that for NVIDIA's.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from lmcache_cuda.device import Piece
from lmcache_transfer.paged import PagedLayout

__all__ = ["Device", "Event", "Kernels", "Memory", "Numbers", "Part", "Piece", "Stream"]


class Event(Protocol):
    """A moment of a stream, as of its latest `Stream.record`."""

    def query(self) -> bool:
        """Whether it has come."""
        ...

    def synchronize(self) -> None:
        """Wait for it; other threads go on."""
        ...

    def close(self) -> None: ...


class Stream(Protocol):
    """Work of the device, done in order. Events are those of the same device."""

    def record(self, event: Any) -> None: ...
    def wait(self, event: Any) -> None:
        """Have what comes next in the stream wait for the event. The caller does not wait."""
        ...

    def copy_all(self, pieces: Sequence[Piece]) -> None:
        """Copy pieces between any two of the device's memory and the host's, in any order."""
        ...

    def close(self) -> None: ...


class Memory(Protocol):
    """Memory of the device."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def close(self) -> None: ...


class Numbers(Protocol):
    """Room for numbers of units that kernels can read."""

    @property
    def address(self) -> int:
        """Where the device sees them."""
        ...

    def send(self, numbers: NDArray[np.int64], stream: Stream) -> None:
        """Have these numbers there for what comes next in the stream."""
        ...

    def close(self) -> None:
        """They are needed no more: all that reads them has ended."""
        ...


class Part(NamedTuple):
    """Pages that lie at one distance from each other."""

    pages: int
    address: int


class Kernels(Protocol):
    """Gather and scatter for one `PagedLayout`."""

    def gather(self, layers: range, numbers: int, parts: Sequence[Part], page_stride: int, stream: Stream) -> None:
        """Copy pages, whose units have the numbers at `numbers`, from the engine's memory to where `parts` say, those
        of a part one behind another at `page_stride`, of each these layers only: all, or one. Of units with negative
        numbers nothing is copied. It is memory of the device, or pinned memory of the host."""
        ...

    def scatter(self, layers: range, numbers: int, parts: Sequence[Part], page_stride: int, stream: Stream) -> None:
        """Copy them from there to the engine's memory."""
        ...

    def close(self) -> None: ...


class Device(Protocol):
    """See the module. Whoever calls is on a thread on which `entered` is."""

    kind: str
    """As torch calls it."""
    direct: int
    """Runs of so many bytes are copied as they lie, without a kernel; 0 for never."""
    mapped: bool
    """Kernels copy from and to pinned memory of the host themselves, without staging."""

    def entered(self) -> AbstractContextManager[None]: ...
    def stream(self) -> Stream: ...
    def engine_stream(self) -> Stream:
        """That to which the engine of the calling thread submits its work."""
        ...

    def event(self) -> Event: ...
    def memory(self, nbytes: int) -> Memory: ...
    def numbers(self, count: int) -> Numbers: ...
    def pin(self, address: int, nbytes: int) -> None:
        """Make host memory such that the device copies from and to it by itself. May take long: about half a second a
        GiB."""
        ...

    def unpin(self, address: int) -> None: ...
    def kernels(self, layout: PagedLayout) -> Kernels: ...
    def close(self) -> None: ...

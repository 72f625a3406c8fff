"""A device without hardware: the engine's KV is in host memory, and kernels are numpy.

Its streams do their work as it is submitted, on the thread that submits it, so the order of things is the one that
events ask for by itself. `threaded` is the same with each stream on a thread of its own, so that what does not wait for
an event really runs beside it: what shows that the order holds because of the events.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from lmcache_core.errors import TransferError
from lmcache_transfer.device import Event, Numbers, Piece, Stream
from lmcache_transfer.hostkernels import HostKernels
from lmcache_transfer.paged import PagedLayout

__all__ = ["HostDevice"]


class HostEvent:
    """Satisfies `Event`."""

    def __init__(self) -> None:
        self.moment: threading.Event | None = None
        self.stream: HostStream | None = None

    def query(self) -> bool:
        return self.moment is None or self.moment.is_set()

    def synchronize(self) -> None:
        if self.moment is not None:
            self.moment.wait()
        if self.stream is not None and self.stream.failure is not None:
            raise TransferError(f"a copy has failed: {self.stream.failure}") from self.stream.failure

    def close(self) -> None:
        self.moment = self.stream = None


class HostStream:
    """Satisfies `Stream`: does what it is given at once."""

    failure: Exception | None = None
    """What went wrong first, for whoever waits for it."""

    def do(self, work: Callable[[], object]) -> None:
        """Do this in the stream's order."""
        work()

    def record(self, event: Event) -> None:
        assert isinstance(event, HostEvent)
        event.stream = self
        event.moment = moment = threading.Event()
        self.do(moment.set)

    def wait(self, event: Event) -> None:
        assert isinstance(event, HostEvent)
        if event.moment is not None and not event.moment.is_set():
            self.do(event.moment.wait)

    def copy_all(self, pieces: Sequence[Piece]) -> None:
        self.do(lambda: [ctypes.memmove(*piece) for piece in pieces])

    def close(self) -> None:
        """Nothing is submitted any more."""


class ThreadStream(HostStream):
    """The same on a thread. `pause` is called before each piece of work."""

    def __init__(self, pause: Callable[[], object]) -> None:
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._pause = pause
        self._thread = threading.Thread(target=self._run, name="stream", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            self._pause()
            try:
                work()
            except Exception as failure:  # noqa: BLE001  as on a GPU: it is told to whoever waits for the stream
                self.failure = self.failure or failure

    def do(self, work: Callable[[], object]) -> None:
        self._work.put(work)

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()


class HostMemory:
    """Satisfies `Memory`."""

    def __init__(self, nbytes: int) -> None:
        self._array = np.zeros(nbytes, np.uint8)
        self.address = self._array.ctypes.data
        self.nbytes = nbytes

    def close(self) -> None:
        self._array = self._array[:0]


class HostNumbers:
    """Satisfies `Numbers`."""

    def __init__(self, count: int) -> None:
        self._array = np.zeros(count, np.int64)
        self.address = self._array.ctypes.data

    def send(self, numbers: NDArray[np.int64], stream: Stream) -> None:
        self._array[: len(numbers)] = numbers

    def close(self) -> None:
        self._array = self._array[:0]


class HostDevice:
    """Satisfies `Device`.

    Args:
        threaded: Called before each piece of work of a stream, which then has a thread of its own.
        direct: See `Device`.
        mapped: See `Device`.
    """

    kind = "cpu"

    def __init__(self, threaded: Callable[[], object] | None = None, *, direct: int = 0, mapped: bool = True) -> None:
        self._threaded = threaded
        self.direct = direct
        self.mapped = mapped
        self._engine = self.stream()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        yield

    def stream(self) -> HostStream:
        return HostStream() if self._threaded is None else ThreadStream(self._threaded)

    def engine_stream(self) -> HostStream:
        return self._engine

    def event(self) -> HostEvent:
        return HostEvent()

    def memory(self, nbytes: int) -> HostMemory:
        return HostMemory(nbytes)

    def numbers(self, count: int) -> Numbers:
        return HostNumbers(count)

    def pin(self, address: int, nbytes: int) -> None:
        """It is memory of the host already."""

    def unpin(self, address: int) -> None:
        """See `pin`."""

    def kernels(self, layout: PagedLayout) -> HostKernels:
        return HostKernels(layout)

    def close(self) -> None:
        self._engine.close()

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
from lmcache_transfer.layout import Plane
from lmcache_transfer.memory import array_over
from lmcache_transfer.paged import PagedLayout
from lmcache_transfer.plans import Plan, plan_copies

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


class HostKernels:
    """Satisfies `Kernels`."""

    def __init__(self, layout: PagedLayout) -> None:
        self._layout = layout
        self._plans: dict[range, tuple[Plan, Plan]] = {}

    def gather(self, layers: range, numbers: int, pages: int, chunk: int, page_stride: int, stream: Stream) -> None:
        self._submit(layers, numbers, pages, chunk, page_stride, stream, gather=True)

    def scatter(self, layers: range, numbers: int, pages: int, chunk: int, page_stride: int, stream: Stream) -> None:
        self._submit(layers, numbers, pages, chunk, page_stride, stream, gather=False)

    def _submit(
        self, layers: range, numbers: int, pages: int, chunk: int, page_stride: int, stream: Stream, *, gather: bool
    ) -> None:
        assert isinstance(stream, HostStream)
        stream.do(lambda: self._copy(layers, numbers, pages, chunk, page_stride, gather=gather))

    def _copy(self, layers: range, numbers: int, pages: int, chunk: int, page_stride: int, *, gather: bool) -> None:
        layout = self._layout
        units = array_over(numbers, (pages, layout.page_units), "=i8", owners=None).astype(np.intp)
        nbytes = len(layers) * layout.page_layer_bytes
        present = units >= 0
        if not present.all():
            planes = [plane for layer in layers for plane in layout.planes[layer]]
            _copy_units(planes, units, present, chunk, page_stride, gather=gather)
            return
        plan = self._plan(layers)[0 if gather else 1]
        index = plan.index(units)
        copy = plan.gather if gather else plan.scatter
        if page_stride == nbytes:
            copy(index, _bytes_at(chunk, pages * nbytes))
            return
        for page in range(pages):
            copy(index[page : page + 1], _bytes_at(chunk + page * page_stride, nbytes))

    def _plan(self, layers: range) -> tuple[Plan, Plan]:
        found = self._plans.get(layers)
        if found is None:
            planes = [plane for layer in layers for plane in self._layout.planes[layer]]
            found = self._plans[layers] = plan_copies(planes, self._layout.page_units, self._layout.owners)
        return found

    def close(self) -> None:
        """Nothing is held."""


def _bytes_at(address: int, nbytes: int) -> memoryview:
    return array_over(address, (nbytes,), "|u1", owners=None).data


def _copy_units(
    planes: Sequence[Plane],
    units: NDArray[np.intp],
    present: NDArray[np.bool_],
    chunk: int,
    page_stride: int,
    *,
    gather: bool,
) -> None:
    """Copy units one by one, those that are present."""
    start = 0
    for plane in planes:
        shape = plane.shape
        sizes = tuple(axis.size for axis in shape.outer)
        strides = tuple(axis.stride for axis in shape.outer)
        for page, place in np.argwhere(present).tolist():
            block, unit = divmod(int(units[page, place]), shape.units)
            paged = array_over(
                plane.address + block * shape.block_stride + unit * shape.unit_stride,
                (*sizes, shape.run),
                "|u1",
                strides=(*strides, 1),
                owners=None,
            )
            at = chunk + page * page_stride + start + place * shape.unit_bytes
            flat = array_over(at, (*sizes, shape.run), "|u1", owners=None)
            if gather:
                flat[...] = paged
            else:
                paged[...] = flat
        start += shape.unit_bytes * units.shape[1]


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

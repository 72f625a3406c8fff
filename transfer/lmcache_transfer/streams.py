"""The stream thread: one thread submits all copies of an engine's KV, and never waits for the device.

Whoever wants something copied hands it over and goes on. One more thread a direction waits for the device, for the
oldest copies first, and completes their futures; what waits for those is called there. Nothing of ours is ever called
by the driver.

What an engine has to wait for it waits for on its own stream, by events. An event that was not recorded yet would be
none to wait for, so an engine's thread first waits, on the host, until the copy has been submitted.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from lmcache_core.errors import ClosedError, LMCacheError, TransferError
from lmcache_core.streaming import Layer
from lmcache_cuda.errors import CudaError
from lmcache_transfer.device import Device, Event
from lmcache_transfer.pipeline import Inward, Move, Outward, Split

__all__ = ["Load", "Store", "StreamThread"]

Jobs = Sequence[tuple[int, Move]]
"""Cache group and move."""


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except CudaError as error:
        raise TransferError(f"the device on which the engine's KV is has failed: {error}") from error


def _future() -> Future[None]:
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()  # a copy cannot be cancelled, whoever stops waiting for it
    return future


class _Latch:
    """Opens once; whoever waits learns whether for good."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._good = False

    def open(self, *, good: bool) -> None:
        if not self._open.is_set():
            self._good = good
            self._open.set()

    def wait(self) -> bool:
        self._open.wait()
        return self._good


class _Ending(NamedTuple):
    """What is to be told once an event has come."""

    event: Event
    future: Future[None]
    moves: Sequence[Move]
    failure: Exception | None


class Load:
    """Satisfies `LayerLoad`."""

    def __init__(self, device: Device, jobs: Jobs, order: Sequence[Layer]) -> None:
        self.done = _future()
        self.jobs = jobs
        self.order = order
        self._device = device
        self._events = {layer: (device.event(), _Latch()) for layer in order}
        self._all, self._latch = device.event(), _Latch()
        self.start = device.event()
        self.ending = device.event()
        """When all has been copied: made before anything is, as it could not be told afterwards that there is none."""
        device.engine_stream().record(self.start)

    def submitted(self, layer: Layer, record: Callable[[Event], None]) -> None:
        """All copies of a layer have been submitted."""
        event, latch = self._events[layer]
        record(event)
        latch.open(good=True)

    def ended(self, record: Callable[[Event], None]) -> None:
        """Nothing more will be submitted."""
        good = True
        try:
            record(self._all)
        except Exception:  # noqa: BLE001  nothing runs on this device any more; nobody may wait for ever
            good = False
        self._latch.open(good=good)
        for _, latch in self._events.values():
            latch.open(good=False)

    def wait(self, layer: Layer) -> bool:
        found = self._events.get(layer)
        if found is None:
            return True
        event, latch = found
        return latch.wait() and self._engine_waits(event)

    def settle(self) -> None:
        if self._latch.wait():
            self._engine_waits(self._all)

    def _engine_waits(self, event: Event) -> bool:
        try:
            with self._device.entered():
                self._device.engine_stream().wait(event)
        except CudaError:
            return False  # nothing runs on this device any more
        return True

    def close(self) -> None:
        self.done.add_done_callback(self._close)

    def _close(self, _: Future[None]) -> None:
        with self._device.entered():
            for event, _latch in self._events.values():
                event.close()
            self._events.clear()
            self.start.close()
            self._all.close()


class Store:
    """Satisfies `LayerStore`."""

    def __init__(self, thread: StreamThread, jobs: Jobs) -> None:
        self.done = _future()
        self.jobs = jobs
        self.failure: Exception | None = None
        self._thread = thread
        self._device = thread.device
        self._events: list[Event] = []
        self._read = self._device.event()
        self.ending = self._device.event()
        """See `Load.ending`."""
        self._latch = _Latch()
        self._told: set[Layer] = set()
        self._ended = False

    def computed(self, layer: Layer) -> None:
        jobs = [(move, range(layer.layer, layer.layer + 1)) for group, move in self.jobs if group == layer.group]
        if not jobs or layer in self._told or self._ended:
            return
        self._told.add(layer)
        self._submit(jobs)

    def _submit(self, jobs: Sequence[tuple[Move, range]]) -> None:
        try:
            with self._device.entered():
                event = self._device.event()
                self._events.append(event)
                self._device.engine_stream().record(event)
        except CudaError as error:
            self.failure = error  # the future tells it
            return
        with contextlib.suppress(ClosedError):  # `end` says so
            self._thread.put(lambda: self._thread.outward(self, jobs, event))

    def end(self) -> Future[None]:
        if self._ended:
            return self.done
        self._ended = True
        rest: list[tuple[Move, range]] = []
        for group, move in self.jobs:
            missing = [n for n in range(move.layout.layers) if Layer(group, n) not in self._told]
            if len(missing) == move.layout.layers:
                rest += [(move, layers) for layers in self._thread.out.whole(move)]
            else:
                rest += [(move, range(n, n + 1)) for n in missing]
        if rest:
            self._submit(rest)
        try:
            self._thread.put(lambda: self._thread.end_store(self))
        except ClosedError as closed:
            self.submitted(good=False)
            _tell(self.done, closed)
        return self.done

    def submitted(self, *, good: bool) -> None:
        """All that reads the engine's memory has been submitted."""
        self._latch.open(good=good)

    @property
    def read(self) -> Event:
        """When the engine's memory has been read."""
        return self._read

    def free(self) -> None:
        self.end()
        if self._latch.wait():
            with _translated(), self._device.entered():
                self._device.engine_stream().wait(self._read)

    def close(self) -> None:
        self.end()
        self.done.add_done_callback(self._close)

    def _close(self, _: Future[None]) -> None:
        with self._device.entered():
            for event in (*self._events, self._read):
                event.close()
            self._events.clear()


class StreamThread:
    """See the module.

    Args:
        device: On which the KV is.
        staging: Bytes of each of the four buffers of the device; taken when they are first needed.
        split: Cuts copies where memory of the host was pinned in parts.
    """

    def __init__(self, device: Device, *, staging: int, split: Split = lambda pieces: pieces) -> None:
        self.device = device
        with device.entered():
            self.out = Outward(device, staging, split)
            self.into = Inward(device, staging, split)
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._endings: tuple[queue.SimpleQueue[_Ending | None], ...] = (queue.SimpleQueue(), queue.SimpleQueue())
        self._closed = False
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, name="lmcache-streams", daemon=True)]
        for name, endings in zip(("lmcache-stored", "lmcache-loaded"), self._endings, strict=True):
            self._threads.append(threading.Thread(target=self._reap, name=name, args=(endings,), daemon=True))
        self._moments: queue.SimpleQueue[tuple[Event, Future[float]] | None] = queue.SimpleQueue()
        self._threads.append(threading.Thread(target=self._watch, name="lmcache-moments", daemon=True))
        for thread in self._threads:
            thread.start()

    def put(self, job: Callable[[], None]) -> None:
        """Have the thread do this.

        Raises:
            ClosedError: It has been closed.
        """
        with self._lock:
            if self._closed:
                raise ClosedError("the transfer has been closed; copies can no longer be made")
            self._jobs.put(job)

    def load(self, jobs: Jobs, order: Sequence[Layer]) -> Load:
        """Copy to the engine, layer by layer, or all together where there is no order."""
        with _translated(), self.device.entered():
            load = Load(self.device, jobs, order)
        self.put(lambda: self._load(load))
        return load

    def moment(self) -> Future[float]:
        """When the device comes to here in what the engine submits."""
        future: Future[float] = Future()
        future.set_running_or_notify_cancel()
        with _translated(), self.device.entered():
            event = self.device.event()
            self.device.engine_stream().record(event)
        self._moments.put((event, future))
        return future

    def store(self, jobs: Jobs) -> Store:
        """Copy from the engine."""
        with _translated(), self.device.entered():
            return Store(self, jobs)

    # On the thread

    def _run(self) -> None:
        with self.device.entered():
            while (job := self._jobs.get()) is not None:
                job()

    def _load(self, load: Load) -> None:
        failure: Exception | None = None
        try:
            if not load.order:
                for _, move in load.jobs:
                    for layers in self.into.whole(move):
                        self.into.submit(move, layers, load.start)
            for layer in load.order:
                for group, move in load.jobs:
                    if group == layer.group:
                        self.into.submit(move, range(layer.layer, layer.layer + 1), load.start)
                load.submitted(layer, self.into.end)
        except Exception as error:  # noqa: BLE001  whatever it is, nobody may wait for ever
            failure = error
        load.ended(self.into.end)
        moves = [move for _, move in load.jobs]
        self._end(1, self.into.end, _Ending(load.ending, load.done, moves, failure))

    def outward(self, store: Store, jobs: Sequence[tuple[Move, range]], computed: Event) -> None:
        """Copy some layers of some moves."""
        if store.failure is not None:
            return
        try:
            for move, layers in jobs:
                self.out.submit(move, layers, computed)
        except Exception as error:  # noqa: BLE001  whatever it is, nobody may wait for ever
            store.failure = error

    def end_store(self, store: Store) -> None:
        """All copies of a store have been submitted."""
        try:
            self.out.read(store.read)
            store.submitted(good=True)
        except Exception as error:  # noqa: BLE001  whatever it is, nobody may wait for ever
            store.failure = store.failure or error
            store.submitted(good=False)
        moves = [move for _, move in store.jobs]
        self._end(0, self.out.end, _Ending(store.ending, store.done, moves, store.failure))

    def _end(self, direction: int, record: Callable[[Event], None], ending: _Ending) -> None:
        try:
            record(ending.event)
        except Exception as error:  # noqa: BLE001  the device is lost, and nothing of it will ever write again
            ending.event.close()
            _tell(ending.future, ending.failure or error)
            return
        self._endings[direction].put(ending)

    # On the threads that wait

    def _watch(self) -> None:
        with self.device.entered():
            while (watched := self._moments.get()) is not None:
                event, future = watched
                try:
                    event.synchronize()
                    event.close()
                    future.set_result(time.perf_counter())
                except Exception as error:  # noqa: BLE001  whatever it is, nobody may wait for ever
                    future.set_exception(error)

    def _reap(self, endings: queue.SimpleQueue[_Ending | None]) -> None:
        with self.device.entered():
            while (ending := endings.get()) is not None:
                failure = ending.failure
                try:
                    ending.event.synchronize()
                except Exception as error:  # noqa: BLE001  whatever it is, nobody may wait for ever
                    failure = failure or error
                try:
                    ending.event.close()
                    for move in ending.moves:
                        move.close()
                except CudaError as error:
                    failure = failure or error
                _tell(ending.future, failure)

    def close(self) -> None:
        """Wait for what is under way."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._jobs.put(None)
        self._threads[0].join()
        for endings in self._endings:
            endings.put(None)
        self._moments.put(None)
        for thread in self._threads[1:]:
            thread.join()
        with self.device.entered():
            for direction in (self.out, self.into):  # of a store that was never ended, too
                with contextlib.suppress(Exception):  # the device is lost, and nothing of it will ever write again
                    direction.wait()
                direction.close()


def _tell(future: Future[None], failure: Exception | None) -> None:
    if failure is None:
        future.set_result(None)
    elif isinstance(failure, LMCacheError):
        future.set_exception(failure)
    else:
        told = TransferError(f"KV could not be copied between the device and the host pool: {failure}")
        told.__cause__ = failure
        future.set_exception(told)

"""Loads and stores of a worker that are copied beside the engine, on streams of the device its KV is on.

A load that a step needs is handed over whole, layer by layer, when all of it is in slots; the engine then waits for
each layer when it comes to it, on the device. A load beside the steps hands over chunk after chunk as tiers bring them.
What a step completes is stored layer by layer as the engine computes it. Slots are given back when the device has done
with them, whoever has given up before.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from lmcache_core import operations
from lmcache_core.client import Client, Grant, Held, ReadsPastHost, Room, Storing
from lmcache_core.connectors.vllm.enginekv import EngineKV, RequestView
from lmcache_core.connectors.vllm.loading import Loading
from lmcache_core.connectors.vllm.pasthost import DeviceMemory, PastHostLoad
from lmcache_core.connectors.vllm.plan import Load, Save, Timing
from lmcache_core.errors import LMCacheError
from lmcache_core.streaming import Copying, Layer, LayerLoad, LayerStore, StreamingTransfer

__all__ = ["CopyQueue", "StepLoad", "StepStore", "StreamedLoading"]


class CopyQueue:
    """Copies to the engine that are under way, in their order. Loads beside the steps hand over no more while there is
    much, so that what a step needs does not come after all of it."""

    MOST = 64 << 20
    """Bytes."""

    def __init__(self) -> None:
        self._under_way: deque[tuple[LayerLoad, int]] = deque()

    def add(self, load: LayerLoad, nbytes: int) -> None:
        """So much is being copied."""
        self._under_way.append((load, nbytes))

    def full(self) -> Future[bool] | None:
        """When there is room, if there is none now."""
        while self._under_way and self._under_way[0][0].done.done():
            self._under_way.popleft()
        if sum(nbytes for _, nbytes in self._under_way) < self.MOST:
            return None
        room: Future[bool] = Future()
        self._under_way[0][0].done.add_done_callback(lambda _: room.set_result(True))
        return room


class _Handover:
    """Client and view in one, as `operations.load` sees them: copies are handed over instead of being made, and parts
    given back when they have been."""

    def __init__(
        self,
        client: Client,
        held: Held,
        view: RequestView,
        streams: StreamingTransfer,
        queue: CopyQueue,
        past_host: PastHostLoad | None,
        *,
        together: bool,
    ) -> None:
        self.copies: list[Copying] = []
        """Not under way yet."""
        self.loads: list[LayerLoad] = []
        self._client = client
        self._held = held
        self._view = view
        self._streams = streams
        self._queue = queue
        self._past_host = past_host
        self._together = together
        self._parts = 0
        self._nbytes = 0

    def grant(self, held: Held, start: int, ahead: int) -> list[Grant]:
        if not self._together and (wait := self._queue.full()) is not None:
            return [Grant(None, "", wait)]
        past = self._past_host
        if past is None:
            return self._client.grant(held, start, ahead)
        granted = past.grants(start) or self._client.grant(held, start, 0)
        # What is not on its way to the device, and not in the pool, is read through the host.
        return granted or self._client.grant(held, start, min(ahead, past.without(start)))

    def count(self, name: str, label: str, amount: float = 1) -> None:
        if name not in ("copied_bytes", "copy_seconds"):  # counted when they have been copied
            self._client.count(name, label, amount)

    def scatter(self, group: int, first_page: int, pages: int, source: memoryview) -> None:
        self.copies.append(self._view.copying(group, first_page, pages, source))
        self._nbytes += source.nbytes

    def consume(self, held: Held, parts: int) -> None:
        self._parts += parts
        give = None if self._past_host is None else self._past_host.consumed(parts)
        if not self._together and self.copies:
            try:
                load = self._streams.load(self.copies)
            except LMCacheError:
                if give is not None:
                    give()
                raise
            self.under_way(load, give)
        elif give is not None:
            give()  # it was there already

    def under_way(self, load: LayerLoad, give: Callable[[], None] | None = None) -> None:
        """All that was handed over is being copied. Then `give` is called."""
        parts, nbytes, began = self._parts, self._nbytes, time.perf_counter()
        self._parts = self._nbytes = 0
        self.copies = []
        self.loads.append(load)
        self._queue.add(load, nbytes)

        def ended(done: Future[None]) -> None:
            if give is not None:
                give()
            with contextlib.suppress(LMCacheError):  # the node is gone, and with it whom this is for
                self._client.consume(self._held, parts)
                if done.exception() is None:
                    self._client.count("copied_bytes", "to_engine", nbytes)
                    self._client.count("copy_seconds", "to_engine", time.perf_counter() - began)

        load.done.add_done_callback(ended)


class StreamedLoading(Loading):
    """A load whose copies are made beside the engine. One that a step needs, layer by layer, has ended for the engine
    when all of it is in slots; what there is to copy is then for `StepLoad`.

    Args:
        queue: Of all loads of this rank.
        device: Where chunks are read past the host, if they are.
        late: Told of the timing of one whose copies went on after it had ended for the engine.
    """

    def __init__(
        self,
        job: Load,
        client: Client | None,
        kv: EngineKV | None,
        warn: Callable[[str, str], object],
        clock: Callable[[], float],
        *,
        counts: bool,
        layerwise: bool,
        queue: CopyQueue,
        late: Callable[[Timing], object],
        device: DeviceMemory | None = None,
    ) -> None:
        super().__init__(job, client, kv, warn, clock, counts=counts)
        self._layerwise = layerwise and job.now
        self._queue = queue
        self._device = device
        self._late = late
        self._handover: _Handover | None = None
        self._open: tuple[Client, Held] | None = None
        """What is to be released when the copies have ended."""

    @property
    def copies(self) -> Sequence[Copying]:
        """What is to be copied layer by layer."""
        return self._handover.copies if self._handover is not None and self._open is not None else ()

    def under_way(self, load: LayerLoad) -> None:
        """That is being copied now."""
        assert self._handover is not None
        assert self._open is not None
        self._handover.under_way(load)
        client, held = self._open

        def ended(done: Future[None]) -> None:
            _let_go(client, held)
            failure = done.exception()
            if failure is not None:
                self._warn("load", f"KV of a request could not be loaded: {failure}")
                self._nothing()
            self._ended_at = self._clock()
            timing = super(StreamedLoading, self).timing()
            if timing is not None:
                self._late(timing)

        load.done.add_done_callback(ended)

    def lost(self) -> None:
        """It cannot be copied: nothing of it is there."""
        self._nothing()
        if self._open is not None and not (self._handover and self._handover.loads):
            _let_go(*self._open)
        self._open = None

    def _nothing(self) -> None:
        self.pages = min(self.pages, self.job.first_page)
        self._tiers = {}

    def _operate(self, client: Client, kv: EngineKV, held: Held) -> operations.Operation[operations.Loaded]:
        assert kv.streams is not None
        job = self.job
        first = job.first_page - job.base
        view = kv.view(first, job.blocks, job.skip_tokens)
        past = None
        if self._device is not None and not self._layerwise and isinstance(client, ReadsPastHost):
            past = PastHostLoad(self._device, client, held) if client.reads_past_host else None
        self._handover = handover = _Handover(
            client, held, view, kv.streams, self._queue, past, together=self._layerwise
        )
        ended = False
        try:
            loaded = yield from operations.load(handover, held, handover, first)
            for load in handover.loads:
                if not load.done.done():
                    yield operations.Wait(load.done, None)  # type: ignore[arg-type]
            ended = all(load.done.done() for load in handover.loads)
        finally:
            if past is not None:
                past.close()
            for load in handover.loads:
                if not ended:  # the engine may give the blocks to others, but not before the copies have ended
                    load.settle()
                load.close()
        failed = [load.done.exception() for load in handover.loads if load.done.done()]
        if ended and not any(failed):
            return loaded
        if any(failed):
            self._warn("load", f"KV of a request could not be loaded: {next(filter(None, failed))}")
        return operations.Loaded(min(first, loaded.pages), {}, 0, broken=True)

    def _release(self, client: Client, held: Held) -> None:
        handover = self._handover
        if handover is not None and handover.copies and self._layerwise:
            self._open = client, held
        elif handover is None or not handover.loads:
            client.release(held)
        else:  # they end in their order
            handover.loads[-1].done.add_done_callback(lambda _: _let_go(client, held))

    def timing(self) -> Timing | None:
        return None if self._open is not None else super().timing()


def _let_go(client: Client, held: Held) -> None:
    with contextlib.suppress(LMCacheError):  # the node is gone, and has let go of it
        client.release(held)


class StepLoad:
    """What one step needs, of all its requests, layer by layer in the order in which the engine comes to them.

    Raises:
        LMCacheError: It cannot be copied.
    """

    def __init__(self, streams: StreamingTransfer, order: Sequence[Layer], loadings: Sequence[StreamedLoading]) -> None:
        self.loadings = loadings
        self._left = set(order)
        self._load = load = streams.load([copying for each in loadings for copying in each.copies], order)
        for each in loadings:
            each.under_way(load)

    def wait(self, layer: Layer) -> bool:
        """Have the engine wait for a layer. False if it is not there."""
        self._left.discard(layer)
        return self._load.wait(layer)

    @property
    def waited(self) -> bool:
        """Whether the engine has waited for all layers."""
        return not self._left

    def settle(self) -> None:
        """Have the engine wait for all that it has not waited for."""
        self._load.settle()
        self._load.close()


class _Storing(NamedTuple):
    job: Save
    storing: Storing
    rooms: list[Room]


class StepStore:
    """What one step completes, on its way to the node.

    Args:
        client: Of the node.
        kv: The engine's.
        stored: Called, on another thread, with the numbers of the stores that have ended.
        gathered: The same, with how many pages were copied, and in how many seconds.
        warn: Logs a line, at most one a kind and interval.
    """

    def __init__(
        self,
        client: Client,
        kv: EngineKV,
        stored: Callable[[Sequence[int]], object],
        gathered: Callable[[tuple[int, float]], object],
        warn: Callable[[str, str], object],
    ) -> None:
        self._client = client
        self._kv = kv
        self._stored = stored
        self._gathered = gathered
        self._began = 0.0
        self._warn = warn
        self._storing: list[_Storing] = []
        self._store: LayerStore | None = None
        self._worthless = False
        self._finished = threading.Event()

    def begin(self, jobs: Sequence[Save]) -> None:
        """Find out where what the step completes goes.

        Raises:
            LMCacheError: That cannot be told; nothing of it is stored then.
        """
        assert self._kv.streams is not None
        try:
            self._store = self._kv.streams.store(self._copies(jobs))
        except LMCacheError:
            self._give_back(filled=False)
            raise

    def _copies(self, jobs: Sequence[Save]) -> list[Copying]:
        copies: list[Copying] = []
        for job in jobs:
            storing = self._client.join_store(job.number)
            if storing is None:
                self._stored([job.number])
                continue
            self._storing.append(found := _Storing(job, storing, []))
            view = self._kv.view(job.first_page, job.blocks)
            for room in storing.rooms:
                part = room.part
                if view.has(part.group, part.first, part.pages):
                    found.rooms.append(room)
                    copies.append(view.copying(part.group, part.first, part.pages, room.target))
        return copies

    def computed(self, layer: Layer) -> None:
        """The engine has computed a layer."""
        self._began = self._began or time.perf_counter()
        if self._store is not None:
            self._store.computed(layer)

    def end(self, *, worthless: bool) -> None:
        """It has computed all of them, or nonsense: then this waits, so that it can be said at once."""
        self._worthless = worthless
        self._began = self._began or time.perf_counter()
        if self._store is not None:
            self._store.end().add_done_callback(self._finish)
            if worthless:
                self._finished.wait()

    def free(self) -> None:
        """Have what the engine does next wait until its blocks have been read."""
        if self._store is not None:
            self._store.free()
            self._store.close()

    def _finish(self, done: Future[None]) -> None:
        failure = done.exception()
        if failure is not None:
            self._warn("save", f"KV of a request could not be stored: {failure}")
        elif pages := sum(room.part.pages for each in self._storing for room in each.rooms):
            self._gathered((pages, time.perf_counter() - self._began))
        try:
            self._give_back(filled=failure is None and not self._worthless)
        finally:
            self._finished.set()

    def _give_back(self, *, filled: bool) -> None:
        for job, storing, rooms in self._storing:
            try:
                for room in rooms if filled else ():
                    self._client.filled(room)
                self._client.finish_store(storing)
            except LMCacheError as error:
                self._warn("save", f"KV of a request could not be stored: {error}")
            self._stored([job.number])
        self._storing.clear()

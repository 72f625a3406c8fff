"""A worker's side: copies bytes between the node's pool and the engine's blocks. Knows tensors and no engine.

Loads that a step needs are copied at once. Others go on over several steps, a slice of time in each: on the engine's
own thread, because a thread beside it would get the GIL every few milliseconds only. Where the engine has nothing to
compute they take all the time there is, and wait for what is still being read from a tier.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from lmcache_core.client import Client, ReadsPastHost
from lmcache_core.connectors.vllm.enginekv import EngineKV, Geometry
from lmcache_core.connectors.vllm.loading import Loading
from lmcache_core.connectors.vllm.options import Options
from lmcache_core.connectors.vllm.pasthost import DeviceMemory
from lmcache_core.connectors.vllm.plan import Load, Report, Save, Step, Timing
from lmcache_core.connectors.vllm.streaming import CopyQueue, StepLoad, StepStore, StreamedLoading
from lmcache_core.errors import LMCacheError
from lmcache_core.streaming import DeviceRooms

__all__ = ["WorkerSide"]

IDLE_SLICE = 0.02
"""Seconds that loads may take of a step in which the engine computes nothing."""
WAIT = 0.002
"""Seconds to wait for a tier in such a step."""


class WorkerSide:
    """See the module.

    Args:
        options: What the user has set.
        client: The node's client, once it is there; None before.
        writes: Whether it stores what it holds; not if another rank holds the same.
        warn: Logs a line, at most one a kind and interval.
    """

    def __init__(
        self,
        options: Options,
        client: Callable[[], Client | None],
        *,
        writes: bool = True,
        warn: Callable[[str, str], object] = lambda kind, text: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._options = options
        self._find_client = client
        self._writes = writes
        self._warn = warn
        self._clock = clock
        self._kv: EngineKV | None = None
        self._layerwise = False
        """Copies are made layer by layer, not all together."""
        self._told = False
        self._loads: dict[str, Loading] = {}
        self._report = Report()
        self._ended: set[str] = set()
        self._failed: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._began = 0.0
        """When the step began; 0 for never."""
        self._ours = 0.0
        """Seconds of the step that went to loads."""
        self._spoilt = False
        """A load of this step has failed, and so its forward pass computes nonsense."""
        self._queue = CopyQueue()
        self._device: DeviceMemory | None = None
        """Where chunks are read past the host, if they are."""
        self._hooks = True
        """The engine tells when it comes to a layer."""
        self._step_load: StepLoad | None = None
        """What the engine waits for layer by layer in this step."""
        self._storing: StepStore | None = None
        """What this step completes."""
        self._stored: deque[int] = deque()
        self._worthless: set[int] = set()
        """Of stores that are made on streams: those that have ended, and those that come to nothing."""
        self._late: deque[Timing] = deque()
        self._computed: deque[tuple[int, int, float]] = deque()
        self._gathered: deque[tuple[int, float]] = deque()
        self._moment: Future[float] | None = None
        """When the device comes to this step."""
        self._number = 0
        """Of the latest step, if the scheduler's side must hear that it has ended."""

    def register(self, groups: Sequence[Geometry], device: str, *, backend: str, isa: str) -> None:
        """Learn where the engine's KV lies.

        Raises:
            LayoutError: It lies in a way that cannot be copied.
            PluginError: There is no transfer for this device.
        """
        layerwise = self._options.layerwise
        options = dict(self._options.transfer or {})
        if device == "cpu" and layerwise is not None:
            options["streams"] = True
        if self._kv is not None:  # the engine has moved its cache
            self._let_go()
            self._close_kv()
        self._kv = EngineKV(groups, device, backend=backend, isa=isa, options=options)
        if self._options.past_host:
            self._device = self._device_memory(self._kv)
        self._layerwise = self._kv.streams is not None and layerwise is not False
        self._told = False

    @property
    def copies(self) -> str:
        """How KV is copied, for people."""
        if self._kv is None or self._kv.streams is None:
            return "by the engine's thread, all layers together"
        past = ", and loaded past host memory where a tier can do that" if self._device is not None else ""
        return f"beside the engine, {'layer by layer' if self._layerwise else 'all layers together'}{past}"

    def _device_memory(self, kv: EngineKV) -> DeviceMemory | None:
        """Where chunks are read past the host."""
        if isinstance(kv.streams, DeviceRooms):
            return DeviceMemory(kv.streams, self._warn)
        self._warn("past host", "past_host is of no use: this engine's KV is not copied on streams of a device")
        return None

    def _close_kv(self) -> None:
        if self._device is not None:
            self._device.close()
            self._device = None
        if self._kv is not None:
            self._kv.close()

    # The steps of the engine

    def begin(self, step: Step) -> None:
        """The engine begins a step: nothing of it has been written to its blocks yet."""
        self._began, self._ours = self._clock(), 0.0
        self._number = max(self._number, step.number)
        self._spoilt = False
        self._let_go()
        kv = self._kv
        if kv is not None:
            kv.cut(step.page_tokens)
        self._moment = kv.streams.moment() if kv is not None and kv.streams and step.prefill_tokens else None
        self._begin_store(step)

    def start(self, step: Step, *, busy: bool) -> None:
        """Begin the loads of a step: those that it needs are there when this returns, or have failed."""
        started = self._clock()
        self._number = max(self._number, step.number)
        try:
            self._start(step, busy=busy)
        finally:
            self._ours += self._clock() - started

    def computed(self, step: Step) -> None:
        """The forward pass of a step has ended, or has been submitted to the device."""
        client = self._find_client()
        tells = self._began and step.prefill_tokens and client is not None and not client.shard and self._writes
        if tells and self._moment is not None:
            if self._step_load is None:  # else it has waited, too
                self._tell_computed(step, self._moment)
        elif tells:
            seconds = self._clock() - self._began - self._ours
            self._report.computed.append((step.prefill_tokens, step.context_tokens, seconds))
        self._began = 0.0
        self._moment = None

    def _tell_computed(self, step: Step, began: Future[float]) -> None:
        """By the device's time."""
        assert self._kv is not None
        assert self._kv.streams is not None
        tokens, context = step.prefill_tokens, step.context_tokens

        def ended(moment: Future[float]) -> None:
            if moment.exception() is None and began.exception() is None:
                self._computed.append((tokens, context, moment.result() - began.result()))

        self._kv.streams.moment().add_done_callback(ended)  # they come in their order

    def _start(self, step: Step, *, busy: bool) -> None:
        self._told = step.known
        if self._kv is not None:
            self._kv.cut(step.page_tokens)
        if busy:
            for loading in self._loads.values():
                loading.alone = False
        layered: list[StreamedLoading] = []
        for job in step.loads:
            self._loads[job.request] = loading = self._loading(job)
            if job.now:
                loading.run(None)
                self._spoilt |= loading.failed
                self._finish(loading)
                if isinstance(loading, StreamedLoading) and loading.copies:
                    layered.append(loading)
        if layered:
            self._begin_load(layered)
        self._go_on(self._options.load_slice if busy else IDLE_SLICE, may_wait=not busy)

    def _loading(self, job: Load) -> Loading:
        client = self._find_client()
        counts = self._writes and client is not None and not client.shard
        if self._kv is not None and self._kv.streams is not None:
            return StreamedLoading(
                job,
                client,
                self._kv,
                self._warn,
                self._clock,
                counts=counts,
                layerwise=self._layerwise,
                queue=self._queue,
                late=self._late.append,
                device=self._device_for(client),
            )
        return Loading(job, client, self._kv, self._warn, self._clock, counts=counts)

    def _device_for(self, client: Client | None) -> DeviceMemory | None:
        if self._device is not None and isinstance(client, ReadsPastHost) and not client.reads_past_host:
            self._warn(
                "past host",
                "past_host is of no use now: no tier reads into a device's memory; it takes one of the backend gds "
                "that is up, with a CUDA driver, and without codec and cipher",
            )
        return self._device

    def _go_on(self, seconds: float, *, may_wait: bool) -> None:
        until = self._clock() + seconds
        for loading in list(self._loads.values()):
            if loading.run(until):
                self._finish(loading)
            elif self._clock() >= until:
                return
        if may_wait and self._loads:
            loading = next(iter(self._loads.values()))
            while not loading.run(until) and self._clock() < until:
                loading.wait(WAIT)
            if loading.done:
                self._finish(loading)

    def _finish(self, loading: Loading) -> None:
        job = loading.job
        del self._loads[job.request]
        self._report.loaded[job.request] += 1
        timing = loading.timing()
        if timing is not None:
            self._report.timings.append(timing)
        if loading.failed:
            self._fail(loading)
        if not job.now:
            self._ended.add(job.request)

    def _fail(self, loading: Loading) -> None:
        job = loading.job
        self._report.failed.add(job.request)
        if len(job.blocks) == 1:
            bad = loading.lacking()
            self._bad_blocks |= bad
            if job.now:
                self._report.lost |= bad
        else:
            self._failed.add(job.request)

    # Layer by layer

    def wait_layer(self, name: str) -> None:
        """The engine comes to a layer: what is loaded of it must be there first."""
        load = self._step_load
        if load is None or self._kv is None or (layer := self._kv.layers.get(name)) is None:
            return
        started = self._clock()
        if not load.wait(layer):
            self._settle()
            self._lose(load.loadings)
        self._ours += self._clock() - started

    def _begin_load(self, loadings: Sequence[StreamedLoading]) -> None:
        assert self._kv is not None
        assert self._kv.streams is not None
        try:
            self._step_load = StepLoad(self._kv.streams, self._kv.order, loadings)
            if not self._hooks:
                self._settle()
        except LMCacheError as error:
            self._warn("load", f"KV of a request could not be loaded: {error}")
            self._lose(loadings)

    def _lose(self, loadings: Sequence[StreamedLoading]) -> None:
        """What was promised to this step is not there after all."""
        self._spoilt = True
        for loading in loadings:
            loading.lost()
            self._fail(loading)

    def layer_computed(self, name: str) -> None:
        """The engine has computed a layer."""
        if self._storing is not None and self._layerwise and self._kv is not None and not self._spoilt:
            layer = self._kv.layers.get(name)
            if layer is not None:
                self._storing.computed(layer)

    def _let_go(self) -> None:
        """Before the engine does anything else to its blocks: what a step that has not come to its end reads and writes
        of them comes first on the device."""
        self._end_store(worthless=True)
        self._settle()

    def _settle(self) -> None:
        if self._step_load is not None:
            self._step_load.settle()
            self._step_load = None

    def _begin_store(self, step: Step) -> None:
        client, kv = self._find_client(), self._kv
        if kv is None or kv.streams is None or client is None:
            return
        memory = client.memory
        if memory is not None:
            kv.streams.pin(memory)
        if not step.saves or not self._writes:
            return
        storing = StepStore(client, kv, self._stored.extend, self._gathered.append, self._warn)
        try:
            storing.begin(step.saves)
        except LMCacheError as error:
            self._warn("save", f"KV of a request could not be stored: {error}")
            return
        self._storing = storing

    def _end_store(self, *, worthless: bool) -> None:
        """The stores of a step that are made on streams. What the engine does next comes after its blocks are read:
        vLLM may clear blocks before it begins the next step."""
        storing, self._storing = self._storing, None
        if storing is not None:
            storing.end(worthless=worthless)
            storing.free()

    def _check_hooks(self, step: Step) -> None:
        """A forward pass must have waited for what it needed."""
        load = self._step_load
        if load is None or load.waited or not step.computes:
            return
        self._hooks = False
        self._settle()
        self._lose(load.loadings)
        self._warn(
            "layers",
            "the engine has computed a step without telling when it comes to a layer, as from a CUDA graph of all "
            "layers: what was loaded for it is computed again, and from now on it waits for all layers at once",
        )

    def save(self, step: Step) -> None:
        """Store what the forward pass of a step has completed."""
        self._check_hooks(step)
        self._settle()
        if self._kv is not None and self._kv.streams is not None:
            if self._spoilt:
                self._worthless.update(job.number for job in step.saves)
            begun = self._storing is not None
            self._end_store(worthless=self._spoilt)
            if not begun:
                self._stored.extend(job.number for job in step.saves if job.number not in self._stored)
            return
        left = {job.number for job in step.saves}
        self._report.saved.update(job.number for job in step.saves)
        try:
            for job in step.saves if not self._spoilt else ():
                if self._writes:
                    try:
                        self._save(job)
                    except LMCacheError as error:
                        self._warn("save", f"KV of a request could not be stored: {error}")
                left.discard(job.number)
        finally:
            self._report.unsaved |= left  # a defect of ours too ends the stores of the step, and with them its leases

    def _save(self, job: Save) -> None:
        client, kv = self._find_client(), self._kv
        storing = None if client is None else client.join_store(job.number)
        if client is None or kv is None or storing is None:
            return
        began, pages = self._clock(), 0
        try:
            view = kv.view(job.first_page, job.blocks)
            for room in storing.rooms:
                part = room.part
                if view.has(part.group, part.first, part.pages):
                    view.gather(part.group, part.first, part.pages, room.target)
                    client.filled(room)
                    pages += part.pages
        finally:
            client.finish_store(storing)
            if pages:
                self._gathered.append((pages, self._clock() - began))

    def ended(self) -> tuple[set[str], set[str]]:
        """Requests whose loads have ended since this was last asked, not counting those within a step; and those of
        them of whose KV nothing can be used."""
        ended, failed = self._ended, self._failed
        self._ended, self._failed = set(), set()
        return ended, failed & ended

    def give_up_on(self, requests: set[str]) -> None:
        """The engine has been told that these loads have failed, whatever came of them."""
        self._report.failed |= requests

    def bad_blocks(self) -> set[int]:
        """Blocks that should have been loaded and were not, since this was last asked."""
        blocks, self._bad_blocks = self._bad_blocks, set()
        return blocks

    def report(self) -> Report | None:
        """What there is to tell the scheduler's side."""
        while self._stored:
            number = self._stored.popleft()
            self._report.saved[number] += 1
            if number in self._worthless:
                self._worthless.remove(number)
                self._report.unsaved.add(number)
        while self._late:
            self._report.late.append(self._late.popleft())
        while self._computed:
            self._report.computed.append(self._computed.popleft())
        client = self._find_client()
        while self._gathered:
            gathered = self._gathered.popleft()
            if client is not None and not client.shard:  # all ranks copy as much
                self._report.gathered.append(gathered)
        self._report.ended, self._number = self._number, 0
        report, self._report = self._report, Report()
        if not self._told and self._kv is not None:
            report.facts = self._kv.facts
        return report or None

    def give_up(self, step: Step) -> None:
        """Something went wrong with a step: all loads have failed, its stores come to nothing."""
        self._spoilt = True
        for job in step.loads:
            if job.request not in self._loads and job.request not in self._report.loaded:
                self._loads[job.request] = self._loading(job)
        for loading in list(self._loads.values()):
            loading.fail()
            self._finish(loading)

    def close(self) -> None:
        """Give up what is under way."""
        for loading in list(self._loads.values()):
            loading.fail()
        self._loads.clear()
        self._let_go()
        self._close_kv()

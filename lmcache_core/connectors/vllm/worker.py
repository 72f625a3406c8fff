"""A worker's side: copies bytes between the node's pool and the engine's blocks. Knows tensors and no engine.

Loads that a step needs are copied at once. Others go on over several steps, a slice of time in each: on the engine's
own thread, because a thread beside it would get the GIL every few milliseconds only. Where the engine has nothing to
compute they take all the time there is, and wait for what is still being read from a tier.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmcache_core import operations
from lmcache_core.client import Client, Held
from lmcache_core.connectors.vllm.options import Options
from lmcache_core.connectors.vllm.plan import Blocks, Facts, Load, Report, Save, Step, Timing
from lmcache_core.errors import LayoutError, LMCacheError
from lmcache_core.namespace import Encoding
from lmcache_core.plugins import load_transfer
from lmcache_core.protocols import KVView, RegisteredKV, Transfer

__all__ = ["Geometry", "WorkerSide"]

IDLE_SLICE = 0.02
"""Seconds that loads may take of a step in which the engine computes nothing."""
WAIT = 0.002
"""Seconds to wait for a tier in such a step."""
NULL_BLOCK = 0
"""What vLLM writes in a block table where a window has moved on."""


@dataclass(frozen=True)
class Geometry:
    """The tensors of one cache group on this rank.

    Args:
        layers: In order.
        dims: What their axes mean; see `Transfer.register`.
        block_tokens: Of the engine's block table.
        kernel_blocks: Blocks of the tensors in one of those.
    """

    layers: Sequence[Any]
    dims: str
    block_tokens: int
    kernel_blocks: int = 1


class WorkerSide:
    """See the module.

    Args:
        options: What the user has set.
        client: The node's client, once it is there; None before.
        shard: What this rank holds of a chunk.
        writes: Whether it stores that; not if another rank holds the same.
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
        self._groups: list[Geometry] = []
        self._transfer: Transfer | None = None
        self._registered: list[RegisteredKV] = []
        self._blocks: list[RegisteredKV] = []
        """The same, a block a page."""
        self._nowhere: list[_Kept] = []
        self._page_tokens = 0
        self._facts: Facts | None = None
        self._told = False
        self._loads: dict[str, _Loading] = {}
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

    def register(self, groups: Sequence[Geometry], device: str, *, backend: str, isa: str) -> None:
        """Learn where the engine's KV lies.

        Raises:
            LayoutError: It lies in a way that cannot be copied.
            PluginError: There is no transfer for this device.
        """
        self._groups = list(groups)
        self._transfer = load_transfer(device).create({})
        self._blocks = [self._register(group, group.block_tokens) for group in groups]
        encodings = [each.encoding("vllm", backend=backend, isa=isa) for each in self._blocks]
        self._nowhere = [self._keep(group, np.array([NULL_BLOCK])) for group in range(len(groups))]
        self._facts = Facts(_one_encoding(encodings, groups), tuple(each.page_layer_bytes for each in self._blocks))
        self._told = False
        self._registered = []
        self._page_tokens = 0

    def _register(self, group: Geometry, page_tokens: int) -> RegisteredKV:
        assert self._transfer is not None
        return self._transfer.register(
            group.layers,
            dims=group.dims,
            page_tokens=page_tokens,
            block_tokens=group.block_tokens // group.kernel_blocks,
        )

    # The steps of the engine

    def begin(self) -> None:
        """The engine begins a step."""
        self._began, self._ours = self._clock(), 0.0

    def start(self, step: Step, *, busy: bool) -> None:
        """Begin the loads of a step: those that it needs are there when this returns, or have failed."""
        started = self._clock()
        try:
            self._start(step, busy=busy)
        finally:
            self._ours += self._clock() - started

    def computed(self, step: Step) -> None:
        """The forward pass of a step has ended."""
        client = self._find_client()
        if self._began and step.prefill_tokens and client is not None and not client.shard and self._writes:
            seconds = self._clock() - self._began - self._ours
            self._report.computed.append((step.prefill_tokens, step.context_tokens, seconds))
        self._began = 0.0

    def _start(self, step: Step, *, busy: bool) -> None:
        self._told = step.known
        if step.page_tokens not in (0, self._page_tokens) and self._groups:
            self._registered = [self._register(group, step.page_tokens) for group in self._groups]
            self._page_tokens = step.page_tokens
        self._spoilt = False
        if busy:
            for loading in self._loads.values():
                loading.alone = False
        for job in step.loads:
            self._loads[job.request] = loading = _Loading(self, job)
            if job.now:
                loading.run(None)
                self._spoilt |= loading.failed
                self._finish(loading)
        self._go_on(self._options.load_slice if busy else IDLE_SLICE, may_wait=not busy)

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

    def _finish(self, loading: _Loading) -> None:
        job = loading.job
        del self._loads[job.request]
        self._report.loaded[job.request] += 1
        timing = loading.timing()
        if timing is not None:
            self._report.timings.append(timing)
        if loading.failed:
            self._report.failed.add(job.request)
            if len(self._groups) == 1:
                per_page = job.pages - job.first_page and len(job.blocks[0]) // (job.pages - job.first_page)
                there = max(0, loading.pages - job.first_page) * per_page
                skipped = job.skip_tokens // self._groups[0].block_tokens
                bad = set(job.blocks[0][max(there, skipped) :])
                self._bad_blocks |= bad
                if job.now:
                    self._report.lost |= bad
            else:
                self._failed.add(job.request)
        if not job.now:
            self._ended.add(job.request)

    def save(self, step: Step) -> None:
        """Store what the forward pass of a step has completed."""
        for job in step.saves:
            self._report.saved[job.number] += 1
            if self._spoilt:
                self._report.unsaved.add(job.number)
            elif self._writes:
                try:
                    self._save(job)
                except LMCacheError as error:
                    self._warn("save", f"KV of a request could not be stored: {error}")

    def _save(self, job: Save) -> None:
        client = self._find_client()
        storing = None if client is None else client.join_store(job.number)
        if client is None or storing is None:
            return
        try:
            view = self.view(job.first_page, job.blocks)
            for room in storing.rooms:
                part = room.part
                if view.has(part.group, part.first, part.pages):
                    view.gather(part.group, part.first, part.pages, room.target)
                    client.filled(room)
        finally:
            client.finish_store(storing)

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
        report, self._report = self._report, Report()
        if not self._told and self._facts is not None:
            report.facts = self._facts
        return report or None

    @property
    def page_bytes(self) -> int:
        """Of all groups, on this rank."""
        return sum(kv.page_layer_bytes * len(g.layers) for kv, g in zip(self._registered, self._groups, strict=True))

    def refuse(self, why: str) -> None:
        """Tell the scheduler's side that KV of this engine cannot be cached."""
        self._report.refused = why

    def give_up(self, step: Step) -> None:
        """Something went wrong with a step: all loads have failed, its stores come to nothing."""
        self._spoilt = True
        for job in step.loads:
            if job.request not in self._loads and job.request not in self._report.loaded:
                self._loads[job.request] = _Loading(self, job)
        for loading in list(self._loads.values()):
            loading.fail()
            self._finish(loading)

    def view(self, first_page: int, blocks: Blocks, skip_tokens: int = 0) -> _RequestView:
        """The KV of a request behind its first pages."""
        page_blocks = [self._page_tokens // group.block_tokens for group in self._groups]
        tables = [np.array(ids, np.intp) for ids in blocks]
        views = [
            kv.view(_kernel(table, group))
            for kv, table, group in zip(self._registered, tables, self._groups, strict=True)
        ]
        null = [table == NULL_BLOCK for table in tables]
        kept = [
            self._keep(number, table[: skip_tokens // group.block_tokens])
            for number, (table, group) in enumerate(zip(tables, self._groups, strict=True))
        ]
        return _RequestView(first_page, views, page_blocks, null, self._nowhere, kept if skip_tokens else ())

    def _keep(self, group: int, blocks: NDArray[np.intp]) -> _Kept:
        kv, geometry = self._blocks[group], self._groups[group]
        nbytes = len(blocks) * kv.page_layer_bytes * len(geometry.layers)
        return _Kept(kv.view(_kernel(blocks, geometry)), len(blocks), nbytes)

    def close(self) -> None:
        """Give up what is under way."""
        for loading in list(self._loads.values()):
            loading.fail()
        self._loads.clear()


class _Kept(NamedTuple):
    """Blocks that must stay as they are, each a page of `view`."""

    view: KVView
    blocks: int
    nbytes: int


class _RequestView:
    """Satisfies `KVView` for the pages of a request from `first_page` on."""

    def __init__(
        self,
        first_page: int,
        views: Sequence[KVView],
        page_blocks: Sequence[int],
        null: Sequence[NDArray[np.bool_]],
        nowhere: Sequence[_Kept],
        kept: Sequence[_Kept] = (),
    ) -> None:
        self._first = first_page
        self._views = views
        self._page_blocks = page_blocks
        self._null = null
        self._nowhere = nowhere
        self._kept = kept

    def has(self, group: int, first_page: int, pages: int) -> bool:
        """Whether all of these pages lie in blocks of the request."""
        null = self._nulls(group, first_page, pages)
        return null is not None and not null.any()

    def _nulls(self, group: int, first_page: int, pages: int) -> NDArray[np.bool_] | None:
        """For each page and block, whether it is none of the request's; None if the pages are not in the view."""
        count = self._page_blocks[group]
        null = self._null[group][(first_page - self._first) * count : (first_page - self._first + pages) * count]
        return null.reshape(pages, count) if len(null) == pages * count and first_page >= self._first else None

    def gather(self, group: int, first_page: int, pages: int, into: memoryview) -> None:
        self._views[group].gather(0, first_page - self._first, pages, into)

    def scatter(self, group: int, first_page: int, pages: int, source: memoryview) -> None:
        """As in `KVView`. Pages that a window has left behind have no blocks, and are passed over."""
        null = self._nulls(group, first_page, pages)
        if null is None:
            raise LayoutError(f"pages {first_page} to {first_page + pages} of group {group} are not in the view")
        first = first_page - self._first
        view = self._views[group]
        if not null.any() and (first or not self._kept):
            view.scatter(0, first, pages, source)
            return
        page_bytes = len(source) // pages
        for page in np.flatnonzero(~null.all(axis=1)).tolist():
            part = source[page * page_bytes : (page + 1) * page_bytes]
            kept = self._kept[group] if self._kept and not first + page else None
            if kept is None and null[page].any():
                kept = self._nowhere[group]
            if kept is None:
                view.scatter(0, first + page, 1, part)
                continue
            # Blocks that are in use as they are, or nobody's, get their own bytes back.
            mine = memoryview(bytearray(kept.nbytes))
            kept.view.gather(0, 0, kept.blocks, mine)
            view.scatter(0, first + page, 1, part)
            kept.view.scatter(0, 0, kept.blocks, mine)


def _kernel(table: Any, group: Geometry) -> Any:
    """Numbers of the tensors' blocks, for those of the engine's block table."""
    count = group.kernel_blocks
    return table if count == 1 else np.add.outer(table * count, np.arange(count)).ravel()


class _Loading:
    """A load under way: goes on when it is run, as long as it may."""

    def __init__(self, worker: WorkerSide, job: Load) -> None:
        self.job = job
        self.pages = 0
        """What is there, in pages from the prompt's start."""
        self.done = False
        self.alone = True
        """The engine has computed nothing meanwhile."""
        self._tiers: dict[str, int] = {}
        self._ended_at = 0.0
        self._worker = worker
        self._client: Client | None = None
        self._held: Held | None = None
        self._operation: operations.Operation[operations.Loaded] | None = None
        self._step: operations.Step | None = None
        self._started_at = worker._clock()
        self._until = self._started_at + job.seconds

    @property
    def failed(self) -> bool:
        return self.done and self.pages < self.job.pages

    def run(self, until: float | None) -> bool:
        """Copy until a time, or to the end if there is none. Returns whether it has ended."""
        worker = self._worker
        try:
            if self._operation is None:
                self._begin()
            while not self.done:
                if isinstance(self._step, operations.Copy):
                    self._step.move()
                    self._send(False)
                elif self._step is not None and self._step.future.done():
                    self._send(bool(self._step.future.result()))
                elif worker._clock() >= self._until:
                    worker._warn("slow", "a load took longer than it may; what was missing is computed")
                    self._send(False)  # what has come is there
                elif until is None:
                    self.wait(self._until - worker._clock())
                    continue
                else:
                    break
                if until is not None and worker._clock() >= until:
                    break
        except LMCacheError as error:
            worker._warn("load", f"KV of a request could not be loaded: {error}")
            self.fail()
        return self.done

    def wait(self, seconds: float) -> None:
        """Wait for the tier whose turn it is."""
        if isinstance(self._step, operations.Wait):
            try:
                self._step.future.result(max(0.0, seconds))
            except Exception:  # noqa: BLE001  whatever it is, whoever looks at it next finds out
                return

    def fail(self) -> None:
        """Give it up."""
        if self._operation is not None:
            self._operation.close()
        self._end()

    def _begin(self) -> None:
        job = self.job
        self._client = client = self._worker._find_client()
        self._held = held = None if client is None or not job.number else client.join_hold(job.number)
        if client is None or held is None or held.pages != job.pages:
            self._end()
            return
        view = self._worker.view(job.first_page, job.blocks, job.skip_tokens)
        self._operation = operations.load(client, held, view, job.first_page)
        self._next(lambda operation: next(operation))

    def _send(self, answer: bool) -> None:
        self._next(lambda operation: operation.send(answer))

    def _next(self, go: Callable[[operations.Operation[operations.Loaded]], operations.Step]) -> None:
        assert self._operation is not None
        try:
            self._step = go(self._operation)
        except StopIteration as end:
            loaded: operations.Loaded = end.value
            self.pages = loaded.pages
            self._tiers = loaded.tiers
            if self._client is not None and self._client.shard == 0:
                operations.count_loaded(self._client, loaded, self._worker._page_tokens)
            self._end()

    def timing(self) -> Timing | None:
        """How it went, told by the first rank."""
        if self._client is None or self._client.shard:
            return None
        job = self.job
        seconds = self._ended_at - self._started_at
        missing = max(0, job.pages - max(self.pages, job.first_page))
        return Timing(
            job.request,
            job.first_page,
            tuple(self._tiers.items()),
            self._worker.page_bytes,
            seconds,
            self.alone,
            missing,
        )

    def _end(self) -> None:
        self.done = True
        self._ended_at = self._worker._clock()
        self._step = None
        client, held = self._client, self._held
        self._held = None
        if client is not None and held is not None:
            client.release(held)


def _one_encoding(encodings: Sequence[Encoding], groups: Sequence[Geometry]) -> Encoding:
    """How the bytes of all groups lie: as of one, where they lie alike."""
    first = encodings[0]
    if all(each == first for each in encodings):
        return first
    if any(each.layout != "native" for each in encodings):
        raise LayoutError("the cache groups of this engine lie in different ways, and not in its own")
    return Encoding(
        layout="native",
        engine=first.engine,
        backend=first.backend,
        block_tokens=math.lcm(*(each.block_tokens for each in encodings)),
        strides=tuple(stride for each in encodings for stride in (each.block_tokens, *each.strides)),
        isa=first.isa,
    )

"""Carries the index's decisions out against one backend: deadlines, concurrency, and order per key.

Everything here runs on the node's event loop. What a read or write uses (a slot) stays in use until the backend's
coroutine has really ended, however late: that is the quarantine. At a deadline only the waiting ends.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any

from lmcache_core import frame
from lmcache_core.coding.coder import TierCoder
from lmcache_core.coding.recipe import Recipe
from lmcache_core.config import TierConfig
from lmcache_core.directreads import DirectReads
from lmcache_core.errors import BackendError, ConfigError
from lmcache_core.events import TierEvents
from lmcache_core.framing import Framer
from lmcache_core.health import TierHealth
from lmcache_core.hedging import Hedging
from lmcache_core.index.decisions import Delete, Describe, Load, Touch, Write
from lmcache_core.protocols import (
    Chunk,
    ChunkKey,
    Describes,
    DeviceDirect,
    ReadResult,
    ReadsBeside,
    RemembersUse,
    Scannable,
    StorageBackend,
    WriteResult,
)
from lmcache_core.ratelog import RateLog

BATCH_BYTES = 4 << 20

_NO_HEADER = bytes(frame.ALIGN)

Mutation = Write | Delete | Touch | Describe


class TierRunner:
    """One tier at work."""

    def __init__(
        self,
        number: int,
        config: TierConfig,
        backend: StorageBackend,
        recipe: Recipe,
        framer: Framer,
        events: TierEvents,
        faults: RateLog,
    ) -> None:
        self.number = number
        self.config = config
        self.backend = backend
        self._remote = not isinstance(backend, Scannable)
        """Something on the way may damage all that it gives; a drive's damage is that of one chunk."""
        self.health = TierHealth(number, config, backend, events, faults, self._busy_at_all, self._stop_queues)
        self.direct: DirectReads | None = None
        """Reads into a device's memory, if it has such: its chunks must be stored as they are."""
        if recipe.plain and isinstance(backend, DeviceDirect):
            self.direct = DirectReads(number, config, backend, self.health, events, lambda: self._pump())
        self.read_beside = self.direct is not None and isinstance(backend, ReadsBeside)
        """Other processes can read its chunks to their devices."""
        self.coder = TierCoder(config.name, recipe, framer, partial(events.counted, number), faults)
        self._events = events
        self._log = faults
        self._reads: deque[Load] = deque()
        self._timers: dict[Load, asyncio.TimerHandle] = {}
        """Deadlines of the reads that somebody may still be waiting for."""
        self._overdue: set[Load] = set()
        self._mutations: deque[Mutation] = deque()
        self._busy: dict[ChunkKey, asyncio.Future[None]] = {}
        self._undeleted: dict[ChunkKey, None] = {}
        self._hedging = Hedging(config, events, number, lambda: self._reads)
        self._reading = 0
        self._mutating = 0
        self._late = 0
        """How many of `_mutating` are past their deadline."""
        self._tasks: dict[asyncio.Task[None], None] = {}
        """In order, so that a run can be repeated exactly."""
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def up(self) -> bool:
        """Whether the tier can be used."""
        return self.health.up

    @property
    def queued(self) -> int:
        """Operations that wait or are under way."""
        return len(self._reads) + len(self._mutations) + self._reading + self._mutating

    def _busy_at_all(self) -> bool:
        return bool(self._reading or self._mutating) or (self.direct is not None and self.direct.busy)

    async def close(self, grace: float) -> None:
        """Finish what is queued within `grace` seconds and close the backend."""
        try:
            async with asyncio.timeout(grace):
                await self._idle.wait()
        except TimeoutError:
            self._log.warning("close", "tier %s: not everything was written in time", self.config.name)
        self.health.stop()
        for task in list(self._tasks):
            task.cancel()
        if self.direct is not None:
            self.direct.cancel()
        await self.health.close(grace)

    @property
    def idle(self) -> bool:
        """Whether nothing is queued or under way but what is past its deadline."""
        return self._idle.is_set()

    async def drained(self) -> None:
        """Wait until it is idle."""
        await self._idle.wait()

    # Queues

    def read(self, load: Load) -> None:
        """Queue a read; its deadline runs from now."""
        if not self.up:
            self._events.dropped(load)
            return
        self._timers[load] = asyncio.get_running_loop().call_later(self.config.read_timeout, self._late_read, load)
        self._reads.append(load)
        self._pump()
        if self._hedging.stuck and load in self._reads:
            self._events.overdue(load)

    def mutate(self, mutation: Mutation) -> None:
        """Queue a write or anything else that changes the tier; its deadline runs from when its turn comes."""
        if not self.up:
            self._refuse(mutation)
            return
        self._mutations.append(mutation)
        self._pump()

    def _pump(self) -> None:
        while self._reads and self._reading < self.config.concurrency:
            loads = _take(self._reads, lambda load: load.entry.nbytes)
            self._reading += 1
            self._spawn(self._read(loads), partial(self._leave_reads, loads))
        while self._mutations and self._mutating < self.config.concurrency:
            batch: list[Mutation] = [self._mutations.popleft()]
            if isinstance(batch[0], Write):
                size = batch[0].entry.nbytes
                while self._mutations and isinstance(more := self._mutations[0], Write):
                    size += more.entry.nbytes
                    if size > BATCH_BYTES:
                        break
                    batch.append(more)
                    self._mutations.popleft()
            self._mutating += 1
            self._spawn(self._mutate(batch), partial(self._leave_mutations, batch))
        awaited = self.direct is not None and self.direct.awaited
        if self._timers or self._mutations or self._mutating > self._late or awaited:
            self._idle.clear()
        else:
            self._idle.set()

    def _spawn(self, work: Coroutine[Any, Any, None], leave: Callable[[], None]) -> None:
        """Begin work. If it is cancelled before it has begun, which it cannot notice itself, `leave` is called."""
        begun = False

        async def run() -> None:
            nonlocal begun
            begun = True
            await work

        def ended(task: asyncio.Task[None]) -> None:
            del self._tasks[task]
            if not begun:
                work.close()
                leave()

        task = asyncio.get_running_loop().create_task(run())
        self._tasks[task] = None
        task.add_done_callback(ended)

    def _leave_reads(self, loads: Sequence[Load]) -> None:
        for load in loads:
            self._untimed(load)
            self._events.dropped(load)
        self._reading -= 1
        self._pump()

    def _leave_mutations(self, batch: Sequence[Mutation]) -> None:
        for mutation in batch:
            self._refuse(mutation)
        self._mutating -= 1
        self._pump()

    def _refuse(self, mutation: Mutation) -> None:
        if isinstance(mutation, Write):
            self._events.wrote(mutation, None, 0.0)
        elif isinstance(mutation, Delete) and self.health.listing:  # of what has just been found
            self._undeleted.update(dict.fromkeys(mutation.keys))

    def _stop_queues(self) -> None:
        self._undeleted.clear()
        reads, self._reads = self._reads, deque()
        mutations, self._mutations = self._mutations, deque()
        for load in reads:
            self._untimed(load)
            self._events.dropped(load)
        for mutation in mutations:
            self._refuse(mutation)
        self._pump()

    # Reads

    async def _read(self, loads: list[Load]) -> None:
        loop = asyncio.get_running_loop()
        wanted = [load for load in loads if load.wanted]
        left = set(loads)
        try:
            if wanted:
                started = loop.time()
                with self._hedging.watch(wanted):
                    results = await self._results(wanted)
                seconds = (loop.time() - started) / len(wanted)
                for load, result in zip(wanted, results, strict=True):
                    left.discard(load)
                    self._untimed(load)
                    self._events.loaded(load, result, seconds)
        finally:
            self._leave_reads([load for load in loads if load in left])  # not wanted any more, or it is being closed

    async def _results(self, loads: list[Load]) -> list[ReadResult | None]:
        entries = [load.entry for load in loads]
        for load in loads:
            load.slot.frame[: frame.ALIGN] = _NO_HEADER  # what an earlier chunk left must not pass for this one
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            results = await self.health.calls.call(
                self.coder.read(
                    self.backend, [entry.chunk_key for entry in entries], [load.slot.frame for load in loads]
                ),
                self.config.read_timeout,
            )
        except (BackendError, ConfigError, TimeoutError) as error:
            self.health.failed(error, "failed to read")
            return [None] * len(loads)
        if not isinstance(results, (list, tuple)) or len(results) != len(loads):
            self.health.failed(BackendError(f"{results!r:.80} for {len(loads)} keys"), "failed to read")
            return [None] * len(loads)
        seconds = loop.time() - started
        checked = [await self.coder.check(load, result) for load, result in zip(loads, results, strict=True)]
        if all(result is ReadResult.HIT for result in checked):
            self._events.measured(self.number, sum(entry.nbytes for entry in entries), seconds)
        if self._remote and all(result is ReadResult.CORRUPT for result in checked):
            self.health.failed(BackendError("what it gave is not what was stored"), "gives wrong bytes")
        elif not any(load.late for load in loads):
            self.health.succeeded()
        return checked

    def _late_read(self, load: Load) -> None:
        del self._timers[load]
        self._events.gave_up(load)
        if load not in self._reads:
            self._overdue.add(load)
            self.health.quarantine(load.entry.nbytes)
            self.health.timed_out(f"did not answer within {self.config.read_timeout:g} s", self.config.read_timeout)
        self._pump()

    def _untimed(self, load: Load) -> None:
        timer = self._timers.pop(load, None)
        if timer is not None:
            timer.cancel()
        if load in self._overdue:
            self._overdue.discard(load)
            self.health.release(load.entry.nbytes)

    async def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """What the backend says that it holds.

        Raises:
            BackendError: It cannot tell.
            TimeoutError: Not in time.
        """
        held = await self.health.calls.bounded(self.backend.contains(keys), self.config.read_timeout)
        if not isinstance(held, (list, tuple)) or len(held) != len(keys):
            raise BackendError(f"{held!r:.80} for {len(keys)} keys")
        return [there and not self.coder.is_anothers(key) for key, there in zip(keys, held, strict=True)]

    # Mutations

    async def _mutate(self, batch: list[Mutation]) -> None:
        loop = asyncio.get_running_loop()
        keys = {key for mutation in batch for key in _keys(mutation)}
        done = loop.create_future()
        late = _Late()
        timer = loop.call_later(self.config.write_timeout, self._late_mutation, batch, late)
        try:
            before = {self._busy[key] for key in keys if key in self._busy}
            self._busy.update(dict.fromkeys(keys, done))  # at once: what comes later for any of them comes after
            if before:
                await self._wait(before, batch)
            writes = [mutation for mutation in batch if isinstance(mutation, Write)]
            if writes:
                await self._write(writes, late)
            else:
                await self._change(batch[0], late)
        finally:
            timer.cancel()
            for key in keys:
                if self._busy.get(key) is done:
                    del self._busy[key]
            done.set_result(None)
            self._mutating -= 1
            if late.late:
                self._late -= 1
                self.health.release(late.quarantined)
            self._pump()

    def _late_mutation(self, batch: list[Mutation], late: _Late) -> None:
        late.late = True
        self._late += 1
        for mutation in batch:
            if isinstance(mutation, Write):
                late.quarantined += mutation.entry.nbytes
                self._events.late_write(mutation)
        self.health.quarantine(late.quarantined)
        self.health.failed(TimeoutError(), f"did not take a change within {self.config.write_timeout:g} s")
        if self._late >= self.config.concurrency:
            self.health.trip()  # nothing can move any more
        self._pump()

    async def _wait(self, before: Collection[asyncio.Future[None]], batch: list[Mutation]) -> None:
        try:
            await asyncio.wait(before)
        except asyncio.CancelledError:  # the tier is being closed
            for mutation in batch:
                self._refuse(mutation)
            raise

    async def _write(self, writes: list[Write], late: _Late) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        results: Sequence[WriteResult | None] = [None] * len(writes)
        evict = [key for write in writes for key in write.evict]
        try:
            if late.late:
                return  # nobody waits for it any more, and what it waited for may hang again
            async with self.coder.values(writes) as values:
                if late.late:
                    return  # it waited for memory that others have not given back
                if evict:
                    await self.health.calls.call(self.backend.delete(evict), self.config.write_timeout)
                    evict = []
                chunks = [
                    Chunk(write.entry.chunk_key, value, write.entry.pages, write.entry.parent)
                    for write, value in zip(writes, values, strict=True)
                ]
                told = await self.health.calls.call(self.backend.write(chunks), self.config.write_timeout)
            if not isinstance(told, (list, tuple)) or len(told) != len(writes):
                raise BackendError(f"{told!r:.80} for {len(writes)} chunks")
            results = [result if isinstance(result, WriteResult) else None for result in told]
            if not late.late:
                self.health.succeeded()
            for write, result in zip(writes, results, strict=True):
                if result is WriteResult.STORED:
                    self._undeleted.pop(write.entry.chunk_key, None)
            self._retry_deletes()
        except (BackendError, ConfigError, TimeoutError) as error:
            if not late.late:
                self.health.failed(error, "failed to write")
        finally:
            self._put_off(evict)
            for write, result in zip(writes, results, strict=True):
                self._events.wrote(write, result, (loop.time() - started) / len(writes))

    def _put_off(self, deletes: Sequence[ChunkKey]) -> None:
        """Deletes that have not worked are made up for: nobody else knows of these any more."""
        if self.up:  # else it is scanned anew, and what is there is there
            self._undeleted.update(dict.fromkeys(deletes))

    async def _change(self, mutation: Mutation, late: _Late) -> None:
        try:
            work = self._verb(mutation)
            if work is not None:
                await self.health.calls.call(work, self.config.write_timeout)
        except (BackendError, ConfigError, TimeoutError) as error:
            if isinstance(mutation, Delete):
                self._put_off(mutation.keys)
            if not late.late:
                self.health.failed(error, "failed")

    def _verb(self, mutation: Mutation) -> Coroutine[Any, Any, None] | None:
        if isinstance(mutation, Delete):
            return self.backend.delete(mutation.keys)
        if isinstance(mutation, Touch) and isinstance(self.backend, RemembersUse):
            return self.backend.touch(mutation.keys)
        if isinstance(mutation, Describe) and isinstance(self.backend, Describes):
            geometry = mutation.space.geometry
            if geometry is not None and geometry.manifest:
                return self.backend.describe(mutation.space.digest, geometry.manifest)
        return None

    def _retry_deletes(self) -> None:
        if not (self._undeleted and self.up):
            return
        changing = {*self._busy, *(key for mutation in self._mutations for key in _keys(mutation))}
        keys = [key for key in self._undeleted if key not in changing]  # what is written anew is not deleted behind it
        if keys:
            self._undeleted = {key: None for key in self._undeleted if key in changing}
            self._mutations.append(Delete(self.number, keys))


class _Late:
    """Whether a batch of mutations is past its deadline, and how many bytes it keeps in quarantine."""

    __slots__ = ("late", "quarantined")

    def __init__(self) -> None:
        self.late = False
        self.quarantined = 0


def _take(queue: deque[Load], size: Callable[[Load], int]) -> list[Load]:
    taken = [queue.popleft()]
    total = size(taken[0])
    while queue and (total := total + size(queue[0])) <= BATCH_BYTES:
        taken.append(queue.popleft())
    return taken


def _keys(mutation: Mutation) -> Iterable[ChunkKey]:
    if isinstance(mutation, Write):
        return (mutation.entry.chunk_key, *mutation.evict)
    return mutation.keys if isinstance(mutation, Delete) else ()

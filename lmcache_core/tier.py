"""Carries the index's decisions out against one backend: deadlines, concurrency, order per key, and the breaker.

Everything here runs on the node's event loop. What a read or write uses (a slot) stays in use until the backend's
coroutine has really ended, however late: that is the quarantine. At a deadline only the waiting ends.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from lmcache_core import frame
from lmcache_core.breaker import Breaker
from lmcache_core.config import TierConfig
from lmcache_core.errors import BackendError, ConfigError
from lmcache_core.events import TierEvents
from lmcache_core.framing import Framer
from lmcache_core.index.decisions import Delete, Describe, Load, Touch, Write
from lmcache_core.protocols import (
    Abortable,
    Chunk,
    ChunkKey,
    CountsEvents,
    Describes,
    ReadResult,
    RemembersUse,
    ReportsUsage,
    Scannable,
    StorageBackend,
    Usage,
    WriteResult,
)
from lmcache_core.ratelog import RateLog

T = TypeVar("T")

BATCH_BYTES = 4 << 20
OPEN_TIMEOUT = 30.0

_NO_HEADER = bytes(frame.ALIGN)

Mutation = Write | Delete | Touch | Describe


class TierRunner:
    """One tier at work."""

    def __init__(
        self,
        number: int,
        config: TierConfig,
        backend: StorageBackend,
        framer: Framer,
        events: TierEvents,
        faults: RateLog,
    ) -> None:
        self.number = number
        self.config = config
        self.backend = backend
        self.up = False
        self.quarantined = 0
        """Bytes of slots whose I/O is past its deadline."""
        self._framer = framer
        self._events = events
        self._abortable = isinstance(backend, Abortable) and backend.abortable
        self._breaker = Breaker(config.breaker.failures, config.breaker.cooldown, config.breaker.max_cooldown)
        self._log = faults
        self._reads: deque[Load] = deque()
        self._timers: dict[Load, asyncio.TimerHandle] = {}
        self._overdue: set[Load] = set()
        self._mutations: deque[Mutation] = deque()
        self._busy: dict[ChunkKey, asyncio.Future[None]] = {}
        self._undeleted: dict[ChunkKey, None] = {}
        self._reading = 0
        self._mutating = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._closing = False

    @property
    def queued(self) -> int:
        """Operations that wait or are under way."""
        return len(self._reads) + len(self._mutations) + self._reading + self._mutating

    async def open(self) -> None:
        """Open the backend and learn what it holds. A medium that cannot be used now is tried again later.

        Raises:
            ConfigError: Its options can never work.
        """
        try:
            async with asyncio.timeout(OPEN_TIMEOUT):
                await self._open()
        except ConfigError:
            raise
        except (BackendError, TimeoutError) as error:
            self.failed(error, "cannot be opened")
            self._trip()

    async def _open(self) -> None:
        await self._call(self.backend.open(), OPEN_TIMEOUT)
        self._events.reset(self.number)
        if isinstance(self.backend, Scannable):
            await self._call(self._scan(self.backend), OPEN_TIMEOUT)
        self.up = True
        self._events.opened(self.number)

    async def _scan(self, backend: Scannable) -> None:
        async for batch in backend.scan():
            self._events.scanned(self.number, batch)

    async def close(self, grace: float) -> None:
        """Finish what is queued within `grace` seconds and close the backend."""
        try:
            async with asyncio.timeout(grace):
                await self._idle.wait()
        except TimeoutError:
            self._log.warning("close", "tier %s: not everything was written in time", self.config.name)
        self._closing = True
        self._stop_queues()
        for task in list(self._tasks):
            task.cancel()
        try:
            async with asyncio.timeout(grace):
                await self._call(self.backend.close(), grace)
        except (BackendError, ConfigError, TimeoutError) as error:
            self._log.warning("close", "tier %s: could not be closed: %s", self.config.name, error or "timed out")

    async def drained(self) -> None:
        """Wait until nothing is queued or under way."""
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

    def mutate(self, mutation: Mutation) -> None:
        """Queue a write or anything else that changes the tier."""
        if not self.up:
            self._refuse(mutation)
            return
        self._mutations.append(mutation)
        self._pump()

    def _pump(self) -> None:
        while self._reads and self._reading < self.config.concurrency:
            loads = _take(self._reads, lambda load: load.entry.nbytes)
            self._reading += 1
            self._spawn(self._read(loads))
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
            self._spawn(self._mutate(batch))
        if self.queued:
            self._idle.clear()
        else:
            self._idle.set()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _refuse(self, mutation: Mutation) -> None:
        if isinstance(mutation, Write):
            self._events.wrote(mutation, None, 0.0)

    def _stop_queues(self) -> None:
        self.up = False
        reads, self._reads = self._reads, deque()
        mutations, self._mutations = self._mutations, deque()
        for load in reads:
            self._untimed(load)
            self._events.dropped(load)
        for mutation in mutations:
            self._refuse(mutation)

    # Reads

    async def _read(self, loads: list[Load]) -> None:
        loop = asyncio.get_running_loop()
        wanted = [load for load in loads if not (load.late or load.doomed)]
        left = set(loads)
        try:
            if wanted:
                started = loop.time()
                results = await self._results(wanted)
                seconds = (loop.time() - started) / len(wanted)
                for load, result in zip(wanted, results, strict=True):
                    left.discard(load)
                    self._untimed(load)
                    self._events.loaded(load, result, seconds)
        finally:
            for load in left:  # nobody wants it any more, or the tier is being closed
                self._untimed(load)
                self._events.dropped(load)
            self._reading -= 1
            self._pump()

    async def _results(self, loads: list[Load]) -> list[ReadResult | None]:
        entries = [load.entry for load in loads]
        for load in loads:
            load.slot.frame[: frame.ALIGN] = _NO_HEADER  # what an earlier chunk left must not pass for this one
        try:
            results = await self._call(
                self.backend.read([entry.chunk_key for entry in entries], [load.slot.frame for load in loads]),
                self.config.read_timeout,
            )
        except (BackendError, TimeoutError) as error:
            self.failed(error, "failed to read")
            return [None] * len(loads)
        if not any(load.late for load in loads):
            self._breaker.succeeded()
        if not isinstance(results, (list, tuple)) or len(results) != len(loads):
            self.failed(BackendError(f"{results!r:.80} for {len(loads)} keys"), "failed to read")
            return [None] * len(loads)
        results = [result if isinstance(result, ReadResult) else None for result in results]
        checked: list[ReadResult | None] = []
        for load, result in zip(loads, results, strict=True):
            if result is ReadResult.HIT:
                damage = await self._framer.verify(load.slot, load.entry)
                if damage is not None:
                    self._log.warning("corrupt", "tier %s: chunk is a miss: %s", self.config.name, damage)
                    result = ReadResult.CORRUPT
            checked.append(result)
        return checked

    async def _call(self, work: Coroutine[Any, Any, T], limit: float) -> T:
        """Await a verb of the backend; where it can be aborted, at most `limit` seconds.

        Raises:
            BackendError: It failed, in whatever way.
            TimeoutError: It took too long.
        """
        try:
            async with asyncio.timeout(limit if self._abortable else None):
                return await work
        except (BackendError, ConfigError, TimeoutError):
            raise
        except asyncio.CancelledError as error:
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            raise BackendError(f"backend {self.config.backend} cancelled itself") from error
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            # A plugin may raise anything: that must cost no more than a failed operation, and end no event loop.
            raise BackendError(f"backend {self.config.backend} raised {type(error).__name__}: {error}") from error

    def _late_read(self, load: Load) -> None:
        del self._timers[load]
        self._events.gave_up(load)
        if load not in self._reads:
            self._overdue.add(load)
            self._quarantine(load.entry.nbytes)
            self.failed(TimeoutError(), f"did not answer within {self.config.read_timeout:g} s")

    def _untimed(self, load: Load) -> None:
        timer = self._timers.pop(load, None)
        if timer is not None:
            timer.cancel()
        if load in self._overdue:
            self._overdue.discard(load)
            self.quarantined -= load.entry.nbytes

    def _quarantine(self, nbytes: int) -> None:
        self.quarantined += nbytes
        if self.quarantined > self.config.quarantine:
            self._trip()

    async def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """What the backend says that it holds.

        Raises:
            BackendError: It cannot tell.
            TimeoutError: Not in time.
        """
        held = await self._call(self.backend.contains(keys), self.config.read_timeout)
        if not isinstance(held, (list, tuple)) or len(held) != len(keys):
            raise BackendError(f"{held!r:.80} for {len(keys)} keys")
        return held

    # Mutations

    async def _mutate(self, batch: list[Mutation]) -> None:
        keys = {key for mutation in batch for key in _keys(mutation)}
        done = asyncio.get_running_loop().create_future()
        try:
            before = {self._busy[key] for key in keys if key in self._busy}
            self._busy.update(dict.fromkeys(keys, done))  # at once: what comes later for any of them comes after
            if before:
                await self._wait(before, batch)
            writes = [mutation for mutation in batch if isinstance(mutation, Write)]
            if writes:
                await self._write(writes)
            else:
                await self._change(batch[0])
        finally:
            for key in keys:
                if self._busy.get(key) is done:
                    del self._busy[key]
            done.set_result(None)
            self._mutating -= 1
            self._pump()

    async def _wait(self, before: Collection[asyncio.Future[None]], batch: list[Mutation]) -> None:
        try:
            await asyncio.wait(before)
        except asyncio.CancelledError:  # the tier is being closed
            for mutation in batch:
                self._refuse(mutation)
            raise

    async def _write(self, writes: list[Write]) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        size = sum(write.entry.nbytes for write in writes)
        late = False

        def too_late() -> None:
            nonlocal late
            late = True
            for write in writes:
                self._events.late_write(write)
            self._quarantine(size)
            self.failed(TimeoutError(), f"did not take a chunk within {self.config.write_timeout:g} s")

        timer = loop.call_later(self.config.write_timeout, too_late)
        results: Sequence[WriteResult | None] = [None] * len(writes)
        try:
            for write in writes:
                await self._framer.seal(write.slot, write.entry)
            evict = [key for write in writes for key in write.evict]
            if evict:
                await self._call(self.backend.delete(evict), self.config.write_timeout)
            chunks = [
                Chunk(write.entry.chunk_key, write.slot.frame.toreadonly(), write.entry.pages, write.entry.parent)
                for write in writes
            ]
            told = await self._call(self.backend.write(chunks), self.config.write_timeout)
            if not isinstance(told, (list, tuple)) or len(told) != len(writes):
                raise BackendError(f"{told!r:.80} for {len(writes)} chunks")
            results = [result if isinstance(result, WriteResult) else None for result in told]
            if not late:
                self._breaker.succeeded()
            self._retry_deletes()
        except (BackendError, TimeoutError) as error:
            self.failed(error, "failed to write")
        finally:
            timer.cancel()
            if late:
                self.quarantined -= size
            for write, result in zip(writes, results, strict=True):
                self._events.wrote(write, result, (loop.time() - started) / len(writes))

    async def _change(self, mutation: Mutation) -> None:
        work = self._verb(mutation)
        try:
            if work is not None:
                await self._call(work, self.config.write_timeout)
        except (BackendError, TimeoutError) as error:
            if isinstance(mutation, Delete):
                self._undeleted.update(dict.fromkeys(mutation.keys))
            self.failed(error, "failed")

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
        if self._undeleted and self.up:
            keys, self._undeleted = list(self._undeleted), {}
            self._mutations.append(Delete(self.number, keys))

    # Health

    def failed(self, error: Exception, what: str) -> None:
        """Note a failure of the backend; enough of them in a row open the breaker."""
        self._log.warning(what, "tier %s %s: %s", self.config.name, what, error or type(error).__name__)
        if self._breaker.failed():
            self._down()

    def _trip(self) -> None:
        if self._breaker.trip():
            self._down()

    def _down(self) -> None:
        self._log.warning(
            "down", "tier %s is left alone until it can be opened again; its chunks are misses", self.config.name
        )
        self._undeleted.clear()
        self._events.lost(self.number)
        self._stop_queues()
        self._spawn(self._recover())

    async def _recover(self) -> None:
        while self._breaker.open and not self._closing:
            await asyncio.sleep(self._breaker.next_probe())
            if self.quarantined or self._reading or self._mutating:
                continue  # what hangs there must end before the backend can be closed
            try:
                async with asyncio.timeout(OPEN_TIMEOUT):
                    await self._call(self.backend.close(), OPEN_TIMEOUT)
                    await self._open()
            except (BackendError, ConfigError, TimeoutError) as error:
                self._log.warning("recover", "tier %s is still down: %s", self.config.name, error or "timed out")
            else:
                self._breaker.close()
                self._log.info("tier %s is back", self.config.name)

    def usage(self) -> Usage | None:
        """What the backend holds, if it tells."""
        if not self.up or not isinstance(self.backend, ReportsUsage):
            return None
        try:
            usage = self.backend.usage()
            if usage.capacity is not None and usage.capacity < 0:
                raise ValueError(f"a capacity of {usage.capacity}")
            return usage
        except Exception as error:  # noqa: BLE001 a plugin may raise anything: that must not stop the node's clock
            self._log.warning("usage", "tier %s cannot tell its usage: %s", self.config.name, error)
            return None

    def counters(self) -> Mapping[str, int]:
        """What the backend counts, if it does."""
        if not isinstance(self.backend, CountsEvents):
            return {}
        try:
            return self.backend.counters()
        except Exception as error:  # noqa: BLE001 a plugin may raise anything: that must not hide other figures
            self._log.warning("counters", "tier %s cannot tell its counters: %s", self.config.name, error)
            return {}


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

"""Backends that keep the contract of `lmcache_core.protocols` as badly as it allows, and break it where plugins do.

A buffer is written to up to the last moment that the contract gives: a read of a backend that cannot abort goes on
after it has been cancelled, and its coroutine ends only when that has ended.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextvars import copy_context
from typing import Any, TypeVar

from lmcache_core.errors import BackendError, ConfigError
from lmcache_core.frame import ALIGN
from lmcache_core.iothreads import ended
from lmcache_core.protocols import Chunk, ChunkKey, ReadResult, Stored, Usage, WriteResult
from lmcache_core.testing.simulation.content import payload
from lmcache_core.testing.simulation.medium import Medium
from lmcache_core.testing.simulation.trace import Trace
from lmcache_core.testing.simulation.weather import Fate, Plan, Weather

__all__ = ["LocalBackend", "RemoteBackend", "SimulatedBackend"]

T = TypeVar("T")


class _Cancelled(Exception):
    """A backend has cancelled itself."""


class SimulatedBackend:
    """The verbs that every backend has."""

    aborts = False

    def __init__(
        self, medium: Medium, weather: Weather, rng: random.Random, trace: Trace, name: str, shards: int
    ) -> None:
        self.medium = medium
        self.weather = weather
        self.hits = 0
        self.stored = 0
        self._rng = rng
        self._trace = trace
        self._name = name
        self._shards = shards
        self._opened = False
        self._writing: dict[int, tuple[Chunk, bytes]] = {}
        self._number = 0
        self._under_way: dict[asyncio.Future[Any], None] = {}

    @property
    def busy(self) -> bool:
        """Whether any call has not ended."""
        return bool(self._under_way)

    # The verbs

    async def open(self) -> None:
        """See `StorageBackend`."""
        await self._io("open", lambda plan: None)
        self._opened = True

    async def close(self) -> None:
        """See `StorageBackend`."""
        self._opened = False
        if self._under_way:
            await ended(list(self._under_way))
        await self._io("close", lambda plan: None)

    async def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """See `StorageBackend`."""
        self._check()

        def look(plan: Plan) -> list[bool]:
            if plan.fate is Fate.ANSWERS_NONSENSE:
                return [True] * (len(keys) + 1)
            if plan.fate is Fate.LOSES:
                self.medium.lose(self._rng.choice(keys))
            found = [key in self.medium.values for key in keys]
            if plan.fate is Fate.PRETENDS:
                found = [self._rng.random() < 0.5 for _ in keys]
            return found

        return await self._io("contains", look)

    async def read(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> list[ReadResult]:
        """See `StorageBackend`."""
        self._check()

        def fill(plan: Plan) -> list[ReadResult]:
            results = [self._fill(key, buffer, plan.fate) for key, buffer in zip(keys, into, strict=True)]
            return results[1:] if plan.fate is Fate.ANSWERS_NONSENSE else results

        def begin() -> None:
            for buffer in into:
                buffer[:ALIGN] = b"\xee" * ALIGN

        return await self._io("read", fill, begin)

    def _fill(self, key: ChunkKey, buffer: memoryview, fate: Fate) -> ReadResult:
        values = self.medium.values
        if fate is Fate.LOSES:
            self.medium.lose(key)
        value = values.get(key)
        if fate is Fate.SWAPS and values:
            value = self._rng.choice(list(values.values()))
        if value is None:
            return ReadResult.MISS
        data = value.data
        self.hits += 1
        if fate is Fate.TRUNCATES:
            data = data[: self._rng.randrange(1, len(data))]
            buffer[: len(data)] = data[: len(buffer)]
            return self._rng.choice((ReadResult.HIT, ReadResult.CORRUPT))
        if len(data) != len(buffer):
            return ReadResult.CORRUPT
        if fate is Fate.PRETENDS:
            return ReadResult.HIT
        buffer[:] = data
        if fate is Fate.DAMAGES:
            at = self._rng.randrange(self._rng.choice((0, ALIGN)), ALIGN + len(buffer) // 32)
            buffer[at] ^= 1 << self._rng.randrange(8)
        return ReadResult.HIT

    async def write(self, chunks: Sequence[Chunk]) -> list[WriteResult]:
        """See `StorageBackend`."""
        self._check()
        numbers = [self._begin(chunk) for chunk in chunks]

        def put(plan: Plan) -> list[WriteResult]:
            results = []
            for number in numbers:
                chunk, data = self._writing[number]
                if bytes(chunk.data) != data:
                    self._trace.fail(f"{self._name}: a slot was changed while it was being written")
                full = plan.fate is Fate.FULL or not self.medium.put(chunk, data)
                results.append(WriteResult.FULL if full else WriteResult.STORED)
            self.stored += results.count(WriteResult.STORED)
            return results[1:] if plan.fate is Fate.ANSWERS_NONSENSE else results

        try:
            return await self._io("write", put)
        finally:
            for number in numbers:
                chunk, data = self._writing.pop(number)
                if self.aborts and self._rng.random() < 0.2:
                    self.medium.put(chunk, data)  # the server has had it all, whatever became of the answer

    def _begin(self, chunk: Chunk) -> int:
        """Note a write, and check that it is of what its key must hold."""
        data = bytes(chunk.data)
        self._number += 1
        self._writing[self._number] = (chunk, data)
        wanted = payload(chunk.key.space, chunk.pages, self._shards)
        if data[ALIGN : ALIGN + len(wanted)] != wanted or any(data[ALIGN + len(wanted) :]):
            self._trace.fail(f"{self._name}: a chunk to be written is not what its key says")
        return self._number

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        """See `StorageBackend`."""
        self._check()

        def remove(plan: Plan) -> None:
            for key in keys:
                self.medium.values.pop(key, None)

        await self._io("delete", remove)

    # Faults

    def crash(self) -> None:
        """The process is killed: what was being written is there, or not, or in part."""
        for chunk, data in self._writing.values():
            what = self._rng.random()
            if what < 0.4:
                self.medium.put(chunk, data)
            elif what < 0.5 and not self.aborts:
                self.medium.put(chunk, data[: len(data) // 2] + bytes(len(data) // 2))
                self.medium.harmed.add(chunk.key)

    def _check(self) -> None:
        if not self._opened:
            raise BackendError(f"{self._name} is not open")

    async def _io(self, verb: str, effect: Callable[[Plan], T], begin: Callable[[], None] | None = None) -> T:
        """Have `effect` take place at the end of what is drawn."""
        loop = asyncio.get_running_loop()
        plan = self.weather.plan(verb)
        self._trace.add(f"{self._name} {verb} {plan.fate.value} {plan.seconds:g}")
        future: asyncio.Future[T] = loop.create_future()
        timers: list[asyncio.TimerHandle] = []

        def complete() -> None:
            if future.done():
                return
            try:
                future.set_result(self._outcome(plan, effect))
            except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 as a plugin would
                future.set_exception(_Cancelled() if isinstance(error, asyncio.CancelledError) else error)
            self._trace.add(f"{self._name} {verb} ended")

        if begin is not None and self._rng.random() < 0.5:
            timers.append(loop.call_later(plan.seconds * 0.5, begin))
        if plan.fate is Fate.HANGS:
            mine = copy_context()  # whoever changes the weather is no part of this process
            self.weather.hang(lambda: timers.append(loop.call_later(plan.seconds, complete, context=mine)))
        else:
            timers.append(loop.call_later(plan.seconds, complete))
        self._under_way[future] = None
        try:
            if not self.aborts:
                await ended([future])
                return future.result()
            return await future
        except _Cancelled:
            raise asyncio.CancelledError from None
        finally:
            del self._under_way[future]
            for timer in timers:
                timer.cancel()
            if not future.done():
                future.cancel()

    def _outcome(self, plan: Plan, effect: Callable[[Plan], T]) -> T:
        if plan.fate is Fate.FAILS:
            raise BackendError("drawn: it fails")
        if plan.fate is Fate.RAISES:
            raise self._rng.choice((OSError, ZeroDivisionError, ConfigError))("drawn: it raises")
        if plan.fate is Fate.CANCELS:
            raise asyncio.CancelledError
        result = effect(plan)
        if plan.fate is Fate.FAILS_AFTER:
            raise BackendError("drawn: it fails, and has been done")
        return result


class LocalBackend(SimulatedBackend):
    """As a disk: it can be listed, tells its size and keeps descriptions. What is under way cannot be aborted."""

    async def scan(self) -> AsyncIterator[Sequence[Stored]]:
        """See `Scannable`."""
        self._check()
        listed = await self._io("scan", lambda plan: [value.stored for value in self.medium.values.values()])
        for start in range(0, len(listed), 2):
            yield listed[start : start + 2]
            await self._io("scan", lambda plan: None)

    async def touch(self, keys: Sequence[ChunkKey]) -> None:
        """See `RemembersUse`."""
        self._check()

        def note(plan: Plan) -> None:
            for key in keys:
                self.medium.touch(key)

        await self._io("touch", note)

    def usage(self) -> Usage:
        """See `ReportsUsage`."""
        return Usage(len(self.medium.values), self.medium.used, self.medium.capacity)

    async def describe(self, space: bytes, manifest: bytes) -> None:
        """See `Describes`."""
        self._check()
        await self._io("describe", lambda plan: self.medium.manifests.__setitem__(space, manifest))

    async def manifests(self) -> dict[bytes, bytes]:
        """See `Describes`."""
        self._check()
        return await self._io("manifests", lambda plan: dict(self.medium.manifests))


class RemoteBackend(SimulatedBackend):
    """As a server: it cannot be listed, and other nodes write to it too."""

    def __init__(
        self,
        medium: Medium,
        weather: Weather,
        rng: random.Random,
        trace: Trace,
        name: str,
        shards: int,
        *,
        abortable: bool,
        costly_probes: bool,
    ) -> None:
        super().__init__(medium, weather, rng, trace, name, shards)
        self.abortable = self.aborts = abortable
        self.costly_probes = costly_probes

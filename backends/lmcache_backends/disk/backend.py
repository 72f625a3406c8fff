"""The backend: the store's blocking calls on daemon threads, one call per chunk."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from lmcache_backends.disk.options import DiskOptions
from lmcache_backends.disk.records import KEY, MOST_PAGES
from lmcache_backends.disk.replay import Entry
from lmcache_backends.disk.store import Store
from lmcache_backends.disk.tally import Tally
from lmcache_core.errors import BackendError, UsageError
from lmcache_core.iothreads import IoThreads, ended
from lmcache_core.openings import Openings
from lmcache_core.protocols import Chunk, ChunkKey, ReadResult, Stored, Usage, WriteResult

__all__ = ["DiskBackend"]

R = TypeVar("R")

_log = logging.getLogger(__name__)

PART = 8 << 20
"""Bytes that one thread reads of a value at a time."""
_BATCH = 2048
_LAST_CALLS = 2.0
"""Seconds that `close` waits for calls that are under way before it leaves them to their threads: what takes longer
hangs, and whoever closes has waited for it before. Less than the node gives a backend to close in, so that a tier in
which something hangs can be opened again."""


class DiskBackend:
    """Chunks in files of a local file system. Survives crashes of the process, and of the host with `fsync`.

    Not `Abortable`: a cancelled call ends only when its I/O has.
    """

    def __init__(self, options: DiskOptions) -> None:
        self._options = options
        self._tally = Tally()
        self._sessions = Openings("disk", lambda: _Session(options, self._tally))

    async def open(self) -> None:
        await self._sessions.open()

    async def close(self) -> None:
        await self._sessions.close()

    async def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        store = self._sessions.current.store
        return [store.contains(key) for key in keys]

    async def read(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> list[ReadResult]:
        session = self._sessions.current
        outcomes = await session.read(keys, into)
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if len(failures) == 1 and isinstance(failures[0], BackendError) and ReadResult.HIT in outcomes:
            # The drive reads, but for this place: that is damage of one value, and no reason to lose the others.
            self._tally.add("values_unreadable")
            session.warn(str(failures[0]))
            return [ReadResult.CORRUPT if isinstance(outcome, BaseException) else outcome for outcome in outcomes]
        return _results(outcomes)

    async def write(self, chunks: Sequence[Chunk]) -> list[WriteResult]:
        session = self._sessions.current
        for chunk in chunks:
            _check(chunk)
        first = session.store.epochs(len(chunks))
        return await session.each(session.store.write, [(chunk, first + i) for i, chunk in enumerate(chunks)])

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        session = self._sessions.current
        if keys:
            await session.each(session.store.delete, [(keys,)])

    async def touch(self, keys: Sequence[ChunkKey]) -> None:
        session = self._sessions.current
        if keys:
            await session.each(session.store.touch, [(keys,)])

    async def scan(self) -> AsyncIterator[Sequence[Stored]]:
        session = self._sessions.current
        (entries,) = await session.each(session.store.entries, [()])
        for start in range(0, len(entries), _BATCH):
            (batch,) = await session.each(_stored, [(entries[start : start + _BATCH],)])
            yield batch

    def usage(self) -> Usage:
        session = self._sessions.current
        session.refresh()
        return session.store.usage()

    def counters(self) -> Mapping[str, int]:
        return self._tally.counts()

    async def describe(self, space: bytes, manifest: bytes) -> None:
        session = self._sessions.current
        await session.each(session.store.describe, [(space, manifest)])

    async def manifests(self) -> dict[bytes, bytes]:
        session = self._sessions.current
        (found,) = await session.each(session.store.manifests, [()])
        return found


class _Session:
    """One opening: a store and its threads. What hangs in it holds up no later opening. It may still write when it
    goes on, so the store keeps its locks, and counts as another owner, until that has ended."""

    def __init__(self, options: DiskOptions, tally: Tally) -> None:
        self.store = Store(options, tally)
        self._threads = IoThreads("disk", options.threads)
        self._calls: set[asyncio.Future[Any]] = set()
        self._refreshing: asyncio.Future[None] | None = None
        self._counting = threading.Lock()
        self._running = 0  # calls that have not ended; counted on the threads, since the event loop may end before
        self._given_up = False

    async def open(self) -> None:
        opening = self._submit(self.store.open)
        opening.add_done_callback(_seen)
        try:
            await asyncio.shield(opening)
        except BaseException:  # a cancelled opening too must let go of its locks
            if not self._give_up():
                self._threads.post(self._end)
            raise

    async def each(self, fn: Callable[..., R], calls: Iterable[tuple[object, ...]]) -> list[R]:
        """As `outcomes`; if calls fail, the first of them does."""
        return _results(await self.outcomes(fn, calls))

    async def outcomes(self, fn: Callable[..., R], calls: Iterable[tuple[object, ...]]) -> list[R | BaseException]:
        """Call `fn` with each of the arguments, on the threads, and return when all have ended, even if cancelled: what
        they returned or raised."""
        futures = [self._submit(fn, *arguments) for arguments in list(calls)]
        await ended(futures)
        return [future.exception() or future.result() for future in futures]

    async def read(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> list[ReadResult | BaseException]:
        """The outcome of each read. Long values are read in parts, all of one before the next: the first is there
        while the drive is busy with those behind it."""
        calls: list[tuple[ChunkKey, memoryview, int, int]] = []
        counts = []
        for key, buffer in zip(keys, into, strict=True):
            starts = range(0, max(1, buffer.nbytes), PART)
            calls += [(key, buffer, start, min(start + PART, buffer.nbytes)) for start in starts]
            counts.append(len(starts))
        parts = iter(await self.outcomes(self.store.read_part, calls))
        return [_whole([next(parts) for _ in range(count)]) for count in counts]

    def warn(self, text: str) -> None:
        """Log it on a thread, since that may block."""
        self._threads.post(_log.warning, "%s", text)

    def refresh(self) -> None:
        """Learn how many share the capacity, if it is time, without waiting for it."""
        if self.store.stale() and (self._refreshing is None or self._refreshing.done()):
            self._refreshing = self._submit(self.store.refresh)

    async def close(self) -> None:
        if self._calls:
            await asyncio.wait(self._calls, timeout=_LAST_CALLS)
        if not self._give_up():
            await self._threads.finish(self._end)

    def _submit(self, fn: Callable[..., R], *arguments: object) -> asyncio.Future[R]:
        with self._counting:
            self._running += 1
        future = self._threads.submit(self._run, fn, arguments)
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        return future

    def _run(self, fn: Callable[..., R], arguments: tuple[object, ...]) -> R:
        try:
            return fn(*arguments)
        finally:
            with self._counting:
                self._running -= 1
                last = self._given_up and not self._running
            if last:
                self._end()

    def _give_up(self) -> bool:
        """Leave the end to the last call, if one is under way."""
        with self._counting:
            self._given_up = self._running > 0
            return self._given_up

    def _end(self) -> None:
        self.store.close()
        self._threads.close()


def _whole(parts: list[tuple[ReadResult, Entry | None] | BaseException]) -> ReadResult | BaseException:
    """The outcome of a read, out of those of its parts."""
    entries = []
    results = []
    for part in parts:
        if isinstance(part, BaseException):
            return part
        results.append(part[0])
        entries.append(part[1])
    for worst in (ReadResult.CORRUPT, ReadResult.MISS):
        if worst in results:
            return worst
    # Parts of two values that were written one after the other are none.
    return ReadResult.HIT if len(set(map(id, entries))) == 1 else ReadResult.MISS


def _check(chunk: Chunk) -> None:
    lengths = {len(chunk.key.space), len(chunk.key.page), *map(len, chunk.pages)}
    if lengths != {KEY} or len(chunk.parent) not in (0, KEY) or chunk.pages[-1] != chunk.key.page:
        raise UsageError(f"disk: a chunk has keys of {KEY} bytes, and its last page is its own key")
    if not 0 < len(chunk.pages) <= MOST_PAGES:
        raise UsageError(f"disk: a chunk has at most {MOST_PAGES} pages, not {len(chunk.pages)}")
    if not chunk.data.nbytes:
        raise UsageError("disk: a chunk of no bytes cannot be stored")


def _results(outcomes: list[R | BaseException]) -> list[R]:
    results = []
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
        results.append(outcome)
    return results


def _stored(entries: Sequence[Entry]) -> list[Stored]:
    return [entry.stored() for entry in entries]


def _seen(future: asyncio.Future[None]) -> None:
    """Nobody may be waiting any more for what went wrong."""
    if not future.cancelled():
        future.exception()

"""One opening of a backend: a client, and the requests under way."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Protocol, TypeVar

import xxhash

from lmcache_backends.objects.client import DIGEST, Client, Page, Part
from lmcache_backends.objects.endings import end_before_exit
from lmcache_backends.objects.faults import Fault
from lmcache_backends.objects.names import Names
from lmcache_backends.objects.options import ObjectOptions
from lmcache_backends.objects.retries import Retries
from lmcache_backends.objects.tally import Tally
from lmcache_core.errors import BackendError, ClosedError, ConfigError
from lmcache_core.iothreads import IoThreads
from lmcache_core.openings import to_the_end
from lmcache_core.protocols import Chunk, ChunkKey, Listed, ReadResult, WriteResult

__all__ = ["Service", "Session"]

T = TypeVar("T")

_log = logging.getLogger(__name__)

_THREADS = 2
_LAST_CALLS = 2.0
"""Seconds that `close` gives requests that are under way."""
_MOST_DELETED = 1000
_MOST_LISTED = 1000
"""Objects that one request can delete."""
_LARGEST_MANIFEST = 1 << 20


class Service(Protocol):
    """What differs from one kind of service to another. Made anew for each opening."""

    @property
    def bulk(self) -> bool:
        """Whether one request can delete several objects."""
        ...

    @property
    def place(self) -> str:
        """Where the objects are, for people."""
        ...

    async def connect(self, threads: IoThreads, tally: Tally) -> Client:
        """A client; nothing need have been asked yet.

        Raises:
            ConfigError: With these options it can never work.
            BackendError: It does not work now.
        """
        ...

    async def why(self, fault: Fault, threads: IoThreads) -> BackendError | ConfigError:
        """The error that says why it cannot be opened; asks the network where the fault doesn't say."""
        ...

    def told(self, fault: Fault) -> BackendError | ConfigError:
        """The error for a fault while it is open."""
        ...


class Session:
    """Requests of one opening. `ClosedError` ends those that are under way when it is closed."""

    def __init__(self, options: ObjectOptions, service: Service, tally: Tally) -> None:
        self._options = options
        self._service = service
        self._tally = tally
        self._door = options.door
        self._threads = IoThreads(options.door, _THREADS)
        self._names = Names(options.key_prefix())
        self._retries = Retries(options.retries, options.retry_budget, tally)
        self._free = asyncio.Semaphore(options.connections)
        self._tasks: set[asyncio.Task[None]] = set()
        self._client: Client | None = None
        self._ended = False
        self._conditional = options.conditional
        self._bulk = service.bulk

    # Life

    async def open(self) -> None:
        """Connect, and see whether we may read: an object that cannot be there is absent, and nothing else.

        Raises:
            ConfigError: With these options it can never work.
            BackendError: It does not work now.
        """
        try:
            self._client = client = await self._service.connect(self._threads, self._tally)
            self._ending = end_before_exit(self._abort)
            try:
                await client.probe(self._names.absent)
            except Fault as fault:
                raise await self._service.why(fault, self._threads) from None
        except BaseException:  # a cancelled opening too must leave nothing behind
            await to_the_end(self.close())
            raise

    async def close(self) -> None:
        """Give what is under way some time, end the rest and let go of all connections."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_LAST_CALLS)
        await self._abort()
        client, self._client = self._client, None
        if client is not None:
            await client.close()
        self._threads.close()

    async def _abort(self) -> None:
        """End all that is under way."""
        self._ended = True
        while self._tasks:
            await _ended(list(self._tasks))

    # Verbs

    async def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        found: dict[ChunkKey, bool] = {}

        async def look(key: ChunkKey) -> None:
            found[key] = await self._request(lambda client: client.head(self._names.chunk(key))) is not None

        await self._all(look(key) for key in dict.fromkeys(keys))
        return [found[key] for key in keys]

    async def read(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> list[ReadResult]:
        results = [ReadResult.MISS] * len(keys)

        async def one(place: int, key: ChunkKey, buffer: memoryview) -> None:
            results[place] = await self._read(self._names.chunk(key), buffer)

        await self._all(one(place, *each) for place, each in enumerate(zip(keys, into, strict=True)))
        return results

    async def _read(self, name: str, into: memoryview) -> ReadResult:
        parts = await self._parts(name, into, exact=True)
        if any(part.result is ReadResult.CORRUPT for part in parts.values()):
            self._tally.add("values_of_another_size")
            return ReadResult.CORRUPT
        return ReadResult.HIT if _whole(parts.values()) else ReadResult.MISS

    async def read_any(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> list[int | ReadResult]:
        results: list[int | ReadResult] = [ReadResult.MISS] * len(keys)

        async def one(place: int, key: ChunkKey, buffer: memoryview) -> None:
            results[place] = await self._read_any(self._names.chunk(key), buffer)

        await self._all(one(place, *each) for place, each in enumerate(zip(keys, into, strict=True)))
        return results

    async def _read_any(self, name: str, into: memoryview) -> int | ReadResult:
        # All parts are asked for at once: one round trip more to learn the size costs more than those behind its end.
        parts = await self._parts(name, into, exact=False)
        head = parts[0]
        if head.result is ReadResult.CORRUPT:
            self._tally.add("values_of_another_size")
        if head.result is not ReadResult.HIT:
            return head.result
        there = [part for first, part in parts.items() if first < head.size]
        return head.size if _whole(there) else ReadResult.MISS

    async def _parts(self, name: str, into: memoryview, *, exact: bool) -> dict[int, Part]:
        """What came of asking for each part of an object, by where it begins."""
        size, total = self._options.part, into.nbytes
        starts = range(0, total, size) if total > size else range(1)
        parts: dict[int, Part] = {}

        async def one(first: int) -> None:
            piece = into[first : first + size] if len(starts) > 1 else into
            parts[first] = await self._request(lambda client: client.get(name, piece, first, total, exact=exact))

        if len(starts) == 1:
            await one(0)
        else:
            await self._all(one(first) for first in starts)
        return parts

    async def write(self, chunks: Sequence[Chunk]) -> list[WriteResult]:
        results = [WriteResult.FULL] * len(chunks)

        async def one(place: int, chunk: Chunk) -> None:
            results[place] = await self._write(self._names.chunk(chunk.key), chunk.data)

        await self._all(one(place, chunk) for place, chunk in enumerate(chunks))
        return results

    async def _write(self, name: str, data: memoryview) -> WriteResult:
        digest = xxhash.xxh3_128_hexdigest(data) if self._conditional else ""
        try:
            if self._conditional:
                if await self._created(name, data, digest):
                    return WriteResult.STORED
                there = await self._request(lambda client: client.head(name))
                if there is not None and there.nbytes == data.nbytes and there.metadata.get(DIGEST) == digest:
                    self._tally.add("writes_spared")
                    return WriteResult.STORED
                self._tally.add("objects_replaced")
            await self._request(lambda client: client.put(name, data, digest, create=False))
        except Fault as fault:
            if fault.full:
                return WriteResult.FULL
            raise
        return WriteResult.STORED

    async def _created(self, name: str, data: memoryview, digest: str) -> bool:
        """Write an object where there is none. Whether that is done."""
        try:
            return await self._request(lambda client: client.put(name, data, digest, create=True))
        except Fault as fault:
            if not fault.unknown_verb:
                raise
            self._conditional = False
            self._threads.post(
                _log.warning,
                "%s: %s: takes no conditions, is written to without",
                self._door,
                self._service.place,
            )
            return False

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        names = list(dict.fromkeys(map(self._names.chunk, keys)))
        batches = [names[first : first + _MOST_DELETED] for first in range(0, len(names), _MOST_DELETED)]
        await self._all(self._delete(batch) for batch in batches)

    async def _delete(self, names: list[str]) -> None:
        if self._bulk and len(names) > 1:
            try:
                await self._request(lambda client: client.delete(names))
                return
            except Fault as fault:
                if not fault.unknown_verb:
                    raise
                self._bulk = False

        async def one(name: str) -> None:
            await self._request(lambda client: client.delete_one(name))

        await self._all(one(name) for name in names)

    async def describe(self, space: bytes, manifest: bytes) -> None:
        name, data = self._names.manifest(space), memoryview(manifest)

        async def one() -> None:
            await self._request(lambda client: client.put(name, data, "", create=False))

        await self._all([one()])

    async def manifests(self) -> dict[bytes, bytes]:
        found: dict[bytes, bytes] = {}

        async def one(space: bytes, name: str) -> None:
            manifest = await self._request(lambda client: client.fetch(name, _LARGEST_MANIFEST))
            if manifest is not None:
                found[space] = manifest

        async def each() -> None:
            page = await self._request(lambda client: client.page(self._names.manifests))
            spaces = {name: self._names.space_of(name) for name, _ in page.objects}
            await self._all(one(space, name) for name, space in spaces.items() if space is not None)

        await self._all([each()])
        return found

    async def listed(self, more: str) -> tuple[list[Listed], str]:
        """Some of the chunks that are there, and behind what to go on; empty at the end."""
        page = Page([], "")

        async def one() -> None:
            nonlocal page
            page = await self._request(lambda client: client.page(self._names.prefix, more, _MOST_LISTED))

        await self._all([one()])
        keys = [(self._names.key_of(name), nbytes) for name, nbytes in page.objects]
        return [Listed(key, nbytes) for key, nbytes in keys if key is not None and nbytes], page.more

    # Requests

    async def _request(self, request: Callable[[Client], Awaitable[T]]) -> T:
        """What the client makes of a request, as soon as there is a connection for it."""

        async def once() -> T:
            async with self._free:
                if self._client is None or self._ended:
                    raise ClosedError(f"{self._door}: the backend has been closed")
                return await request(self._client)

        return await self._retries.run(once)

    async def run(self, verb: Coroutine[object, object, T]) -> T:
        """What a verb returns.

        Raises:
            BackendError: A request of it failed.
        """
        try:
            return await verb
        except Fault as fault:
            raise self._service.told(fault) from None

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # or asyncio reports it, in a log, if whoever waited for it has just been cancelled

    async def _all(self, works: Iterable[Coroutine[object, object, None]]) -> None:
        """Do all of it at once, and end when all of it has: at the first that fails, or when cancelled, the rest is
        cancelled, so that nothing of it touches a buffer any more."""
        tasks = [asyncio.ensure_future(work) for work in works]
        if not tasks:
            return
        self._tasks.update(tasks)
        for task in tasks:
            task.add_done_callback(self._forget)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            await _ended([task for task in tasks if not task.done()])
        failed: BaseException | None = None
        for task in tasks:
            if task.cancelled():
                failed = failed or ClosedError(f"{self._door}: the backend has been closed")
            elif (error := task.exception()) is not None and not isinstance(failed, Fault):
                failed = error
        if failed is not None:
            raise failed


def _whole(parts: Iterable[Part]) -> bool:
    """Whether parts are of one value: those of two that were written one after the other are none."""
    parts = list(parts)
    return all(part.result is ReadResult.HIT for part in parts) and len({part.etag for part in parts}) == 1


async def _ended(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel tasks and wait until they have ended, even when cancelled meanwhile."""
    for task in tasks:
        task.cancel()
    waiting, cancelled = set(tasks), None
    while waiting:
        try:
            _, waiting = await asyncio.wait(waiting)
        except asyncio.CancelledError as error:
            cancelled = error
            waiting = {task for task in waiting if not task.done()}
    if cancelled is not None:
        raise cancelled

"""The backend: verbs of the contract on the session that is open."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from lmcache_backends.objects.options import ObjectOptions
from lmcache_backends.objects.session import Service, Session
from lmcache_backends.objects.tally import Tally
from lmcache_core.openings import Openings
from lmcache_core.protocols import Chunk, ChunkKey, Listed, ReadResult, WriteResult

__all__ = ["ObjectBackend"]


class ObjectBackend:
    """Chunks as objects of a bucket, shared by all who name the same bucket and prefix. Survives everything that the
    bucket survives; what leaves it, and when, is its lifecycle's to say.

    Args:
        options: Those that all services have.
        service: Makes the service to talk to, once for each opening.
    """

    abortable = True
    costly_probes = True

    def __init__(self, options: ObjectOptions, service: Callable[[], Service]) -> None:
        self._tally = Tally()
        self._sessions = Openings(options.door, lambda: Session(options, service(), self._tally))

    async def open(self) -> None:
        await self._sessions.open()

    async def close(self) -> None:
        await self._sessions.close()

    async def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        session = self._sessions.current
        return await session.run(session.contains(keys))

    async def read(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> list[ReadResult]:
        session = self._sessions.current
        return await session.run(session.read(keys, into))

    async def read_any(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> list[int | ReadResult]:
        """Makes this a `ReadsShorter`."""
        session = self._sessions.current
        return await session.run(session.read_any(keys, into))

    async def write(self, chunks: Sequence[Chunk]) -> list[WriteResult]:
        session = self._sessions.current
        return await session.run(session.write(chunks))

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        session = self._sessions.current
        await session.run(session.delete(keys))

    async def listing(self) -> AsyncIterator[Sequence[Listed]]:
        """Makes this a `Lists`. A thousand chunks cost a request."""
        session, more, ended = self._sessions.current, "", False
        while not ended:
            batch, more = await session.run(session.listed(more))
            yield batch
            ended = not more

    async def describe(self, space: bytes, manifest: bytes) -> None:
        session = self._sessions.current
        await session.run(session.describe(space, manifest))

    async def manifests(self) -> dict[bytes, bytes]:
        session = self._sessions.current
        return await session.run(session.manifests())

    def counters(self) -> Mapping[str, int]:
        return self._tally.counts()

"""The backend: verbs of the contract as blocking calls on threads, one for each chunk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lmcache_backends.mooncake.options import MooncakeOptions
from lmcache_backends.mooncake.session import Session
from lmcache_backends.mooncake.tally import Tally
from lmcache_core.openings import Openings
from lmcache_core.protocols import Chunk, ChunkKey, ReadResult, WriteResult

__all__ = ["MooncakeBackend"]


class MooncakeBackend:
    """Chunks in the memory of the hosts of a Mooncake Store, whose master evicts what was used longest ago.

    Not `Abortable`: the library's calls cannot be taken back. Its threads are nobody else's.
    """

    def __init__(self, options: MooncakeOptions) -> None:
        self._tally = Tally()
        self._sessions = Openings("mooncake", lambda: Session(options, self._tally))

    async def open(self) -> None:
        await self._sessions.open()

    async def close(self) -> None:
        await self._sessions.close()

    async def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """One question to the master for all of them."""
        session = self._sessions.current
        if not keys:
            return []
        (found,) = await session.each(session.objects.contains, [(keys,)])
        return found

    async def read(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> list[ReadResult]:
        session = self._sessions.current
        return await session.each(session.objects.read, zip(keys, into, strict=True))

    async def read_any(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> list[int | ReadResult]:
        """Makes this a `ReadsShorter`: the store knows sizes."""
        session = self._sessions.current
        return await session.each(session.objects.read_any, zip(keys, into, strict=True))

    async def write(self, chunks: Sequence[Chunk]) -> list[WriteResult]:
        session = self._sessions.current
        if len({chunk.key for chunk in chunks}) < len(chunks):  # one after the other: the last of a key is to stay
            return [result for chunk in chunks for result in await session.each(session.objects.write, [(chunk,)])]
        return await session.each(session.objects.write, [(chunk,) for chunk in chunks])

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        session = self._sessions.current
        await session.each(session.objects.delete, [(key,) for key in dict.fromkeys(keys)])

    def counters(self) -> Mapping[str, int]:
        """Makes this a `CountsEvents`."""
        return self._tally.counts()

"""The backend: verbs of the contract as blocking calls on threads, one for each chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from lmcache_backends.nixl.files import Files
from lmcache_backends.nixl.mover import Mover, library
from lmcache_backends.nixl.options import NixlOptions
from lmcache_backends.nixl.tally import Tally
from lmcache_core.errors import ClosedError
from lmcache_core.iocalls import IoCalls
from lmcache_core.openings import Openings, to_the_end
from lmcache_core.protocols import Chunk, ChunkKey, ReadResult, WriteResult

__all__ = ["NixlBackend"]

R = TypeVar("R")

_LAST_CALLS = 2.0
"""Seconds that `close` waits for calls that are under way before it leaves them to their threads."""


class Session:
    """One opening: threads, each with an agent of NIXL's."""

    def __init__(self, options: NixlOptions, tally: Tally) -> None:
        self._options = options
        self._tally = tally
        self._calls = IoCalls("nixl", options.threads)
        self._files: Files | None = None

    @property
    def files(self) -> Files:
        """The chunks there."""
        if self._files is None:
            raise ClosedError("nixl: the backend is not open")
        return self._files

    async def open(self) -> None:
        try:
            (self._files,) = await self.each(self._open, [()])
        except BaseException:  # a cancelled opening too must let go of its threads
            await to_the_end(self.close())
            raise

    def _open(self) -> Files:
        options, path = self._options, self._options.directory()
        mover = Mover(library(), options.plugin, options.parameters, path)
        files = Files(path, mover, self._tally, direct=options.direct == "auto")
        files.open()
        return files

    async def each(self, fn: Callable[..., R], calls: Iterable[tuple[object, ...]]) -> list[R]:
        """See `IoCalls`."""
        return await self._calls.each(fn, calls)

    async def close(self) -> None:
        await self._calls.close(_LAST_CALLS)


class NixlBackend:
    """Chunks as files of a directory. Not `Abortable`: a transfer cannot be taken back."""

    costly_probes = True

    def __init__(self, options: NixlOptions) -> None:
        self._tally = Tally()
        self._sessions = Openings("nixl", lambda: Session(options, self._tally))

    async def open(self) -> None:
        await self._sessions.open()

    async def close(self) -> None:
        await self._sessions.close()

    async def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        session = self._sessions.current
        (found,) = await session.each(session.files.contains, [(keys,)])
        return found

    async def read(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> list[ReadResult]:
        session = self._sessions.current
        return await session.each(session.files.read, zip(keys, into, strict=True))

    async def read_any(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> list[int | ReadResult]:
        """Makes this a `ReadsShorter`: a file knows its size."""
        session = self._sessions.current
        return await session.each(session.files.read_any, zip(keys, into, strict=True))

    async def write(self, chunks: Sequence[Chunk]) -> list[WriteResult]:
        session = self._sessions.current
        if len({chunk.key for chunk in chunks}) < len(chunks):  # one after the other: the last of a key is to stay
            return [result for chunk in chunks for result in await session.each(session.files.write, [(chunk,)])]
        return await session.each(session.files.write, [(chunk,) for chunk in chunks])

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        session = self._sessions.current
        await session.each(session.files.delete, [(keys,)])

    def counters(self) -> Mapping[str, int]:
        """Makes this a `CountsEvents`."""
        return self._tally.counts()

"""The backend: verbs of the contract as blocking calls on threads, one for each chunk."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from lmcache_backends.nfs.errors import NOT_PERMITTED, failed
from lmcache_backends.nfs.manifests import read_manifests, write_manifest
from lmcache_backends.nfs.moving import Mover, PlainMover
from lmcache_backends.nfs.options import NfsOptions, Settings
from lmcache_backends.nfs.session import Session
from lmcache_backends.nfs.tally import Tally
from lmcache_core.errors import BackendError
from lmcache_core.openings import Openings
from lmcache_core.protocols import Chunk, ChunkKey, Listed, ReadResult, WriteResult

__all__ = ["FilesBackend", "NfsBackend"]

_REMEMBERED = 1 << 16
_DIRECTORIES = 64
"""Listed at a time."""
_MOST_TOUCHES = 2048
"""Chunks touched in one call: each costs a round trip. The most recently used come first."""


class FilesBackend:
    """Chunks as files of a directory that hosts may share, each written as a whole and renamed to its place. What moves
    the bytes is given.

    Not `Abortable`: a call to a server that does not answer cannot be taken back. Its threads are nobody else's.
    """

    costly_probes = True

    def __init__(
        self, options: Settings, mover: Callable[[], Mover], tally: Tally | None = None, *, reads_only: bool = False
    ) -> None:
        """`mover` is called on a thread at each opening, and may raise what `open` may. One that `reads_only` makes
        and removes nothing."""
        self._options = options
        self._tally = tally or Tally()
        self._sessions = Openings(options.name, lambda: Session(options, self._tally, mover, reads_only=reads_only))
        self._used: OrderedDict[ChunkKey, float] = OrderedDict()
        """When this host last wrote or touched a chunk."""

    async def open(self) -> None:
        await self._sessions.open()

    async def close(self) -> None:
        await self._sessions.close()

    async def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        session = self._sessions.current
        found = await session.each(session.chunks.contains, [(part,) for part in self._shared_out(keys)])
        return [there for part in found for there in part]

    async def read(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> list[ReadResult]:
        session = self._sessions.current
        return await session.each(session.chunks.read, zip(keys, into, strict=True))

    async def read_any(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> list[int | ReadResult]:
        """Makes this a `ReadsShorter`: a file knows its size."""
        session = self._sessions.current
        return await session.each(session.chunks.read_any, zip(keys, into, strict=True))

    async def listing(self) -> AsyncIterator[Sequence[Listed]]:
        """Makes this a `Lists`: directories are read, and each chunk's size is looked up."""
        session = self._sessions.current
        (directories,) = await session.each(session.chunks.spaces, [()])
        for start in range(0, len(directories), _DIRECTORIES):
            some = [(directory,) for directory in directories[start : start + _DIRECTORIES]]
            for batch in await session.each(session.chunks.listed, some):
                yield batch

    async def write(self, chunks: Sequence[Chunk]) -> list[WriteResult]:
        session = self._sessions.current
        if len({chunk.key for chunk in chunks}) < len(chunks):  # one after the other: the last of a key is to stay
            return [result for chunk in chunks for result in await self._write(session, [chunk])]
        return await self._write(session, chunks)

    async def _write(self, session: Session, chunks: Sequence[Chunk]) -> list[WriteResult]:
        results = await session.each(session.chunks.write, [(chunk,) for chunk in chunks])
        stored = [chunk for chunk, result in zip(chunks, results, strict=True) if result is WriteResult.STORED]
        self._note_use([chunk.key for chunk in stored])
        session.wrote(sum(chunk.data.nbytes for chunk in stored))
        return results

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        session = self._sessions.current
        await session.each(session.chunks.delete, [(part,) for part in self._shared_out(keys)])
        for key in keys:
            self._used.pop(key, None)

    async def touch(self, keys: Sequence[ChunkKey]) -> None:
        """Makes this a `RemembersUse`, so that what a host finds nearer to it stays here too."""
        session = self._sessions.current
        since = time.monotonic() - self._options.touch_interval
        wanted = [key for key in keys if self._used.get(key, since) <= since][-_MOST_TOUCHES:]
        if wanted:
            await session.each(session.chunks.touch, [(wanted,)])
            self._note_use(wanted)

    async def describe(self, space: bytes, manifest: bytes) -> None:
        session = self._sessions.current
        await session.each(self._describe, [(session, space, manifest)])

    def _describe(self, session: Session, space: bytes, manifest: bytes) -> None:
        try:
            write_manifest(session.root, session.maker, space, manifest)
        except OSError as error:
            if error.errno not in NOT_PERMITTED:
                raise self._failed(error) from error
            self._tally.add("not_permitted")  # it is for people, and no reason not to read what is there

    async def manifests(self) -> dict[bytes, bytes]:
        session = self._sessions.current
        (found,) = await session.each(self._manifests, [(session,)])
        return found

    def _manifests(self, session: Session) -> dict[bytes, bytes]:
        try:
            return read_manifests(session.root)
        except OSError as error:
            raise self._failed(error, reading=True) from error

    def _failed(self, error: OSError, *, reading: bool = False) -> BackendError:
        options = self._options
        return failed(error, f"{options.directory()}/manifests", reading=reading, name=options.name)

    def counters(self) -> Mapping[str, int]:
        """Makes this a `CountsEvents`."""
        return self._tally.counts()

    def _note_use(self, keys: Sequence[ChunkKey]) -> None:
        now = time.monotonic()
        for key in keys:
            self._used[key] = now
            self._used.move_to_end(key)
        while len(self._used) > _REMEMBERED:
            self._used.popitem(last=False)

    def _shared_out(self, keys: Sequence[ChunkKey]) -> list[Sequence[ChunkKey]]:
        """Keys for each of the threads: every one costs a round trip."""
        each = -(-len(keys) // self._options.threads) or 1
        return [keys[start : start + each] for start in range(0, len(keys), each)]


class NfsBackend(FilesBackend):
    """A directory of a file system that hosts share, by plain reads and writes."""

    def __init__(self, options: NfsOptions) -> None:
        super().__init__(options, PlainMover)

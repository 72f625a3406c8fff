"""A backend with all capabilities that keeps chunks on a `Medium`, which outlives it: right in every respect, so that
`broken.py` can be wrong in one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field

from lmcache_core.errors import ClosedError
from lmcache_core.protocols import Chunk, ChunkKey, Listed, ReadResult, Stored, Usage, WriteResult


@dataclass
class Medium:
    """What stays when a backend is closed. The chunks are in order of use."""

    chunks: dict[ChunkKey, Chunk] = field(default_factory=dict)
    spaces: dict[bytes, bytes] = field(default_factory=dict)
    capacity: int | None = None

    @property
    def nbytes(self) -> int:
        return sum(chunk.data.nbytes for chunk in self.chunks.values())

    def read(self, key: ChunkKey) -> bytes | None:
        return bytes(self.chunks[key].data) if key in self.chunks else None

    def write(self, chunk: Chunk) -> None:
        self.chunks[chunk.key] = chunk

    def corrupt(self, key: ChunkKey) -> None:
        self.chunks[key] = self.chunks[key]._replace(data=self.chunks[key].data[:-1])


class ReferenceBackend:
    abortable = True
    costly_probes = False

    def __init__(self, medium: Medium) -> None:
        self.medium = medium
        self.is_open = False
        self.writes = 0

    async def open(self) -> None:
        self.is_open = True

    async def close(self) -> None:
        self.is_open = False

    def chunks(self) -> dict[ChunkKey, Chunk]:
        if not self.is_open:
            raise ClosedError("closed")
        return self.medium.chunks

    async def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return [key in self.chunks() for key in keys]

    async def read(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> list[ReadResult]:
        return [self.read_one(key, buffer) for key, buffer in zip(keys, into, strict=True)]

    def read_one(self, key: ChunkKey, buffer: memoryview) -> ReadResult:
        chunk = self.chunks().get(key)
        if chunk is None:
            return ReadResult.MISS
        if chunk.data.nbytes != buffer.nbytes:
            return ReadResult.CORRUPT
        buffer[:] = chunk.data
        return ReadResult.HIT

    async def read_any(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> list[int | ReadResult]:
        return [self.read_any_one(key, buffer) for key, buffer in zip(keys, into, strict=True)]

    def read_any_one(self, key: ChunkKey, buffer: memoryview) -> int | ReadResult:
        chunk = self.chunks().get(key)
        if chunk is None:
            return ReadResult.MISS
        if chunk.data.nbytes > buffer.nbytes:
            return ReadResult.CORRUPT
        buffer[: chunk.data.nbytes] = chunk.data
        return chunk.data.nbytes

    async def write(self, chunks: Sequence[Chunk]) -> list[WriteResult]:
        return [self.write_one(chunk) for chunk in chunks]

    def write_one(self, chunk: Chunk) -> WriteResult:
        chunks = self.chunks()
        if self.lacks_room(chunk):
            return WriteResult.FULL
        chunks.pop(chunk.key, None)
        chunks[chunk.key] = chunk._replace(data=memoryview(bytes(chunk.data)))
        self.writes += 1
        return WriteResult.STORED

    def lacks_room(self, chunk: Chunk) -> bool:
        old = self.medium.chunks.get(chunk.key)
        nbytes = self.medium.nbytes + chunk.data.nbytes - (old.data.nbytes if old else 0)
        return self.medium.capacity is not None and nbytes > self.medium.capacity

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        for key in keys:
            self.chunks().pop(key, None)

    async def scan(self) -> AsyncIterator[Sequence[Stored]]:
        listed = [Stored(c.key, c.pages, c.data.nbytes, c.parent) for c in self.chunks().values()]
        for start in range(0, len(listed), 7):
            yield listed[start : start + 7]

    async def listing(self) -> AsyncIterator[Sequence[Listed]]:
        async for batch in self.scan():
            yield [Listed(stored.key, stored.nbytes) for stored in batch]

    async def touch(self, keys: Sequence[ChunkKey]) -> None:
        chunks = self.chunks()
        for key in keys:
            if key in chunks:
                chunks[key] = chunks.pop(key)

    def usage(self) -> Usage:
        return Usage(len(self.medium.chunks), self.medium.nbytes, self.medium.capacity)

    def advice(self) -> list[str]:
        return ["reference: it forgets when the process ends; use a medium that does not"]

    def counters(self) -> Mapping[str, int]:
        return {"writes": self.writes}

    async def describe(self, space: bytes, manifest: bytes) -> None:
        self.medium.spaces[space] = manifest

    async def manifests(self) -> dict[bytes, bytes]:
        return dict(self.medium.spaces)

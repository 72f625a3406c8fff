"""A tier for tests that keeps what it holds over `close`, lists it, and knows what was done to it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from lmcache_core.errors import BackendError
from lmcache_core.protocols import Chunk, ChunkKey, ReadResult, Stored, Usage, WriteResult


class Shelf:
    """Chunks in a dictionary, least recently used first."""

    def __init__(self, capacity: int | None = None) -> None:
        self.values: dict[ChunkKey, tuple[Stored, bytes]] = {}
        self.capacity = capacity
        self.broken = False
        self.opened = 0
        self.calls: list[tuple[str, int]] = []
        self.manifest: dict[bytes, bytes] = {}

    def _call(self, verb: str, count: int = 1) -> None:
        self.calls.append((verb, count))
        if self.broken:
            raise BackendError("the shelf is broken; mend it")

    async def open(self) -> None:
        self._call("open")
        self.opened += 1

    async def close(self) -> None:
        self.calls.append(("close", 1))

    async def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        self._call("contains", len(keys))
        return [key in self.values for key in keys]

    async def read(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> list[ReadResult]:
        self._call("read", len(keys))
        results = []
        for key, buffer in zip(keys, into, strict=True):
            found = self.values.get(key)
            if found is None:
                results.append(ReadResult.MISS)
            elif len(found[1]) != len(buffer):
                results.append(ReadResult.CORRUPT)
            else:
                buffer[:] = found[1]
                results.append(ReadResult.HIT)
        return results

    async def write(self, chunks: Sequence[Chunk]) -> list[WriteResult]:
        self._call("write", len(chunks))
        results = []
        for chunk in chunks:
            used = sum(len(value) for _, value in self.values.values())
            if self.capacity is not None and used + len(chunk.data) > self.capacity:
                results.append(WriteResult.FULL)
                continue
            self.values.pop(chunk.key, None)
            stored = Stored(chunk.key, chunk.pages, len(chunk.data), chunk.parent)
            self.values[chunk.key] = (stored, bytes(chunk.data))
            results.append(WriteResult.STORED)
        return results

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        self._call("delete", len(keys))
        for key in keys:
            self.values.pop(key, None)

    async def scan(self) -> AsyncIterator[Sequence[Stored]]:
        self._call("scan")
        yield [stored for stored, _ in self.values.values()]

    async def touch(self, keys: Sequence[ChunkKey]) -> None:
        self._call("touch", len(keys))
        for key in keys:
            if key in self.values:
                self.values[key] = self.values.pop(key)

    def usage(self) -> Usage:
        return Usage(len(self.values), sum(len(value) for _, value in self.values.values()), self.capacity)

    async def describe(self, space: bytes, manifest: bytes) -> None:
        self.manifest[space] = manifest

    async def manifests(self) -> dict[bytes, bytes]:
        return dict(self.manifest)

"""The reference backend: chunks in a dict. Read this first when you write a backend of your own.

The CPU tier of a node is the node's own pool of host memory, configured by `cpu:`. This backend is not that pool; it
shows the contract of `lmcache_core.protocols` in the fewest lines, and is useful as a tier in tests.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from lmcache_core.errors import ClosedError
from lmcache_core.hookspecs import hookimpl
from lmcache_core.protocols import Chunk, ChunkKey, ReadResult, StorageBackend, Usage, WriteResult
from lmcache_core.units import ByteSize


class CpuOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What may stand beside `backend: cpu`."""

    capacity: ByteSize | None = None
    """Bytes it may hold; unbounded if not given."""


class CpuBackend:
    """Keeps chunks as bytes until it is closed. Nothing here waits, so each call is atomic on the event loop."""

    abortable = True

    def __init__(self, options: CpuOptions) -> None:
        self._capacity = options.capacity
        self._values: dict[ChunkKey, bytes] | None = None
        self._nbytes = 0

    async def open(self) -> None:
        if self._values is None:
            self._values, self._nbytes = {}, 0

    async def close(self) -> None:
        self._values, self._nbytes = None, 0

    async def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        values = self._opened()
        return [key in values for key in keys]

    async def read(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> list[ReadResult]:
        values = self._opened()
        return [_copy(values.get(key), buffer) for key, buffer in zip(keys, into, strict=True)]

    async def read_any(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> list[int | ReadResult]:
        """Makes this a `ReadsShorter`."""
        values = self._opened()
        return [_copy_any(values.get(key), buffer) for key, buffer in zip(keys, into, strict=True)]

    async def write(self, chunks: Sequence[Chunk]) -> list[WriteResult]:
        values = self._opened()
        return [self._put(values, chunk) for chunk in chunks]

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        values = self._opened()
        for key in keys:
            self._nbytes -= len(values.pop(key, b""))

    def usage(self) -> Usage:
        """Makes this a `ReportsUsage`."""
        return Usage(len(self._values or ()), self._nbytes, self._capacity)

    def _opened(self) -> dict[ChunkKey, bytes]:
        if self._values is None:
            raise ClosedError("this cpu backend is not open")
        return self._values

    def _put(self, values: dict[ChunkKey, bytes], chunk: Chunk) -> WriteResult:
        nbytes = self._nbytes + chunk.data.nbytes - len(values.get(chunk.key, b""))
        if self._capacity is not None and nbytes > self._capacity:
            return WriteResult.FULL
        values[chunk.key] = bytes(chunk.data)  # a copy: the buffer is the node's
        self._nbytes = nbytes
        return WriteResult.STORED


def _copy(value: bytes | None, buffer: memoryview) -> ReadResult:
    if value is None:
        return ReadResult.MISS
    if len(value) != buffer.nbytes:
        return ReadResult.CORRUPT
    buffer[:] = value
    return ReadResult.HIT


def _copy_any(value: bytes | None, buffer: memoryview) -> int | ReadResult:
    if value is None:
        return ReadResult.MISS
    if len(value) > buffer.nbytes:
        return ReadResult.CORRUPT
    buffer[: len(value)] = value
    return len(value)


@hookimpl
def lmcache_backend_options() -> type[CpuOptions]:
    """Called once, to check what stands in the YAML."""
    return CpuOptions


@hookimpl
def lmcache_create_backend(options: CpuOptions) -> StorageBackend:
    """Called once for each tier."""
    return CpuBackend(options)

"""What the redis tests share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from lmcache_backends.redis import RedisBackend, RedisOptions
from lmcache_core.protocols import Chunk, ChunkKey, ReadResult, WriteResult
from lmcache_core.testing import aligned_buffer, make_chunk, make_key

KIB, MIB = 2**10, 2**20


@asynccontextmanager
async def opened(url: str, prefix: str = "test", **options: Any) -> AsyncIterator[RedisBackend]:
    backend = RedisBackend(RedisOptions(url=url, prefix=prefix, **options))
    await backend.open()
    try:
        yield backend
    finally:
        await backend.close()


def chunks(count: int, nbytes: int = 16 * KIB, first: int = 0) -> list[Chunk]:
    return [make_chunk(make_key(first + number), nbytes) for number in range(count)]


async def put(backend: RedisBackend, values: list[Chunk]) -> None:
    assert await backend.write(values) == [WriteResult.STORED] * len(values)


async def get(backend: RedisBackend, values: list[Chunk]) -> list[ReadResult]:
    """Read chunks; what hits has the right bytes."""
    buffers = [aligned_buffer(each.data.nbytes) for each in values]
    results = await backend.read([each.key for each in values], buffers)
    for value, buffer, result in zip(values, buffers, results, strict=True):
        assert result is not ReadResult.HIT or buffer == value.data
    return results


def name(prefix: str, key: ChunkKey) -> str:
    return f"{prefix}:{key.space.hex()}:{key.page.hex()}"


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.005)

"""Several callers at once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable

from lmcache_core.protocols import Chunk, ReadResult, Scannable, StorageBackend
from lmcache_core.testing.case import (
    BackendCase,
    BackendFactory,
    assert_holds,
    finished,
    opened,
    read_all,
    scan_all,
    write_all,
)
from lmcache_core.testing.data import aligned_buffer, make_chunk, make_key

KIB = 2**10


class RaceTests(BackendCase):
    """A read sees one whole value, whatever else goes on."""

    async def test_racing_verbs_on_one_key_see_whole_values(self, backend: StorageBackend) -> None:
        versions = [make_chunk(make_key(1), 128 * KIB, version=v) for v in range(6)]
        await race(backend, versions, self.deadline)

    async def test_racing_values_of_different_sizes_are_not_mixed(self, backend: StorageBackend) -> None:
        versions = [make_chunk(make_key(1), (v % 3 + 1) * 40 * KIB, version=v) for v in range(6)]
        await race(backend, versions, self.deadline)

    async def test_racing_callers_of_different_keys_do_not_meet(self, backend: StorageBackend) -> None:
        chunks = [make_chunk(make_key(i), 64 * KIB) for i in range(32)]

        async def lives(chunk: Chunk) -> None:
            for _ in range(3):
                await write_all(backend, [chunk])
                await assert_holds(backend, [chunk])
                await backend.delete([chunk.key])
                assert await read_all(backend, [chunk.key], chunk.data.nbytes) == [ReadResult.MISS]
            await write_all(backend, [chunk])

        async with asyncio.timeout(self.deadline):
            await asyncio.gather(*map(lives, chunks))
            await assert_holds(backend, chunks)

    async def test_close_while_calls_are_under_way(self, backend_factory: BackendFactory) -> None:
        chunks = [make_chunk(make_key(i), 512 * KIB) for i in range(4)]
        buffers = [aligned_buffer(512 * KIB) for _ in chunks]
        backend = backend_factory()
        await backend.open()
        await write_all(backend, chunks[:2])
        calls = [
            asyncio.ensure_future(backend.read([c.key for c in chunks], buffers)),
            asyncio.ensure_future(backend.write(chunks[2:])),
        ]
        await asyncio.sleep(0)
        closing = asyncio.ensure_future(backend.close())
        await finished(closing, *calls, deadline=self.deadline)
        assert closing.exception() is None
        for buffer in buffers:
            buffer[:] = bytes(512 * KIB)
        async with opened(backend_factory()) as reopened, asyncio.timeout(self.deadline):
            values = await read_all(reopened, [c.key for c in chunks], 512 * KIB)
            for value, chunk in zip(values, chunks, strict=True):
                assert not isinstance(value, bytes) or value == chunk.data
            await write_all(reopened, chunks)
            await assert_holds(reopened, chunks)


async def race(backend: StorageBackend, versions: list[Chunk], deadline: float) -> None:
    """Write, read and delete one key from all sides; every hit must be one of the versions, whole."""
    key, rng = versions[0].key, random.Random(1)
    allowed = {bytes(chunk.data) for chunk in versions}
    sizes = sorted({len(value) for value in allowed})

    async def reader() -> None:
        for _ in range(4):
            await turns(rng.randrange(4))
            for value in await read_all(backend, [key] * len(sizes), sizes):
                assert not isinstance(value, bytes) or value in allowed, "a read mixed values"

    async def writer(chunk: Chunk) -> None:
        for _ in range(3):
            await turns(rng.randrange(6))
            await write_all(backend, [chunk])

    async def deleter() -> None:
        for _ in range(2):
            await turns(rng.randrange(9))
            await backend.delete([key])

    async with asyncio.timeout(deadline):
        for _ in range(4):
            callers = [*map(writer, versions), *(reader() for _ in versions), deleter()]
            rng.shuffle(callers)
            await asyncio.gather(*callers)
            await assert_agrees_with_itself(backend, versions, sizes)
        await write_all(backend, versions[:1])
        await assert_holds(backend, versions[:1])


async def turns(count: int) -> None:
    """Let the event loop go round."""
    for _ in range(count):
        await asyncio.sleep(0)


async def assert_agrees_with_itself(backend: StorageBackend, versions: list[Chunk], sizes: Iterable[int]) -> None:
    """With nobody else calling, `contains`, `read` and `scan` tell of the same one value or of none."""
    key = versions[0].key
    values = [await read_all(backend, [key], size) for size in sizes]
    hits = [value for (value,) in values if isinstance(value, bytes)]
    assert await backend.contains([key]) == [bool(hits)]
    assert len(hits) <= 1
    assert all(hit in [bytes(chunk.data) for chunk in versions] for hit in hits)
    if isinstance(backend, Scannable):
        assert [(s.key, s.nbytes) for s in await scan_all(backend)] == [(key, len(hit)) for hit in hits]

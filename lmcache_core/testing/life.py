"""Opening, closing, opening again, and what the medium looks like from outside."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from lmcache_core.errors import BackendError, ClosedError
from lmcache_core.protocols import ReadResult, RemembersUse, Scannable, StorageBackend
from lmcache_core.testing.case import (
    BackendCase,
    BackendFactory,
    RawCorrupt,
    RawRead,
    RawWrite,
    assert_holds,
    assert_lacks,
    assert_value,
    opened,
    read_all,
    scan_all,
    write_all,
)
from lmcache_core.testing.data import aligned_buffer, make_chunk, make_key

KIB = 2**10


class LifeTests(BackendCase):
    """The life of a backend, and of what it stores if it is persistent."""

    async def test_close_can_be_repeated(self, backend_factory: BackendFactory) -> None:
        backend = backend_factory()
        async with asyncio.timeout(self.deadline):
            await backend.close()
            await backend.open()
            await backend.close()
            await backend.close()

    async def test_an_instance_opens_again_after_close(self, backend_factory: BackendFactory) -> None:
        backend, chunk = backend_factory(), make_chunk(make_key(1))
        for _ in range(3):
            async with opened(backend):
                await write_all(backend, [chunk])
                await assert_holds(backend, [chunk])

    async def test_opening_an_open_backend_loses_nothing(self, backend: StorageBackend) -> None:
        chunk = make_chunk(make_key(1))
        await write_all(backend, [chunk])
        await backend.open()
        await assert_holds(backend, [chunk])

    async def test_verbs_after_close_say_so(self, backend_factory: BackendFactory) -> None:
        backend, chunk = backend_factory(), make_chunk(make_key(1))
        async with opened(backend):
            await write_all(backend, [chunk])
        verbs: dict[str, Callable[[], Awaitable[object]]] = {
            "contains": lambda: backend.contains([chunk.key]),
            "read": lambda: backend.read([chunk.key], [aligned_buffer(chunk.data.nbytes)]),
            "write": lambda: backend.write([chunk]),
            "delete": lambda: backend.delete([chunk.key]),
        }
        if isinstance(backend, Scannable):
            scannable = backend
            verbs["scan"] = lambda: scan_all(scannable)
        if isinstance(backend, RemembersUse):
            remembering = backend
            verbs["touch"] = lambda: remembering.touch([chunk.key])
        for name, call in verbs.items():
            try:
                async with asyncio.timeout(self.deadline):
                    await call()
            except (BackendError, ClosedError):
                continue
            pytest.fail(f"{name} after close raised neither ClosedError nor BackendError")

    async def test_reopening_keeps_what_was_stored(self, backend_factory: BackendFactory) -> None:
        chunks = [make_chunk(make_key(i), (1 + i % 5) * 20 * KIB) for i in range(30)]
        newer = [make_chunk(make_key(i), 8 * KIB, version=1) for i in range(0, 30, 3)]
        gone = [make_key(i) for i in range(1, 30, 3)]
        async with opened(backend_factory()) as backend:
            await write_all(backend, chunks)
            await write_all(backend, newer)
            await backend.delete(gone)
        if not self.persistent:
            async with opened(backend_factory()) as backend:
                values = await read_all(backend, [c.key for c in newer], 8 * KIB)
                assert all(v in (ReadResult.MISS, bytes(c.data)) for v, c in zip(values, newer, strict=True))
            return
        for _ in range(2):
            async with opened(backend_factory()) as backend:
                await assert_holds(backend, [*newer, *chunks[2::3]])
                await assert_lacks(backend, gone, 8 * KIB)

    async def test_what_is_stored_is_on_the_medium(self, backend: StorageBackend, raw_read: RawRead | None) -> None:
        if raw_read is None:
            pytest.skip("the fixture raw_read is not given")
        chunks = [make_chunk(make_key(i), 64 * KIB) for i in range(4)]
        await write_all(backend, chunks)
        for chunk in chunks:
            value = await asyncio.to_thread(raw_read, chunk.key)
            assert_value(ReadResult.MISS if value is None else value, chunk)
        await backend.delete([chunk.key for chunk in chunks[:2]])
        there = [await asyncio.to_thread(raw_read, chunk.key) is not None for chunk in chunks]
        assert there == [False, False, True, True]

    async def test_what_lies_on_the_medium_is_read(
        self, backend_factory: BackendFactory, raw_write: RawWrite | None
    ) -> None:
        if raw_write is None:
            pytest.skip("the fixture raw_write is not given")
        chunks = [make_chunk(make_key(i), 64 * KIB) for i in range(4)]
        async with opened(backend_factory()):
            pass  # makes what a medium has before its first chunk
        for chunk in chunks:
            await asyncio.to_thread(raw_write, chunk)
        async with opened(backend_factory()) as backend:
            await assert_holds(backend, chunks)

    async def test_a_damaged_value_is_no_hit(
        self, backend_factory: BackendFactory, raw_corrupt: RawCorrupt | None
    ) -> None:
        if raw_corrupt is None:
            pytest.skip("the fixture raw_corrupt is not given")
        chunks = [make_chunk(make_key(i), 64 * KIB) for i in range(4)]
        async with opened(backend_factory()) as backend:
            await write_all(backend, chunks)
        await asyncio.to_thread(raw_corrupt, chunks[1].key)
        async with opened(backend_factory()) as backend:
            (value,) = await read_all(backend, [chunks[1].key], 64 * KIB)
            assert value in (ReadResult.CORRUPT, ReadResult.MISS)
            await assert_holds(backend, [chunks[0], *chunks[2:]])
            await backend.delete([chunks[1].key])
            await assert_lacks(backend, [chunks[1].key], 64 * KIB)
            await write_all(backend, [chunks[1]])
            await assert_holds(backend, chunks)

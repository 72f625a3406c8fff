"""What a backend does when there is no room left."""

from __future__ import annotations

import pytest

from lmcache_core.protocols import Chunk, ReportsUsage, StorageBackend, WriteResult
from lmcache_core.testing.case import (
    BackendCase,
    BackendFactory,
    assert_holds,
    assert_lacks,
    assert_value,
    opened,
    read_all,
    write_all,
)
from lmcache_core.testing.data import make_chunk, make_key

KIB, MIB = 2**10, 2**20
MOST = 64 * MIB
SIZE = 64 * KIB


class RoomTests(BackendCase):
    """Skipped unless the fixture `bounded_factory` is given."""

    async def test_full_loses_nothing_that_was_stored(self, bounded_factory: BackendFactory | None) -> None:
        factory = given(bounded_factory)
        async with opened(factory()) as backend:
            stored = await fill(backend)
            more = [make_chunk(make_key(-i), SIZE) for i in range(1, 4)]
            assert await backend.write(more) == [WriteResult.FULL] * 3
            await assert_lacks(backend, [c.key for c in more], SIZE)
            await assert_holds(backend, stored)
            assert_usage(backend, stored)
        if self.persistent:
            async with opened(factory()) as backend:
                await assert_holds(backend, stored)
                assert_usage(backend, stored)
                assert await backend.write(more) == [WriteResult.FULL] * 3
                await assert_holds(backend, stored)

    async def test_a_delete_makes_room(self, bounded_factory: BackendFactory | None) -> None:
        async with opened(given(bounded_factory)()) as backend:
            stored = await fill(backend)
            for round_ in range(3):
                victim = stored.pop(0)
                await backend.delete([victim.key])
                new = make_chunk(make_key(-1 - round_), SIZE)
                await write_all(backend, [new])
                stored.append(new)
                await assert_holds(backend, stored)
                assert_usage(backend, stored)
            await backend.delete([c.key for c in stored])
            again = await fill(backend)
            assert len(again) == len(stored)
            assert_usage(backend, again)

    async def test_overwriting_what_fills_a_full_backend(self, bounded_factory: BackendFactory | None) -> None:
        async with opened(given(bounded_factory)()) as backend:
            stored = await fill(backend)
            for i, nbytes in enumerate([SIZE, SIZE // 2, 2 * SIZE]):
                new = make_chunk(stored[i].key, nbytes, version=1)
                (result,) = await backend.write([new])
                kept = new if result is WriteResult.STORED else stored[i]
                (value,) = await read_all(backend, [kept.key], kept.data.nbytes)
                assert_value(value, kept)
                stored[i] = kept
            await assert_holds(backend, stored)

    async def test_a_batch_that_does_not_fit_is_answered_chunk_by_chunk(
        self, bounded_factory: BackendFactory | None
    ) -> None:
        async with opened(given(bounded_factory)()) as backend:
            before = await fill(backend)
            gone, kept = before[: len(before) // 2], before[len(before) // 2 :]
            await backend.delete([c.key for c in gone])
            batch = [make_chunk(make_key(-1 - i), SIZE) for i in range(len(gone) + 4)]
            results = await backend.write(batch)
            stored = [c for c, result in zip(batch, results, strict=True) if result is WriteResult.STORED]
            full = [c.key for c, result in zip(batch, results, strict=True) if result is WriteResult.FULL]
            assert len(stored) + len(full) == len(batch)
            assert len(full) >= 1
            await assert_holds(backend, [*kept, *stored])
            await assert_lacks(backend, full, SIZE)

    async def test_a_chunk_larger_than_everything_is_full(self, bounded_factory: BackendFactory | None) -> None:
        async with opened(given(bounded_factory)()) as backend:
            capacity = backend.usage().capacity if isinstance(backend, ReportsUsage) else MOST
            assert capacity is not None, "a bounded backend reports its capacity"
            huge = make_chunk(make_key(1), (capacity // SIZE + 1) * SIZE)
            small = make_chunk(make_key(2), 4 * KIB)
            assert await backend.write([huge, small]) == [WriteResult.FULL, WriteResult.STORED]
            await assert_lacks(backend, [huge.key], huge.data.nbytes)
            await assert_holds(backend, [small])


def given(factory: BackendFactory | None) -> BackendFactory:
    if factory is None:
        pytest.skip("the fixture bounded_factory is not given")
    return factory


async def fill(backend: StorageBackend) -> list[Chunk]:
    """Write chunks of one size until the first is FULL; what was stored."""
    stored: list[Chunk] = []
    for number in range(MOST // SIZE + 1):
        chunk = make_chunk(make_key(number), SIZE)
        (result,) = await backend.write([chunk])
        if result is WriteResult.FULL:
            assert stored, "a bounded backend must have room for 64 KiB"
            return stored
        stored.append(chunk)
    pytest.fail("a backend of bounded_factory stored 64 MiB and is not full")


def assert_usage(backend: StorageBackend, stored: list[Chunk]) -> None:
    """If there are numbers, they are these chunks, within the capacity."""
    if isinstance(backend, ReportsUsage):
        usage = backend.usage()
        assert usage.chunks == len(stored)
        assert usage.capacity is not None
        assert sum(c.data.nbytes for c in stored) <= usage.nbytes <= usage.capacity

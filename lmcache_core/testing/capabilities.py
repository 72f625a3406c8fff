"""What only some backends can do: read values of any size, scan, remember use, report usage, describe spaces, count
events."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Sequence

import pytest

from lmcache_core.protocols import (
    Chunk,
    ChunkKey,
    CountsEvents,
    Describes,
    Lists,
    ReadResult,
    ReadsShorter,
    RemembersUse,
    ReportsUsage,
    Scannable,
    StorageBackend,
    Stored,
)
from lmcache_core.testing.cancels import Call, Lent, after_a_while, after_turns, assert_left_alone, take_back
from lmcache_core.testing.case import BackendCase, BackendFactory, assert_holds, opened, scan_all, write_all
from lmcache_core.testing.data import SPACE, GuardedBuffer, flip_bit, make_chunk, make_key

KIB, MIB = 2**10, 2**20
SIZES = [4 * KIB, 8 * KIB, 20 * KIB]


class CapabilityTests(BackendCase):
    """Each test is skipped for a backend without the capability."""

    async def test_read_any_tells_the_length_of_each_value(self, backend: StorageBackend) -> None:
        shorter = reads_shorter(backend)
        assert await shorter.read_any([], []) == []
        sizes = [4 * KIB, 12 * KIB, 64 * KIB, MIB, 6 * MIB]
        chunks = [make_chunk(make_key(i), nbytes) for i, nbytes in enumerate(sizes)]
        await write_all(backend, chunks)
        keys = [chunks[3].key, make_key(99), *(chunk.key for chunk in chunks), chunks[0].key]
        for least in (0, 16 * KIB, 7 * MIB):
            rooms = [max(least, size) for size in (sizes[3], 4 * KIB, *sizes, sizes[0])]
            values = await read_any_all(shorter, keys, rooms)
            expected = [chunks[3], None, *chunks, chunks[0]]
            for key, value, chunk in zip(keys, values, expected, strict=True):
                wanted = ReadResult.MISS if chunk is None else bytes(chunk.data)
                assert value == wanted, f"{key.page.hex()[:8]} in a buffer of at least {least} bytes"

    async def test_read_any_of_a_value_that_does_not_fit_is_no_hit(self, backend: StorageBackend) -> None:
        shorter = reads_shorter(backend)
        large, small = make_chunk(make_key(1), 64 * KIB), make_chunk(make_key(2), 4 * KIB)
        await write_all(backend, [large, small])
        for room in (4 * KIB, 60 * KIB):
            values = await read_any_all(shorter, [large.key, small.key, large.key], [room, room, 64 * KIB])
            assert values[0] in (ReadResult.CORRUPT, ReadResult.MISS)
            assert values[1:] == [bytes(small.data), bytes(large.data)]

    async def test_read_any_sees_whole_values_while_they_are_replaced(self, backend: StorageBackend) -> None:
        shorter = reads_shorter(backend)
        versions = [make_chunk(make_key(1), size, version=size) for size in (256 * KIB, 8 * KIB, 128 * KIB)]
        whole = [bytes(version.data) for version in versions]
        await write_all(backend, versions[:1])

        async def replace() -> None:
            for number in range(30):
                await write_all(backend, [versions[number % 3]])

        replacing = asyncio.ensure_future(replace())
        try:
            while not replacing.done():
                values = await read_any_all(shorter, [make_key(1)] * 3, [256 * KIB] * 3)
                assert all(value in whole for value in values if isinstance(value, bytes)), "a mixture of values"
                await asyncio.sleep(0)
        finally:
            await replacing

    async def test_a_cancelled_read_any_leaves_buffer_and_backend_alone(self, backend_factory: BackendFactory) -> None:
        kept: list[Lent] = []
        async with opened(backend_factory()) as backend:
            shorter = reads_shorter(backend)
            for nbytes, cancelled in ((256 * KIB, after_turns), (2 * MIB, after_a_while)):
                chunks = [make_chunk(make_key(nbytes + i), nbytes) for i in range(4)]
                buffers: list[Lent] = []
                await write_all(backend, chunks)

                def read(chunks: list[Chunk] = chunks, buffers: list[Lent] = buffers) -> Call:
                    buffers[:] = map(Lent, chunks)
                    return shorter.read_any([chunk.key for chunk in chunks], [buffer.view for buffer in buffers])

                async for takes in cancelled(read, self.deadline):
                    await take_back(buffers, takes)
                    async with asyncio.timeout(self.deadline):
                        await assert_holds(backend, chunks)
                    assert_left_alone(buffers)
                    kept += buffers if nbytes < MIB else []
        assert_left_alone(kept)

    async def test_a_scan_is_complete_and_exact(self, backend_factory: BackendFactory) -> None:
        chunks = [
            make_chunk(
                make_key(i), (1 + i % 3) * 4 * KIB, pages=1 + i % 4, parent=make_key(i - 1).page if i % 5 else b""
            )
            for i in range(300)
        ]
        newer = make_chunk(chunks[7].key, 40 * KIB, version=1, pages=4, parent=make_key(999).page)
        expected = {c.key: as_stored(c) for c in [*chunks[:20], *chunks[25:], newer]}
        async with opened(backend_factory()) as backend:
            if not isinstance(backend, Scannable):
                pytest.skip("the backend is not Scannable")
            assert await scan_all(backend) == []
            await write_all(backend, chunks)
            await write_all(backend, [newer])
            await backend.delete([c.key for c in chunks[20:25]])
            assert_lists(await scan_all(backend), expected)
            assert_lists(await scan_all(backend), expected)
        if self.persistent:
            async with opened(backend_factory()) as backend:
                assert isinstance(backend, Scannable)
                assert_lists(await scan_all(backend), expected)

    async def test_a_scan_goes_from_least_to_most_recently_used(self, backend_factory: BackendFactory) -> None:
        keys = [make_key(i) for i in range(6)]
        async with opened(backend_factory()) as backend:
            if not isinstance(backend, Scannable):
                pytest.skip("the backend is not Scannable")
            for key in keys:
                await write_all(backend, [make_chunk(key)])
            assert await order(backend) == keys
            await backend.delete([keys[1], keys[4]])
            await write_all(backend, [make_chunk(keys[1])])
            await write_all(backend, [make_chunk(keys[0], version=1)])
            expected = [keys[i] for i in (2, 3, 5, 1, 0)]
            assert await order(backend) == expected
            await backend.contains(keys)
            assert await order(backend) == expected, "contains must not renew"
        await self.assert_order_is_remembered(backend_factory, expected)

    async def test_a_listing_has_all_that_is_there(self, backend_factory: BackendFactory) -> None:
        chunks = [make_chunk(make_key(i), (1 + i % 3) * 4 * KIB) for i in range(150)]
        larger = make_chunk(chunks[7].key, 40 * KIB, version=1)
        expected = {c.key: c.data.nbytes for c in [*chunks[:20], *chunks[25:], larger]}
        async with opened(backend_factory()) as backend:
            assert await list_all(backend) == {}
            await write_all(backend, chunks)
            await write_all(backend, [larger])
            await backend.delete([c.key for c in chunks[20:25]])
            assert await list_all(backend) == expected
            if isinstance(backend, Describes):
                await backend.describe(SPACE, b"{}")
                assert await list_all(backend) == expected, "a description is no chunk"
        if self.persistent:
            async with opened(backend_factory()) as backend:
                assert await list_all(backend) == expected

    async def test_touch_changes_the_order(self, backend_factory: BackendFactory) -> None:
        keys = [make_key(i) for i in range(6)]
        async with opened(backend_factory()) as backend:
            if not isinstance(backend, RemembersUse):
                pytest.skip("the backend is not RemembersUse")
            for key in keys:
                await write_all(backend, [make_chunk(key)])
            await backend.touch([])
            await backend.touch([keys[3]])
            await backend.touch([keys[2], make_key(99), keys[0]])
            assert await backend.contains([make_key(99)]) == [False]
            expected = [keys[i] for i in (1, 4, 5, 3, 2, 0)]
            if isinstance(backend, Scannable):
                assert await order(backend) == expected
        await self.assert_order_is_remembered(backend_factory, expected)

    async def assert_order_is_remembered(self, backend_factory: BackendFactory, expected: list[ChunkKey]) -> None:
        """The order outlives a restart, twice, where both kept at all."""
        for _ in range(2):
            async with opened(backend_factory()) as backend:
                if self.persistent and isinstance(backend, Scannable) and isinstance(backend, RemembersUse):
                    assert await order(backend) == expected

    async def test_a_scan_agrees_with_contains_after_anything(self, backend_factory: BackendFactory) -> None:
        rng, keys = random.Random(4), [make_key(i) for i in range(24)]
        held: dict[ChunkKey, Stored] = {}
        for _ in range(3):
            async with opened(backend_factory()) as backend:
                if not isinstance(backend, Scannable):
                    pytest.skip("the backend is not Scannable")
                if not self.persistent:
                    held.clear()
                for version in range(20):
                    await change(backend, rng, keys, version, held)
                    assert_lists(await scan_all(backend), held)
                assert [key for key, there in zip(keys, await backend.contains(keys), strict=True) if there] == [
                    key for key in keys if key in held
                ]

    async def test_usage_adds_up(self, backend_factory: BackendFactory) -> None:
        chunks = [make_chunk(make_key(i), (1 + i % 4) * 16 * KIB) for i in range(20)]
        total = sum(chunk.data.nbytes for chunk in chunks)
        async with opened(backend_factory()) as backend:
            if not isinstance(backend, ReportsUsage):
                pytest.skip("the backend is not ReportsUsage")
            empty = backend.usage()
            assert empty.chunks == 0
            for done, chunk in enumerate(chunks, 1):
                await write_all(backend, [chunk])
                assert backend.usage().chunks == done
            full = backend.usage()
            assert full.nbytes >= total
            assert full.capacity is None or full.nbytes <= full.capacity
            await write_all(backend, [make_chunk(c.key, c.data.nbytes, version=1) for c in chunks])
            assert backend.usage().chunks == 20
        if self.persistent:
            async with opened(backend_factory()) as backend:
                assert isinstance(backend, ReportsUsage)
                assert backend.usage().chunks == 20
                assert backend.usage().nbytes >= total
                await backend.delete([c.key for c in [*chunks[:5], *chunks[:5]]])
                assert backend.usage().chunks == 15
                await backend.delete([c.key for c in chunks])
                assert backend.usage().chunks == 0
                assert backend.usage().nbytes <= full.nbytes

    async def test_descriptions_come_back(self, backend_factory: BackendFactory) -> None:
        other, manifest = flip_bit(SPACE, 0), '{"model": "Qwen/Qwen3-8B", "owner": "Zoë 漢"}'.encode()
        async with opened(backend_factory()) as backend:
            if not isinstance(backend, Describes):
                pytest.skip("the backend is not Describes")
            assert await backend.manifests() == {}
            await backend.describe(SPACE, b'{"old": 1}')
            await backend.describe(other, b"{}")
            await backend.describe(SPACE, manifest)
            await write_all(backend, [make_chunk(make_key(1))])
            await backend.delete([make_key(1)])
            assert await backend.manifests() == {SPACE: manifest, other: b"{}"}
        if self.persistent:
            async with opened(backend_factory()) as backend:
                assert isinstance(backend, Describes)
                assert await backend.manifests() == {SPACE: manifest, other: b"{}"}

    async def test_counters_only_grow(self, backend: StorageBackend) -> None:
        if not isinstance(backend, CountsEvents):
            pytest.skip("the backend is not CountsEvents")
        before = dict(backend.counters())
        await write_all(backend, [make_chunk(make_key(1))])
        await backend.delete([make_key(1)])
        after = dict(backend.counters())
        assert all(re.fullmatch("[a-z_]+", name) for name in after)
        assert all(after[name] >= count >= 0 for name, count in before.items())


def reads_shorter(backend: StorageBackend) -> ReadsShorter:
    """The backend, if it is one."""
    if not isinstance(backend, ReadsShorter):
        pytest.skip("the backend is not ReadsShorter")
    return backend


async def read_any_all(
    backend: ReadsShorter, keys: Sequence[ChunkKey], rooms: Sequence[int]
) -> list[bytes | ReadResult]:
    """Read each key into a buffer that has room for so many bytes, between canaries: the value where it hit, else the
    result."""
    buffers = [GuardedBuffer(room) for room in rooms]
    results = await backend.read_any(keys, [buffer.view for buffer in buffers])
    for buffer in buffers:
        buffer.assert_intact()
    assert len(results) == len(keys), f"{len(keys)} keys were read, {len(results)} results came back"
    values: list[bytes | ReadResult] = []
    for buffer, result in zip(buffers, results, strict=True):
        if isinstance(result, ReadResult):
            assert result is not ReadResult.HIT, "a hit of read_any is a length"
            values.append(result)
        else:
            assert 0 < result <= buffer.view.nbytes, f"a value of {result} bytes in a buffer of {buffer.view.nbytes}"
            values.append(bytes(buffer.view[:result]))
    return values


def as_stored(chunk: Chunk) -> Stored:
    """What a scan has to say of a chunk."""
    return Stored(chunk.key, chunk.pages, chunk.data.nbytes, chunk.parent)


def assert_lists(scanned: Sequence[Stored], expected: dict[ChunkKey, Stored]) -> None:
    """A scan listed exactly what is expected, each once, in any order."""
    assert len({stored.key for stored in scanned}) == len(scanned), "a scan listed a key twice"
    assert {stored.key: stored for stored in scanned} == expected


async def list_all(backend: StorageBackend) -> dict[ChunkKey, int]:
    """Sizes by key, of a backend that lists."""
    if not isinstance(backend, Lists):
        pytest.skip("the backend is not Lists")
    return {listed.key: listed.nbytes async for batch in backend.listing() for listed in batch}


async def order(backend: Scannable) -> list[ChunkKey]:
    """The keys as a scan lists them."""
    return [stored.key for stored in await scan_all(backend)]


async def change(
    backend: StorageBackend, rng: random.Random, keys: list[ChunkKey], version: int, held: dict[ChunkKey, Stored]
) -> None:
    """Write some keys or delete some, in the backend and in `held`."""
    some = rng.sample(keys, rng.randint(1, 6))
    if rng.random() < 0.6:
        chunks = [make_chunk(key, rng.choice(SIZES), version=version, pages=rng.randint(1, 4)) for key in some]
        await write_all(backend, chunks)
        held.update({chunk.key: as_stored(chunk) for chunk in chunks})
    else:
        await backend.delete(some)
        for key in some:
            held.pop(key, None)

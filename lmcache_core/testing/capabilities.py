"""What only some backends can do: scan, remember use, report usage, describe spaces, count events."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

import pytest

from lmcache_core.protocols import (
    Chunk,
    ChunkKey,
    CountsEvents,
    Describes,
    RemembersUse,
    ReportsUsage,
    Scannable,
    StorageBackend,
    Stored,
)
from lmcache_core.testing.case import BackendCase, BackendFactory, opened, scan_all, write_all
from lmcache_core.testing.data import SPACE, flip_bit, make_chunk, make_key

KIB = 2**10
SIZES = [4 * KIB, 8 * KIB, 20 * KIB]


class CapabilityTests(BackendCase):
    """Each test is skipped for a backend without the capability."""

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


def as_stored(chunk: Chunk) -> Stored:
    """What a scan has to say of a chunk."""
    return Stored(chunk.key, chunk.pages, chunk.data.nbytes, chunk.parent)


def assert_lists(scanned: Sequence[Stored], expected: dict[ChunkKey, Stored]) -> None:
    """A scan listed exactly what is expected, each once, in any order."""
    assert len({stored.key for stored in scanned}) == len(scanned), "a scan listed a key twice"
    assert {stored.key: stored for stored in scanned} == expected


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

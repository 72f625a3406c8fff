"""What goes in comes out: sizes, batches, misses, overwriting, deleting, keys and buffers."""

from __future__ import annotations

import pytest

from lmcache_core.protocols import Abortable, ChunkKey, ReadResult, StorageBackend, WriteResult
from lmcache_core.testing.case import BackendCase, assert_holds, assert_lacks, assert_value, read_all, write_all
from lmcache_core.testing.data import ALIGN, SPACE, aligned_buffer, flip_bit, make_chunk, make_key

KIB, MIB = 2**10, 2**20


class ValueTests(BackendCase):
    """One caller at a time."""

    async def test_satisfies_the_protocol(self, backend: StorageBackend) -> None:
        assert isinstance(backend, StorageBackend)
        if isinstance(backend, Abortable):
            assert isinstance(backend.abortable, bool)

    @pytest.mark.parametrize("nbytes", [4 * KIB, 8 * KIB, 60 * KIB, 256 * KIB, MIB + 4 * KIB, 6 * MIB])
    async def test_a_value_comes_back_exactly(self, backend: StorageBackend, nbytes: int) -> None:
        chunk = make_chunk(make_key(1), nbytes)
        await write_all(backend, [chunk])
        await assert_holds(backend, [chunk])

    async def test_a_batch_of_many_sizes(self, backend: StorageBackend) -> None:
        chunks = [make_chunk(make_key(i), (1 + i % 9) * 12 * KIB) for i in range(100)]
        await write_all(backend, chunks)
        await assert_holds(backend, chunks[::-1])

    async def test_an_empty_batch(self, backend: StorageBackend) -> None:
        assert await backend.contains([]) == []
        assert await backend.read([], []) == []
        assert await backend.write([]) == []
        await backend.delete([])

    async def test_a_batch_of_thousands(self, backend: StorageBackend) -> None:
        absent = [make_key(i) for i in range(5000)]
        there = make_chunk(make_key(2500))
        await write_all(backend, [there])
        assert [i for i, found in enumerate(await backend.contains(absent)) if found] == [2500]
        await backend.delete(absent)
        await assert_lacks(backend, [there.key], there.data.nbytes)

    async def test_keys_that_repeat_in_a_batch(self, backend: StorageBackend) -> None:
        chunk, other = make_chunk(make_key(1)), make_chunk(make_key(2))
        await write_all(backend, [chunk, other, chunk])
        await assert_holds(backend, [chunk, chunk, other, chunk])
        await backend.delete([chunk.key, other.key, chunk.key])
        await assert_lacks(backend, [chunk.key, other.key, chunk.key], chunk.data.nbytes)

    async def test_two_values_for_one_key_in_a_batch(self, backend: StorageBackend) -> None:
        versions = [make_chunk(make_key(1), version=v) for v in range(3)]
        await write_all(backend, versions)
        (value,) = await read_all(backend, [make_key(1)], versions[0].data.nbytes)
        assert value in [bytes(chunk.data) for chunk in versions]

    async def test_an_absent_key_is_a_miss(self, backend: StorageBackend) -> None:
        await assert_lacks(backend, [make_key(1)], 4 * KIB)
        there = make_chunk(make_key(2))
        await write_all(backend, [there])
        values = await read_all(backend, [make_key(1), there.key, make_key(3)], there.data.nbytes)
        assert values[::2] == [ReadResult.MISS] * 2
        assert_value(values[1], there)

    @pytest.mark.parametrize("nbytes", [4 * KIB, 12 * KIB, 20 * KIB, MIB])
    async def test_a_buffer_of_the_wrong_size_never_hits(self, backend: StorageBackend, nbytes: int) -> None:
        chunk, neighbour = make_chunk(make_key(1), 16 * KIB), make_chunk(make_key(2), 16 * KIB)
        await write_all(backend, [chunk, neighbour])
        wrong, right = await read_all(backend, [chunk.key, neighbour.key], [nbytes, 16 * KIB])
        assert wrong in (ReadResult.CORRUPT, ReadResult.MISS)
        assert_value(right, neighbour)

    @pytest.mark.parametrize("nbytes", [4 * KIB, 16 * KIB, 28 * KIB])
    async def test_overwriting_replaces(self, backend: StorageBackend, nbytes: int) -> None:
        old, new = make_chunk(make_key(1), 16 * KIB), make_chunk(make_key(1), nbytes, version=1)
        await write_all(backend, [old])
        await write_all(backend, [new])
        await assert_holds(backend, [new])

    async def test_delete_removes_and_can_be_repeated(self, backend: StorageBackend) -> None:
        gone, kept = make_chunk(make_key(1)), make_chunk(make_key(2))
        await write_all(backend, [gone, kept])
        for _ in range(2):
            await backend.delete([gone.key])
            await assert_lacks(backend, [gone.key], gone.data.nbytes)
        await backend.delete([make_key(3), gone.key])
        await assert_holds(backend, [kept])
        await write_all(backend, [gone])
        await assert_holds(backend, [gone, kept])

    async def test_contains_agrees_with_read(self, backend: StorageBackend) -> None:
        chunks = [make_chunk(make_key(i)) for i in range(20)]
        keys = [chunk.key for chunk in chunks]
        await write_all(backend, chunks[::2])
        await backend.delete(keys[::4])
        found = await backend.contains(keys)
        values = await read_all(backend, keys, chunks[0].data.nbytes)
        assert found == [isinstance(value, bytes) for value in values] == [i % 4 == 2 for i in range(20)]

    async def test_keys_that_are_alike_do_not_collide(self, backend: StorageBackend) -> None:
        page = make_key(1).page
        keys = [ChunkKey(SPACE, page), ChunkKey(page, SPACE), ChunkKey(SPACE, SPACE), ChunkKey(page, page)]
        keys += [ChunkKey(SPACE, bytes([byte]) * 32) for byte in b"\x00\xff/.\n\\'%*?: "]
        keys += [ChunkKey(bytes([byte]) * 32, page) for byte in b"\x00\xff/.\n\\'%*?: "]
        keys += [ChunkKey(SPACE, flip_bit(page, bit)) for bit in range(256)]
        keys += [ChunkKey(flip_bit(SPACE, bit), page) for bit in range(256)]
        chunks = [make_chunk(key, ALIGN) for key in keys]
        await write_all(backend, chunks[:-1])
        await assert_lacks(backend, keys[-1:], ALIGN)
        await assert_holds(backend, chunks[:-1])
        await backend.delete(keys[:-1:2])
        found = await backend.contains(keys)
        assert found == [i % 2 == 1 for i in range(len(keys) - 1)] + [False]

    async def test_nothing_is_kept_of_the_buffer_of_a_write(self, backend: StorageBackend) -> None:
        expected = make_chunk(make_key(1), 64 * KIB)
        buffer = aligned_buffer(64 * KIB)
        buffer[:] = expected.data
        await write_all(backend, [expected._replace(data=buffer.toreadonly())])
        buffer[:] = bytes(64 * KIB)
        await assert_holds(backend, [expected])

    async def test_nothing_is_kept_of_the_buffer_of_a_read(self, backend: StorageBackend) -> None:
        chunk = make_chunk(make_key(1), 64 * KIB)
        await write_all(backend, [chunk])
        buffer = aligned_buffer(64 * KIB)
        assert await backend.read([chunk.key], [buffer]) == [ReadResult.HIT]
        buffer[:] = bytes(64 * KIB)
        await write_all(backend, [make_chunk(make_key(2), 64 * KIB)])
        await assert_holds(backend, [chunk])
        assert buffer == bytes(64 * KIB)

    async def test_buffers_that_touch_each_other(self, backend: StorageBackend) -> None:
        chunks = [make_chunk(make_key(i), 16 * KIB) for i in range(4)]
        memory = aligned_buffer(64 * KIB)
        memory[:] = b"".join(chunk.data for chunk in chunks)
        parts = [memory[i * 16 * KIB : (i + 1) * 16 * KIB] for i in range(4)]
        written = [c._replace(data=part.toreadonly()) for c, part in zip(chunks, parts, strict=True)]
        assert await backend.write(written) == [WriteResult.STORED] * 4
        await backend.delete([chunks[2].key])
        memory[:] = bytes(64 * KIB)
        hit, miss = ReadResult.HIT, ReadResult.MISS
        assert await backend.read([c.key for c in chunks], parts) == [hit, hit, miss, hit]
        for i in (0, 1, 3):
            assert parts[i] == chunks[i].data

"""Backends that are wrong in one respect each: these about values. `CAUGHT_BY` says which test of the kit must fail."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Sequence
from typing import Any

from lmcache_core.protocols import Chunk, ChunkKey, ReadResult, WriteResult
from tests.testing.reference import Medium, ReferenceBackend

CAUGHT_BY: dict[type[ReferenceBackend], str] = {}


def caught_by(test: str) -> Any:
    def register(backend: type[ReferenceBackend]) -> type[ReferenceBackend]:
        CAUGHT_BY[backend] = test
        return backend

    return register


@caught_by("test_satisfies_the_protocol")
class SaysYesInWords(ReferenceBackend):
    abortable = "yes"  # type: ignore[assignment]


@caught_by("test_a_buffer_of_the_wrong_size_never_hits")
class HitsForAnySize(ReferenceBackend):
    def read_one(self, key: ChunkKey, buffer: memoryview) -> ReadResult:
        if key not in self.chunks():
            return ReadResult.MISS
        buffer[:] = bytes(self.chunks()[key].data[: buffer.nbytes]).ljust(buffer.nbytes)
        return ReadResult.HIT


@caught_by("test_nothing_is_kept_of_the_buffer_of_a_write")
class KeepsTheBufferOfAWrite(ReferenceBackend):
    def write_one(self, chunk: Chunk) -> WriteResult:
        self.chunks()[chunk.key] = chunk
        return WriteResult.STORED


@caught_by("test_nothing_is_kept_of_the_buffer_of_a_read")
class KeepsTheBufferOfARead(ReferenceBackend):
    def read_one(self, key: ChunkKey, buffer: memoryview) -> ReadResult:
        result = super().read_one(key, buffer)
        if result is ReadResult.HIT:
            self.chunks()[key] = self.chunks()[key]._replace(data=buffer)
        return result


@caught_by("test_overwriting_replaces")
class KeepsTheOldValue(ReferenceBackend):
    def write_one(self, chunk: Chunk) -> WriteResult:
        return WriteResult.STORED if chunk.key in self.chunks() else super().write_one(chunk)


class WritesInTwoHalves(ReferenceBackend):
    async def write(self, chunks: Sequence[Chunk]) -> list[WriteResult]:
        for chunk in chunks:
            old = self.chunks().get(chunk.key)
            size = chunk.data.nbytes
            value = bytearray(old.data if old and old.data.nbytes == size else size)
            self.write_one(chunk._replace(data=memoryview(value)))
            for half in (slice(0, size // 2), slice(size // 2, size)):
                value[half] = chunk.data[half]
                self.write_one(chunk._replace(data=memoryview(value)))
                await asyncio.sleep(0)
        return [WriteResult.STORED] * len(chunks)


@caught_by("test_racing_verbs_on_one_key_see_whole_values")
class ShowsHalfAValue(WritesInTwoHalves): ...


@caught_by("test_a_cancelled_write_leaves_an_old_or_a_new_value")
class LeavesHalfAValue(WritesInTwoHalves): ...


@caught_by("test_racing_values_of_different_sizes_are_not_mixed")
class ShowsTheBeginning(ReferenceBackend):
    async def write(self, chunks: Sequence[Chunk]) -> list[WriteResult]:
        for chunk in chunks:
            self.write_one(chunk._replace(data=chunk.data[: chunk.data.nbytes // 2]))
            await asyncio.sleep(0)
        return await super().write(chunks)


@caught_by("test_two_values_for_one_key_in_a_batch")
class JoinsValuesForOneKey(ReferenceBackend):
    async def write(self, chunks: Sequence[Chunk]) -> list[WriteResult]:
        size = chunks[0].data.nbytes // 2
        for chunk in chunks:
            self.write_one(chunk._replace(data=memoryview(bytes(chunks[0].data[:size]) + bytes(chunk.data[size:]))))
        return [WriteResult.STORED] * len(chunks)


@caught_by("test_racing_callers_of_different_keys_do_not_meet")
class SharesOneScratchBuffer(ReferenceBackend):
    scratch = b""

    async def write(self, chunks: Sequence[Chunk]) -> list[WriteResult]:
        for chunk in chunks:
            self.scratch = bytes(chunk.data)
            await asyncio.sleep(0)
            self.write_one(chunk._replace(data=memoryview(self.scratch)))
        return [WriteResult.STORED] * len(chunks)


@caught_by("test_an_absent_key_is_a_miss")
class ContainsEverything(ReferenceBackend):
    async def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return [True] * len(keys)


@caught_by("test_contains_agrees_with_read")
class ContainsWhatItEverStored(ReferenceBackend):
    def write_one(self, chunk: Chunk) -> WriteResult:
        self.medium.spaces[chunk.key.page] = b"stored once"
        return super().write_one(chunk)

    async def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return [key.page in self.medium.spaces for key in keys]


@caught_by("test_what_lies_on_the_medium_is_read")
class KnowsOnlyWhatItWrote(ContainsWhatItEverStored): ...


@caught_by("test_a_batch_of_thousands")
class ContainsOnlyTheFirstThousand(ReferenceBackend):
    async def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return [key in self.chunks() for key in keys[:1000]] + [False] * (len(keys) - 1000)


@caught_by("test_an_absent_key_is_a_miss")
class AnswersOnlyHits(ReferenceBackend):
    async def read(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> list[ReadResult]:
        return [result for result in await super().read(keys, into) if result is ReadResult.HIT]


@caught_by("test_a_batch_of_many_sizes")
class AnswersInItsOwnOrder(ReferenceBackend):
    async def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return await super().contains(sorted(keys))

    async def read(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> list[ReadResult]:
        return await super().read(sorted(keys), into)


@caught_by("test_keys_that_repeat_in_a_batch")
class FillsOneBufferForAKey(ReferenceBackend):
    async def read(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> list[ReadResult]:
        done = {key: self.read_one(key, buffer) for key, buffer in dict(zip(keys, into, strict=True)).items()}
        return [done[key] for key in keys]


@caught_by("test_an_empty_batch")
class WantsAtLeastOneKey(ReferenceBackend):
    async def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return [max(keys) in self.chunks()] + [key in self.chunks() for key in keys[1:]]


@caught_by("test_delete_removes_and_can_be_repeated")
class RaisesForAnAbsentKey(ReferenceBackend):
    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        for key in keys:
            del self.chunks()[key]


@caught_by("test_behaves_like_a_dict")
class DeleteBringsBackTheOldValue(ReferenceBackend):
    def __init__(self, medium: Medium) -> None:
        super().__init__(medium)
        self.older: dict[ChunkKey, Chunk] = {}

    def write_one(self, chunk: Chunk) -> WriteResult:
        if chunk.key in self.chunks():
            self.older[chunk.key] = self.chunks()[chunk.key]
        return super().write_one(chunk)

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        await super().delete(keys)
        for key in keys:
            if key in self.older:
                self.chunks()[key] = self.older.pop(key)


@caught_by("test_a_value_comes_back_exactly")
class WritesPastTheBuffer(ReferenceBackend):
    def read_one(self, key: ChunkKey, buffer: memoryview) -> ReadResult:
        result = super().read_one(key, buffer)
        ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(buffer)) + buffer.nbytes, 0, 1)
        return result


@caught_by("test_buffers_that_touch_each_other")
class WritesInFrontOfTheBuffer(ReferenceBackend):
    async def read(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> list[ReadResult]:
        results = await super().read(keys, into)
        for buffer in into[1:]:
            ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(buffer)) - 1, 0, 1)
        return results


class NamesKeysBadly(ReferenceBackend):
    def name(self, key: ChunkKey) -> ChunkKey:
        return key

    async def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return await super().contains([self.name(key) for key in keys])

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        await super().delete([self.name(key) for key in keys])

    def read_one(self, key: ChunkKey, buffer: memoryview) -> ReadResult:
        return super().read_one(self.name(key), buffer)

    def write_one(self, chunk: Chunk) -> WriteResult:
        return super().write_one(chunk._replace(key=self.name(chunk.key)))


@caught_by("test_keys_that_are_alike_do_not_collide")
class IgnoresTheSpace(NamesKeysBadly):
    def name(self, key: ChunkKey) -> ChunkKey:
        return ChunkKey(b"", key.page)


@caught_by("test_keys_that_are_alike_do_not_collide")
class CutsKeysShort(NamesKeysBadly):
    def name(self, key: ChunkKey) -> ChunkKey:
        return ChunkKey(key.space, key.page[:31])


@caught_by("test_keys_that_are_alike_do_not_collide")
class MixesUpSpaceAndPage(NamesKeysBadly):
    def name(self, key: ChunkKey) -> ChunkKey:
        return ChunkKey(min(key), max(key))

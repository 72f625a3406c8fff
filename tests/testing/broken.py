"""Backends that are wrong in one respect each. `CAUGHT_BY` says which test of the kit must fail for which."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from lmcache_core.protocols import Chunk, ChunkKey, ReadResult, Stored, Usage, WriteResult
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


@caught_by("test_reopening_keeps_what_was_stored")
class ForgetsWhenReopened(ReferenceBackend):
    async def close(self) -> None:
        self.medium.chunks.clear()
        self.is_open = False


@caught_by("test_opening_an_open_backend_loses_nothing")
class StartsAfreshWhenOpened(ReferenceBackend):
    async def open(self) -> None:
        if self.is_open:
            self.medium.chunks.clear()
        self.is_open = True


@caught_by("test_an_instance_opens_again_after_close")
class OpensOnlyOnce(ReferenceBackend):
    was_closed = False

    async def close(self) -> None:
        self.was_closed = True
        self.is_open = False

    async def open(self) -> None:
        self.is_open = not self.was_closed


@caught_by("test_close_can_be_repeated")
class ClosesOnlyOnce(ReferenceBackend):
    async def close(self) -> None:
        self.chunks()
        self.is_open = False


@caught_by("test_verbs_after_close_say_so")
class AnswersAfterClose(ReferenceBackend):
    async def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return [key in self.medium.chunks for key in keys]


@caught_by("test_verbs_after_close_say_so")
class HangsAfterClose(ReferenceBackend):
    async def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        if not self.is_open:
            await asyncio.Event().wait()
        return await super().contains(keys)


@caught_by("test_close_while_calls_are_under_way")
class NeverAnswersWhatCloseCutShort(ReferenceBackend):
    async def write(self, chunks: Sequence[Chunk]) -> list[WriteResult]:
        for _ in range(5):
            await asyncio.sleep(0)
        if not self.is_open:
            await asyncio.Event().wait()
        return await super().write(chunks)


@caught_by("test_a_cancelled_read_leaves_buffer_and_backend_alone")
class WritesToTheBufferLater(ReferenceBackend):
    def __init__(self, medium: Medium) -> None:
        super().__init__(medium)
        self.under_way: list[tuple[ChunkKey, memoryview]] = []

    async def read(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> list[ReadResult]:
        calls = list(zip(keys, into, strict=True))
        self.under_way += calls
        await asyncio.sleep(0)
        self.under_way = [call for call in self.under_way if call not in calls]
        return await super().read(keys, into)

    async def close(self) -> None:
        for key, buffer in self.under_way if self.is_open else []:
            self.read_one(key, buffer)
        await super().close()


@caught_by("test_a_cancelled_read_leaves_buffer_and_backend_alone")
class KeepsItsLockWhenCancelled(ReferenceBackend):
    def __init__(self, medium: Medium) -> None:
        super().__init__(medium)
        self.lock = asyncio.Lock()

    async def read(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> list[ReadResult]:
        await self.lock.acquire()
        await asyncio.sleep(0)
        result = await super().read(keys, into)
        self.lock.release()
        return result


@caught_by("test_a_cancelled_read_leaves_buffer_and_backend_alone")
class RaisesItsOwnWhenCancelled(ReferenceBackend):
    async def read(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> list[ReadResult]:
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            raise OSError("interrupted") from None
        return await super().read(keys, into)


@caught_by("test_a_damaged_value_is_no_hit")
class PadsWhatIsCutShort(ReferenceBackend):
    def read_one(self, key: ChunkKey, buffer: memoryview) -> ReadResult:
        chunk = self.chunks().get(key)
        if chunk is not None and chunk.data.nbytes == buffer.nbytes - 1:
            buffer[:-1] = chunk.data
            return ReadResult.HIT
        return super().read_one(key, buffer)


@caught_by("test_what_is_stored_is_on_the_medium")
class StoresWhenClosed(ReferenceBackend):
    def __init__(self, medium: Medium) -> None:
        super().__init__(medium)
        self.later: dict[ChunkKey, Chunk] = dict(medium.chunks)

    def chunks(self) -> dict[ChunkKey, Chunk]:
        super().chunks()
        return self.later

    async def close(self) -> None:
        self.medium.chunks = self.later
        self.is_open = False


@caught_by("test_a_scan_is_complete_and_exact")
class ScansAllButTheLast(ReferenceBackend):
    async def scan(self) -> AsyncIterator[Sequence[Stored]]:
        previous: Sequence[Stored] = ()
        async for batch in super().scan():
            yield previous
            previous = batch
        yield previous[:-1]


@caught_by("test_a_scan_is_complete_and_exact")
class ScansWithoutParents(ReferenceBackend):
    async def scan(self) -> AsyncIterator[Sequence[Stored]]:
        async for batch in super().scan():
            yield [stored._replace(parent=b"") for stored in batch]


@caught_by("test_a_scan_agrees_with_contains_after_anything")
class ScansWhatWasDeleted(ReferenceBackend):
    def __init__(self, medium: Medium) -> None:
        super().__init__(medium)
        self.deleted: list[Stored] = []

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        gone = [self.chunks()[key] for key in dict.fromkeys(keys) if key in self.chunks()]
        self.deleted = [Stored(c.key, c.pages, c.data.nbytes, c.parent) for c in gone[:1]]
        await super().delete(keys)

    async def scan(self) -> AsyncIterator[Sequence[Stored]]:
        yield self.deleted
        async for batch in super().scan():
            yield batch


@caught_by("test_a_scan_goes_from_least_to_most_recently_used")
class ScansBackwards(ReferenceBackend):
    async def scan(self) -> AsyncIterator[Sequence[Stored]]:
        for batch in [batch async for batch in super().scan()][::-1]:
            yield batch[::-1]


@caught_by("test_a_scan_goes_from_least_to_most_recently_used")
class RenewsWhatIsAskedFor(ReferenceBackend):
    async def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        await self.touch(keys)
        return await super().contains(keys)


@caught_by("test_touch_changes_the_order")
class TouchesInReverse(ReferenceBackend):
    async def touch(self, keys: Sequence[ChunkKey]) -> None:
        await super().touch(keys[::-1])


@caught_by("test_touch_changes_the_order")
class ForgetsTheOrder(ReferenceBackend):
    async def close(self) -> None:
        self.medium.chunks = dict(sorted(self.medium.chunks.items()))
        self.is_open = False


@caught_by("test_touch_changes_the_order")
class RaisesForAnAbsentTouch(ReferenceBackend):
    async def touch(self, keys: Sequence[ChunkKey]) -> None:
        for key in keys:
            self.chunks()[key] = self.chunks().pop(key)


@caught_by("test_usage_adds_up")
class CountsOverwritesTwice(ReferenceBackend):
    def usage(self) -> Usage:
        return super().usage()._replace(chunks=self.writes)


@caught_by("test_descriptions_come_back")
class KeepsTheFirstDescription(ReferenceBackend):
    async def describe(self, space: bytes, manifest: bytes) -> None:
        self.medium.spaces.setdefault(space, manifest)


@caught_by("test_counters_only_grow")
class CountsWhatItHolds(ReferenceBackend):
    def counters(self) -> Mapping[str, int]:
        return {"free_chunks": 100 - self.writes}


@caught_by("test_full_loses_nothing_that_was_stored")
class EvictsWhenFull(ReferenceBackend):
    def write_one(self, chunk: Chunk) -> WriteResult:
        while self.lacks_room(chunk):
            self.chunks().pop(next(iter(self.chunks())))
        return super().write_one(chunk)


@caught_by("test_full_loses_nothing_that_was_stored")
class StoresWhatItSaysIsFull(ReferenceBackend):
    def write_one(self, chunk: Chunk) -> WriteResult:
        full = self.lacks_room(chunk)
        self.chunks()[chunk.key] = chunk
        return WriteResult.FULL if full else WriteResult.STORED


@caught_by("test_a_delete_makes_room")
class NeverGivesRoomBack(ReferenceBackend):
    taken = 0

    def lacks_room(self, chunk: Chunk) -> bool:
        if self.medium.capacity and self.taken + chunk.data.nbytes > self.medium.capacity:
            return True
        self.taken += chunk.data.nbytes
        return False


@caught_by("test_overwriting_what_fills_a_full_backend")
class DropsTheOldValueFirst(ReferenceBackend):
    def write_one(self, chunk: Chunk) -> WriteResult:
        self.chunks().pop(chunk.key, None)
        return super().write_one(chunk)


@caught_by("test_a_batch_that_does_not_fit_is_answered_chunk_by_chunk")
class AnswersForTheWholeBatch(ReferenceBackend):
    async def write(self, chunks: Sequence[Chunk]) -> list[WriteResult]:
        results = await super().write(chunks)
        return results if WriteResult.FULL not in results else [WriteResult.FULL] * len(results)


@caught_by("test_a_chunk_larger_than_everything_is_full")
class RaisesForHugeChunks(ReferenceBackend):
    def write_one(self, chunk: Chunk) -> WriteResult:
        if self.medium.capacity and chunk.data.nbytes > self.medium.capacity:
            raise ValueError("too large")
        return super().write_one(chunk)

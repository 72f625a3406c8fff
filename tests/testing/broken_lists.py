"""Backends that are wrong about what they hold, how large it is and how much room they have."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence

from lmcache_core.protocols import Chunk, ChunkKey, Listed, ReadResult, Stored, Usage, WriteResult
from tests.testing.broken import caught_by
from tests.testing.reference import Medium, ReferenceBackend


@caught_by("test_read_any_tells_the_length_of_each_value")
class TellsTheRoomForTheLength(ReferenceBackend):
    def read_any_one(self, key: ChunkKey, buffer: memoryview) -> int | ReadResult:
        found = super().read_any_one(key, buffer)
        return found if isinstance(found, ReadResult) else buffer.nbytes


@caught_by("test_read_any_tells_the_length_of_each_value")
class SaysHitForALength(ReferenceBackend):
    async def read_any(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> list[int | ReadResult]:
        found = await super().read_any(keys, into)
        return [each if isinstance(each, ReadResult) else ReadResult.HIT for each in found]


@caught_by("test_read_any_of_a_value_that_does_not_fit_is_no_hit")
class CutsOffWhatDoesNotFit(ReferenceBackend):
    def read_any_one(self, key: ChunkKey, buffer: memoryview) -> int | ReadResult:
        chunk = self.chunks().get(key)
        if chunk is None:
            return ReadResult.MISS
        nbytes = min(chunk.data.nbytes, buffer.nbytes)
        buffer[:nbytes] = chunk.data[:nbytes]
        return nbytes


@caught_by("test_read_any_sees_whole_values_while_they_are_replaced")
class AsksForTheLengthFirst(ReferenceBackend):
    async def read_any(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> list[int | ReadResult]:
        lengths = await super().read_any(keys, into)
        await asyncio.sleep(0)
        found = await super().read_any(keys, into)
        return [length if isinstance(each, int) else each for length, each in zip(lengths, found, strict=True)]

    async def write(self, chunks: Sequence[Chunk]) -> list[WriteResult]:
        await asyncio.sleep(0)
        return await super().write(chunks)


@caught_by("test_a_cancelled_read_any_leaves_buffer_and_backend_alone")
class GoesOnReadingAnything(ReferenceBackend):
    async def read_any(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> list[int | ReadResult]:
        reading = asyncio.ensure_future(self.later(keys, into))
        return await asyncio.shield(reading)

    async def later(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> list[int | ReadResult]:
        for _ in range(4):
            await asyncio.sleep(0)
        return await super().read_any(keys, into)


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


@caught_by("test_a_listing_has_all_that_is_there")
class ListsPartly(ReferenceBackend):
    async def listing(self) -> AsyncIterator[Sequence[Listed]]:
        async for batch in super().listing():
            yield batch[:6]


@caught_by("test_a_listing_has_all_that_is_there")
class ListsOldSizes(ReferenceBackend):
    async def listing(self) -> AsyncIterator[Sequence[Listed]]:
        async for batch in super().listing():
            yield [Listed(key, min(nbytes, 12 << 10)) for key, nbytes in batch]


@caught_by("test_a_listing_has_all_that_is_there")
class ListsDescriptions(ReferenceBackend):
    async def listing(self) -> AsyncIterator[Sequence[Listed]]:
        async for batch in super().listing():
            yield batch
        yield [Listed(ChunkKey(space, space), len(manifest)) for space, manifest in self.medium.spaces.items()]


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

"""Backends that are wrong when they are opened, closed, cancelled or looked at from outside."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from lmcache_core.protocols import Chunk, ChunkKey, ReadResult, WriteResult
from tests.testing.broken import caught_by
from tests.testing.reference import Medium, ReferenceBackend


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


@caught_by("test_no_verb_blocks_the_event_loop")
class BlocksTheLoop(ReferenceBackend):
    async def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        time.sleep(0.001)
        return await super().contains(keys)


@caught_by("test_no_verb_blocks_the_event_loop")
class OpensAFileOnTheLoop(ReferenceBackend):
    async def open(self) -> None:
        with open(__file__):
            await super().open()


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

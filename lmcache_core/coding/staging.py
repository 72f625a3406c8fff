"""Memory that frames are encoded into on their way to a tier: bounded, reused, and waited for in order.

What is taken is out of use until it is given back, which is when the backend's coroutine has really ended: a write that
is past its deadline never reads what another chunk has been put into.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from lmcache_core.extents import ExtentAllocator

__all__ = ["Staging"]


class Stage(NamedTuple):
    """Room for one frame, which starts at a multiple of 4096 in memory."""

    offset: int
    """Where it lies in what all share; -1 for memory of its own."""
    memory: memoryview


class Staging:
    """Of one tier. To be used on one event loop.

    Args:
        most: Bytes that may be in use at once. More only where one batch alone needs more, and then nothing else.
    """

    def __init__(self, most: int) -> None:
        self.used = 0
        """Bytes in use."""
        self._most = most
        self._extents = ExtentAllocator(most)
        self._memory: memoryview | None = None
        self._waiting: deque[tuple[Sequence[int], asyncio.Future[list[Stage]]]] = deque()

    @property
    def waiting(self) -> int:
        """Batches that wait for room."""
        return len(self._waiting)

    async def take(self, sizes: Sequence[int]) -> list[Stage]:
        """Room for a batch of frames, when there is some; in the order of the calls."""
        future: asyncio.Future[list[Stage]] = asyncio.get_running_loop().create_future()
        request = (sizes, future)
        self._waiting.append(request)
        self._serve()
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            with contextlib.suppress(ValueError):  # it has been served
                self._waiting.remove(request)
            if future.done():
                self.give_back(future.result())
            self._serve()
            raise

    def give_back(self, stages: Sequence[Stage]) -> None:
        """Let others have the room. Nobody may use it any more."""
        for stage in stages:
            self.used -= stage.memory.nbytes
            if stage.offset >= 0:
                self._extents.free(stage.offset, stage.memory.nbytes)
        self._serve()

    def _serve(self) -> None:
        while self._waiting:
            sizes, future = self._waiting[0]
            stages = self._find(sizes)
            if stages is None:
                return
            self._waiting.popleft()
            self.used += sum(sizes)
            future.set_result(stages)

    def _find(self, sizes: Sequence[int]) -> list[Stage] | None:
        if self._memory is None:
            self._memory = memoryview(mmap.mmap(-1, self._most))  # the system gives it page by page, as it is used
        offsets: list[tuple[int, int]] = []
        for nbytes in sizes:
            offset = self._extents.allocate(nbytes)
            if offset is None:
                for taken in offsets:
                    self._extents.free(*taken)
                return None if self.used else [Stage(-1, memoryview(mmap.mmap(-1, nbytes))) for nbytes in sizes]
            offsets.append((offset, nbytes))
        return [Stage(offset, self._memory[offset : offset + nbytes]) for offset, nbytes in offsets]

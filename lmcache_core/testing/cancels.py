"""Callers that give up, at many points of a call.

A call that ends while a thread of it still uses its buffers is a matter of luck to see. So values are large, calls are
cancelled when a part of what they usually take has gone by, and every page of a buffer is marked once it is somebody
else's. Such a backend is found in nearly every round, and there are several.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine

from lmcache_core.protocols import Chunk
from lmcache_core.testing.case import BackendCase, BackendFactory, assert_holds, finished, opened, read_all, write_all
from lmcache_core.testing.data import ALIGN, aligned_buffer, make_chunk, make_key

KIB, MIB = 2**10, 2**20
GIVE_UP_AFTER = (0, 1, 2, 3, 5, 8, 13, 21)
"""Turns of the event loop a call gets before it is cancelled."""
UNDER_WAY = 8
"""Calls to cancel that have used a part of their time; fewer when that takes too long."""
ROUNDS, SECONDS, LONGEST_WAIT = 40, 2.0, 0.5
NEVER_UNDER_WAY = 8
"""Rounds after which a backend counts as one that answers at once."""

Call = Coroutine[object, object, object]


class CancelTests(BackendCase):
    """A call that is cancelled leaves nothing behind."""

    async def test_a_cancelled_read_leaves_buffer_and_backend_alone(self, backend_factory: BackendFactory) -> None:
        kept: list[Lent] = []
        async with opened(backend_factory()) as backend:
            for nbytes, cancelled in ((256 * KIB, after_turns), (2 * MIB, after_a_while)):
                chunks = [make_chunk(make_key(nbytes + i), nbytes) for i in range(4)]
                buffers: list[Lent] = []
                await write_all(backend, chunks)

                def read(chunks: list[Chunk] = chunks, buffers: list[Lent] = buffers) -> Call:
                    buffers[:] = map(Lent, chunks)
                    return backend.read([chunk.key for chunk in chunks], [buffer.view for buffer in buffers])

                async for takes in cancelled(read, self.deadline):
                    await take_back(buffers, takes)
                    async with asyncio.timeout(self.deadline):
                        await assert_holds(backend, chunks)
                    assert_left_alone(buffers)
                    kept += buffers if nbytes < MIB else []
        assert_left_alone(kept)  # not by `close` either

    async def test_a_cancelled_write_leaves_an_old_or_a_new_value(self, backend_factory: BackendFactory) -> None:
        async with opened(backend_factory()) as backend:
            for nbytes, cancelled in ((256 * KIB, after_turns), (2 * MIB, after_a_while)):
                old = [make_chunk(make_key(nbytes + i), nbytes) for i in range(4)]
                new = [make_chunk(chunk.key, nbytes, version=1) for chunk in old]
                buffers = [Lent(chunk) for chunk in new]
                await write_all(backend, old)

                def write(new: list[Chunk] = new, buffers: list[Lent] = buffers) -> Call:
                    return backend.write([buffer.filled(chunk) for buffer, chunk in zip(buffers, new, strict=True)])

                async for takes in cancelled(write, self.deadline):
                    await take_back(buffers, takes)
                    async with asyncio.timeout(self.deadline):
                        values = await read_all(backend, [chunk.key for chunk in old], nbytes)
                        for value, *either in zip(values, old, new, strict=True):
                            whole = value in [bytes(chunk.data) for chunk in either] or not isinstance(value, bytes)
                            assert whole, "a write that was cancelled left a mixture, or read its buffer after its end"
                        await write_all(backend, old)
                        await assert_holds(backend, old)


class Lent:
    """A buffer for the value of a chunk. Once it was taken back, each of its pages starts with a byte that the value
    doesn't have there."""

    def __init__(self, chunk: Chunk) -> None:
        self.view = aligned_buffer(chunk.data.nbytes)
        self._marks = bytes(byte ^ 0xFF for byte in chunk.data[::ALIGN])

    def filled(self, chunk: Chunk) -> Chunk:
        """The chunk, with its value in this buffer."""
        self.view[:] = chunk.data
        return chunk._replace(data=self.view.toreadonly())

    def take_back(self) -> None:
        """Use it for something else."""
        self.view[::ALIGN] = self._marks

    def left_alone(self) -> bool:
        """Whether nobody wrote to it since."""
        return self.view[::ALIGN].tobytes() == self._marks


async def take_back(buffers: list[Lent], takes: float) -> None:
    """The coroutine that they were lent to has ended, so the buffers are somebody else's at once. What still uses them
    gets the time that a call takes to show it."""
    for buffer in reversed(buffers):  # against the order in which most will be used
        buffer.take_back()
    await asyncio.sleep(min(takes, LONGEST_WAIT))


def assert_left_alone(buffers: list[Lent]) -> None:
    """Nobody has written to them since they were taken back."""
    assert all(buffer.left_alone() for buffer in buffers), "a read that was cancelled and had ended wrote to its buffer"


async def after_turns(start: Callable[[], Call], deadline: float) -> AsyncIterator[float]:
    """Cancel calls after some turns of the event loop. Yields when one has ended: about the seconds that it takes."""
    for after in GIVE_UP_AFTER:
        call = asyncio.ensure_future(start())
        for _ in range(after):
            await asyncio.sleep(0)
        await give_up(call, deadline)
        yield 0.0


async def after_a_while(start: Callable[[], Call], deadline: float) -> AsyncIterator[float]:
    """The same after parts of the time that a call takes when nobody cancels it."""
    call, began = asyncio.ensure_future(start()), time.perf_counter()
    await finished(call, deadline=deadline)
    call.result()
    takes = time.perf_counter() - began
    yield takes
    under_way = 0
    for number in range(ROUNDS):
        call, started = asyncio.ensure_future(start()), time.perf_counter()
        part = (0.3 + number * 0.618) % 1  # far from all before it
        while not call.done() and time.perf_counter() - started < part * takes:  # noqa: ASYNC110
            await asyncio.sleep(0)  # a timer has milliseconds only
        if call.done():
            takes = min(takes, time.perf_counter() - started)
        else:
            under_way += 1
        await give_up(call, deadline)
        yield takes
        late = time.perf_counter() - began > SECONDS
        if under_way >= UNDER_WAY or late or (number >= NEVER_UNDER_WAY and not under_way):
            return


async def give_up(call: asyncio.Future[object], deadline: float) -> None:
    """Cancel a call and wait until it has ended."""
    call.cancel()
    await finished(call, deadline=deadline)
    assert call.cancelled() or call.exception() is None, f"cancelling it raised {call.exception()!r}"

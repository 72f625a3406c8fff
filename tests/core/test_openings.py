"""Openings end, also when they are cancelled at a bad moment."""

from __future__ import annotations

import asyncio

import pytest

from lmcache_core.openings import to_the_end


@pytest.mark.parametrize("times", [0, 1, 3])
async def test_work_is_done_to_its_end_however_often_it_is_cancelled(times: int) -> None:
    gate, done = asyncio.Event(), []

    async def work() -> None:
        await gate.wait()
        done.append(1)

    task = asyncio.ensure_future(to_the_end(work()))
    for _ in range(times):
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
    gate.set()
    if times:
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        await task
    assert done == [1]


@pytest.mark.parametrize("cancelled", [False, True])
async def test_what_it_raises_is_raised_unless_it_was_cancelled(cancelled: bool) -> None:
    gate = asyncio.Event()

    async def work() -> None:
        await gate.wait()
        raise OSError("the drive is gone")

    task = asyncio.ensure_future(to_the_end(work()))
    await asyncio.sleep(0)
    if cancelled:
        task.cancel()
    gate.set()
    with pytest.raises(asyncio.CancelledError if cancelled else OSError):
        await task

"""What calls use is let go of once, after the last of them, and nothing begins after that."""

from __future__ import annotations

import asyncio
import threading

import pytest

from lmcache_core.errors import ClosedError
from lmcache_core.iocalls import IoCalls
from lmcache_core.iothreads import IoThreads


class Thing:
    """What may not be used once it has gone."""

    def __init__(self) -> None:
        self.gone = 0
        self.left = threading.Event()
        self.begun = threading.Event()
        self.go_on = threading.Event()

    def use(self, value: int) -> int:
        assert not self.gone
        return value

    def hang(self) -> str:
        self.begun.set()
        assert self.go_on.wait(20)
        return self.use_again()

    def use_again(self) -> str:
        assert not self.gone
        return "done"

    def leave(self) -> None:
        self.gone += 1
        self.left.set()


async def test_calls_answer_in_order_and_the_thing_is_let_go_of_at_the_end() -> None:
    thing = Thing()
    calls = IoCalls("thing", 3, thing.leave)
    assert await calls.each(thing.use, [(number,) for number in range(20)]) == list(range(20))
    assert thing.gone == 0
    await calls.close(1.0)
    assert thing.gone == 1


async def test_nothing_begins_after_the_end() -> None:
    thing = Thing()
    calls = IoCalls("thing", 1, thing.leave)
    await calls.close(1.0)
    with pytest.raises(ClosedError, match="thing"):
        await calls.each(thing.use, [(1,)])
    assert thing.gone == 1


async def test_a_call_that_hangs_lets_go_when_it_ends() -> None:
    """On threads of its own too, and never while another one runs."""
    thing, other = Thing(), IoThreads("other", 1)
    calls = IoCalls("thing", 1, thing.leave)
    hanging = calls.submit(thing.hang)
    elsewhere = calls.submit(thing.hang, threads=other)
    waiting = calls.submit(thing.use, 1)  # behind the one that hangs
    await asyncio.to_thread(thing.begun.wait, 20)
    await calls.close(0.01)
    assert thing.gone == 0
    with pytest.raises(ClosedError):
        await waiting
    thing.go_on.set()
    assert await hanging == await elsewhere == "done"
    assert await asyncio.to_thread(thing.left.wait, 20)
    assert thing.gone == 1
    other.close()


async def test_the_first_failure_is_told_when_all_have_ended() -> None:
    ended: list[int] = []

    def fail(number: int) -> None:
        ended.append(number)
        if number:
            raise ValueError(number)

    calls = IoCalls("thing", 2)
    with pytest.raises(ValueError, match="1"):
        await calls.each(fail, [(0,), (1,), (2,)])
    assert sorted(ended) == [0, 1, 2]
    await calls.close(1.0)


async def test_who_is_cancelled_waits_for_the_calls() -> None:
    thing = Thing()
    calls = IoCalls("thing", 1, thing.leave)
    task = asyncio.create_task(calls.each(thing.hang, [()]))
    await asyncio.to_thread(thing.begun.wait, 20)
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=0.01)
    assert not done
    thing.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    await calls.close(1.0)
    assert thing.gone == 1

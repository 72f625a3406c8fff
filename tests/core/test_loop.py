"""The bridge between threads and the event loop."""

import asyncio
import threading

import pytest

from lmcache_core.errors import ClosedError, UsageError
from lmcache_core.loop import LoopThread


async def answer() -> int:
    return 42


def test_coroutines_run_on_the_loops_thread() -> None:
    loop = LoopThread()

    async def name() -> str:
        return threading.current_thread().name

    assert loop.run(name()) == "lmcache-loop"
    assert loop.start(answer()).result(5) == 42
    loop.stop()
    assert not loop.thread.is_alive()


def test_a_blocking_call_on_the_loop_itself_is_refused() -> None:
    loop = LoopThread()

    async def nested() -> int:
        return loop.run(answer())

    with pytest.raises(UsageError, match="event loop's own thread"):
        loop.run(nested())
    loop.stop()


def test_a_wait_is_bounded() -> None:
    loop = LoopThread()
    with pytest.raises(TimeoutError):
        loop.run(asyncio.sleep(60), 0.01)
    loop.stop()


def test_a_stopped_loop_says_so() -> None:
    loop = LoopThread()
    loop.stop()
    loop.stop()
    with pytest.raises(ClosedError):
        loop.start(answer())

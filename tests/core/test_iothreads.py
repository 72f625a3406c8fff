"""IoThreads: outcomes, cancellation, a thread that hangs, and that memory is let go."""

import asyncio
import gc
import subprocess
import sys
import threading
import weakref
from typing import Any

import pytest

from lmcache_core.errors import ClosedError
from lmcache_core.iothreads import IoThreads, ended


class Gate:
    """A blocking call that tells when it runs and ends when it is told."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.leave = threading.Event()
        self.calls = 0

    def __call__(self, value: object = None) -> object:
        self.calls += 1
        self.entered.set()
        assert self.leave.wait(30)
        return value

    async def running(self) -> None:
        await asyncio.to_thread(self.entered.wait, 30)


async def test_returns_and_raises_what_the_call_does() -> None:
    threads = IoThreads("test", 2)
    assert await threads.run(pow, 2, 10) == 1024
    assert await threads.finish(int, "ff", base=16) == 255
    with pytest.raises(ZeroDivisionError):
        await threads.run(divmod, 1, 0)
    with pytest.raises(ZeroDivisionError):
        await threads.finish(divmod, 1, 0)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await threads.run(next, iter(()))
    threads.close()


async def test_threads_start_when_needed_and_no_more_than_asked_for() -> None:
    threads = IoThreads("lazy", 2)

    def alive() -> int:
        return sum(thread.name.startswith("lazy-") for thread in threading.enumerate())

    assert alive() == 0
    for _ in range(3):
        await threads.run(int)
    assert alive() == 1, "one call after another needs one thread"
    gates = [Gate() for _ in range(3)]
    futures = [threads.submit(gate) for gate in gates]
    await gates[0].running()
    await gates[1].running()
    assert alive() == 2
    assert not gates[2].entered.is_set()
    for gate in gates:
        gate.leave.set()
    await ended(futures)
    assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith("lazy-"))
    threads.close()


async def test_cancelled_run_ends_at_once_and_the_call_goes_on() -> None:
    threads = IoThreads("test", 1)
    gate, queued = Gate(), Gate()
    task = asyncio.create_task(threads.run(gate))
    await gate.running()
    waiting = asyncio.create_task(threads.run(queued))
    await asyncio.sleep(0)
    task.cancel()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(asyncio.CancelledError):
        await waiting
    gate.leave.set()
    assert await threads.run(int) == 0
    assert gate.calls == 1
    assert queued.calls == 0, "cancelled before it started"
    threads.close()


async def test_cancelled_finish_ends_with_the_call() -> None:
    threads = IoThreads("test", 1)
    gate = Gate()
    task = asyncio.create_task(threads.finish(gate))
    await gate.running()
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not task.done()
    gate.leave.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    threads.close()


async def test_ended_waits_for_all_and_raises_none_of_them() -> None:
    threads = IoThreads("test", 2)
    futures: list[asyncio.Future[Any]] = [threads.submit(divmod, 1, 0), threads.submit(int, "7")]
    await ended(futures)
    assert isinstance(futures[0].exception(), ZeroDivisionError)
    assert futures[1].result() == 7
    await ended([])
    threads.close()


async def test_close_waits_for_nothing_and_fails_what_is_queued() -> None:
    threads = IoThreads("test", 1)
    gate = Gate()
    running = threads.submit(gate, "late")
    await gate.running()
    queued = threads.submit(int)
    threads.close()
    threads.close()
    with pytest.raises(ClosedError):
        await queued
    with pytest.raises(ClosedError):
        await threads.run(int)
    threads.post(gate)
    gate.leave.set()
    assert await running == "late"
    assert gate.calls == 1


def test_a_closed_loop_does_not_break_the_thread() -> None:
    threads = IoThreads("test", 1)
    gate = Gate()

    async def leave_behind() -> None:
        threads.submit(gate)
        await gate.running()

    asyncio.run(leave_behind())
    gate.leave.set()
    assert asyncio.run(threads.run(int)) == 0
    threads.close()


async def test_post_needs_no_loop_and_logs_what_is_raised(caplog: pytest.LogCaptureFixture) -> None:
    threads = IoThreads("test", 1)
    done = threading.Event()
    await asyncio.to_thread(threads.post, divmod, 1, 0)
    await asyncio.to_thread(threads.post, done.set)
    assert await asyncio.to_thread(done.wait, 30)
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ZeroDivisionError]
    threads.close()


async def test_nothing_of_a_call_is_kept() -> None:
    class Thing:
        pass

    threads = IoThreads("test", 1)
    thing = Thing()
    seen = weakref.ref(thing)
    await threads.run(id, thing)
    del thing
    await threads.run(int)  # the thread has come round
    gc.collect()
    assert seen() is None
    threads.close()


def test_a_hung_thread_does_not_hold_up_exit() -> None:
    program = """
import asyncio, threading
from lmcache_core.iothreads import IoThreads
threads, entered = IoThreads("hung", 2), threading.Event()
def hang():
    entered.set()
    threading.Event().wait()
async def main():
    asyncio.ensure_future(threads.run(hang))
    while not entered.is_set():
        await asyncio.sleep(0)
    threads.close()
asyncio.run(main())
print("end")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")

"""Servers that die, freeze, crawl or fail: what it costs, and that it passes."""

from __future__ import annotations

import asyncio
import mmap
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from lmcache_backends.objects.faults import Fault
from lmcache_backends.objects.retries import Retries
from lmcache_backends.objects.tally import Tally
from lmcache_backends.s3 import S3Backend
from lmcache_core import Cache
from lmcache_core.errors import BackendError
from lmcache_core.protocols import ReadResult, WriteResult
from lmcache_core.testing import aligned_buffer, make_chunk, make_key
from tests.backends.s3.conftest import BUCKET
from tests.backends.s3.kit import KIB, MIB, link, options
from tests.node.kv import open_cache, retrieve, store, until
from tests.servers import s3
from tests.servers.s3 import EXPRESS_BUCKET, Server

MARK = 0xA5
DEADLINE = 0.5


@pytest.fixture(params=["rust", "aws"])
def reached(request: pytest.FixtureRequest, prefix: str) -> tuple[Server, dict[str, Any]]:
    """A server for each client, with the options that belong to it."""
    if request.param == "rust":
        return request.getfixturevalue("moto"), {"prefix": prefix}
    return request.getfixturevalue("express"), {"prefix": prefix, "bucket": EXPRESS_BUCKET}


@asynccontextmanager
async def opened(server: Server, **settings: Any) -> AsyncIterator[S3Backend]:
    backend = S3Backend(options(server, **settings))
    await backend.open()
    try:
        yield backend
    finally:
        await backend.close()


async def test_a_read_that_is_aborted_writes_nothing_more(reached: tuple[Server, dict[str, Any]]) -> None:
    server, settings = reached
    chunk = make_chunk(make_key(1), 4 * MIB)
    async with (
        link(server) as (way, url),
        opened(server, endpoint=url, part=256 * KIB, **settings) as backend,
    ):
        assert await backend.write([chunk]) == [WriteResult.STORED]
        way.passed, way.hold_after = 0, 2 * MIB
        buffer = aligned_buffer(4 * MIB)
        reading = asyncio.ensure_future(backend.read([chunk.key], [buffer]))
        await way.held.wait()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        buffer[:] = bytes([MARK]) * buffer.nbytes  # it is somebody else's now
        await asyncio.wait_for(way.ended.wait(), 10)  # the connection is closed: the I/O has ended
        way.hold_after = None
        way.flow.set()
        assert await backend.read([chunk.key], [aligned_buffer(4 * MIB)]) == [ReadResult.HIT]
        assert buffer == bytes([MARK]) * buffer.nbytes


@pytest.mark.parametrize("size", [64 * KIB, 32 * MIB])
async def test_a_write_that_is_aborted_lets_go_of_its_buffer(server_files: Path, size: int) -> None:
    with s3.memory(server_files / "silent") as server:
        async with opened(server) as backend:
            server.freeze()
            memory = mmap.mmap(-1, size)
            with memoryview(memory) as data:
                chunk = make_chunk(make_key(1))._replace(data=data.toreadonly())
                started = time.monotonic()
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(DEADLINE):
                        await backend.write([chunk])
                assert time.monotonic() - started < DEADLINE + 0.5
                chunk.data.release()
            memory.close()  # raises if anybody still has a hold of it


async def test_a_server_that_sends_single_bytes_is_waited_for(reached: tuple[Server, dict[str, Any]]) -> None:
    server, settings = reached
    chunk = make_chunk(make_key(1), 8 * KIB)
    async with link(server) as (way, url), opened(server, endpoint=url, **settings) as backend:
        assert await backend.write([chunk]) == [WriteResult.STORED]
        way.drips = True
        buffer = aligned_buffer(8 * KIB)
        async with asyncio.timeout(10):
            assert await backend.read([chunk.key], [buffer]) == [ReadResult.HIT]
        assert buffer == chunk.data


async def test_a_server_that_stops_in_the_middle_costs_the_deadline(reached: tuple[Server, dict[str, Any]]) -> None:
    server, settings = reached
    chunk = make_chunk(make_key(1), MIB)
    async with link(server) as (way, url), opened(server, endpoint=url, **settings) as backend:
        assert await backend.write([chunk]) == [WriteResult.STORED]
        way.passed, way.hold_after = 0, 256 * KIB
        started = time.monotonic()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(DEADLINE):
                await backend.read([chunk.key], [aligned_buffer(MIB)])
        assert time.monotonic() - started < DEADLINE + 0.5


async def test_a_stall_is_a_failure_that_is_told(reached: tuple[Server, dict[str, Any]]) -> None:
    server, settings = reached
    chunk = make_chunk(make_key(1), MIB)
    limits = {"stall_timeout": 0.3, "retries": 1}
    async with link(server) as (way, url), opened(server, endpoint=url, **limits, **settings) as backend:
        assert await backend.write([chunk]) == [WriteResult.STORED]
        way.passed, way.hold_after = 0, 256 * KIB
        with pytest.raises(BackendError, match=r": no answer in time; the tier tries again by itself$"):
            await backend.read([chunk.key], [aligned_buffer(MIB)])
        assert backend.counters()["retries"] == 1


@pytest.fixture(scope="module")
def mortal(server_files: Path) -> Iterator[Server]:
    """A server that tests may end."""
    with s3.moto(server_files / "mortal") as server:
        server.make_bucket(BUCKET)
        yield server


@pytest.fixture
def cache(mortal: Server, prefix: str) -> Iterator[Cache]:
    tier = {"read_timeout": DEADLINE, "write_timeout": 2.0}
    backend = S3Backend(options(mortal, prefix=prefix, connect_timeout=DEADLINE))
    with open_cache(backend, tiers=[tier]) as cache:
        yield cache


def test_a_server_that_is_killed_and_started_again_serves_again(cache: Cache, mortal: Server) -> None:
    assert store(cache, "abcd")
    cache.clear(["cpu"])
    assert retrieve(cache, "abcd") == 4
    mortal.kill()
    cache.clear(["cpu"])
    started = time.monotonic()
    for letters in ("abcd", "efgh", "ijkl", "mnop"):
        assert retrieve(cache, letters) == 0
    assert time.monotonic() - started < 4 * DEADLINE + 1
    mortal.restart()
    mortal.make_bucket(BUCKET)  # it kept nothing
    until(lambda: store(cache, "qrst") and cache.stats().tiers[0].up)
    cache.clear(["cpu"])
    until(lambda: retrieve(cache, "qrst") == 4)


def test_a_server_that_is_frozen_costs_the_deadline_only(cache: Cache, mortal: Server) -> None:
    assert store(cache, "abcd")
    cache.clear(["cpu"])
    mortal.freeze()
    try:
        started = time.monotonic()
        assert retrieve(cache, "abcd") == 0
        assert time.monotonic() - started < 2 * DEADLINE + 0.5  # a lookup and a read at most
    finally:
        mortal.thaw()
    cache.clear(["cpu"])
    until(lambda: retrieve(cache, "abcd") == 4)


class Failing:
    """A request that fails so often, and then succeeds."""

    def __init__(self, times: int, fault: Fault) -> None:
        self.left, self.fault, self.asked = times, fault, 0

    async def __call__(self) -> str:
        self.asked += 1
        self.left -= 1
        if self.left >= 0:
            raise self.fault
        return "done"


async def test_what_may_pass_is_repeated_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def slept(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr("lmcache_backends.objects.retries.asyncio.sleep", slept)
    monkeypatch.setattr("lmcache_backends.objects.retries.random.uniform", lambda low, high: high)
    tally = Tally()
    retries = Retries(3, 100, tally)
    assert await retries.run(Failing(3, Fault("SlowDown", 503))) == "done"
    assert waits == [0.05, 0.1, 0.2]
    assert tally.counts()["retries"] == 3
    for fault in (Fault("AccessDenied", 403), Fault("NoSuchBucket", 404), Fault("", 400), Fault("BadDigest", 400)):
        failing = Failing(1, fault)
        with pytest.raises(Fault):
            await retries.run(failing)
        assert failing.asked == 1
    failing = Failing(9, Fault("no answer in time"))
    with pytest.raises(Fault):
        await retries.run(failing)
    assert failing.asked == 4


async def test_a_budget_ends_what_retries_would_make_worse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmcache_backends.objects.retries.random.uniform", lambda low, high: 0.0)
    tally = Tally()
    retries = Retries(3, 5, tally)
    for _ in range(10):
        with pytest.raises(Fault):
            await retries.run(Failing(99, Fault("InternalError", 500)))
    assert (tally.counts()["retries"], tally.counts()["retries_refused"]) == (5, 9)
    for _ in range(10):
        assert await retries.run(Failing(0, Fault("", 500))) == "done"
    assert await retries.run(Failing(1, Fault("", 500))) == "done"


ENDS = """
import asyncio, sys, threading
from lmcache_backends.s3 import S3Backend, S3Options
from lmcache_core.testing import aligned_buffer, make_chunk, make_key

loop = asyncio.new_event_loop()
threading.Thread(target=loop.run_forever, daemon=True).start()
backend = S3Backend(S3Options(bucket="kv1", endpoint=sys.argv[1], access_key="a", secret_key="b", part=2**18))
chunks = [make_chunk(make_key(number), 2**22) for number in range(4)]
buffers = [aligned_buffer(2**22) for _ in chunks]
begun = threading.Event()

async def use():
    await backend.open()
    while True:
        await backend.write(chunks)
        begun.set()
        await backend.read([chunk.key for chunk in chunks], buffers)

asyncio.run_coroutine_threadsafe(use(), loop)
assert begun.wait(30)
sys.exit(3)
"""


def test_a_process_that_ends_in_the_middle_ends_as_it_wants(server_files: Path) -> None:
    with s3.memory(server_files / "ends") as server:
        command = [sys.executable, "-c", ENDS, server.url]
        ending = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(4)]
        ends = [(process.communicate(timeout=60)[1], process.returncode) for process in ending]
    assert ends == [("", 3)] * 4

"""Media that fail, hang or lie: no wrong byte is a hit, what hangs keeps its memory, each failure says what to do."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from lmcache_backends.gds import GdsBackend
from lmcache_backends.gds.moving import CuFiles, DeviceMemory
from lmcache_core.config import BreakerConfig
from lmcache_core.errors import BackendError
from lmcache_core.protocols import ReadResult, WriteResult
from lmcache_core.testing import aligned_buffer, make_chunk, make_key
from tests.backends.gds.kit import MIB, file_of, files, framed, opened, options, value
from tests.backends.gds.standin import StandIn
from tests.backends.nfs.kit import descriptors
from tests.node.kv import CHUNK_FRAME, at_rest, open_cache, retrieve, store, until

SIZE = 64 * 2**10
CHUNK = make_chunk(make_key(1), SIZE)
NEWER = make_chunk(make_key(1), SIZE, version=1)
FAILURES = [
    (
        "KvikIO failure at: posix_io.hpp:90: POSIX error on pread: {}",
        errno.EIO,
        "Input/output error; the server or the",
    ),
    ("Linux system/library function call error at: file_utils.cpp:160: {}", errno.EMFILE, "Too many open files; this"),
    (
        "cuFile error at: /k/src/file_handle.cpp:80: {}",
        None,
        "KvikIO failed: DMA error; see cufile.log where cuFile is",
    ),
]


def error_of(text: str, code: int | None) -> RuntimeError:
    return RuntimeError(text.format(os.strerror(code) if code else "DMA error"))


@pytest.mark.parametrize(("text", "code", "said"), FAILURES)
async def test_what_fails_in_kvikio_says_what_to_do(
    standin: StandIn, path: Path, text: str, code: int | None, said: str
) -> None:
    one = framed()
    async with opened(path, host_memory="kvikio") as backend:
        await backend.write([CHUNK, one.plain()])
        standin.error = error_of(text, code)
        device = standin.memory
        for call in (
            backend.read([CHUNK.key], [aligned_buffer(SIZE)]),
            backend.write([NEWER]),
            backend.read_direct([one.pages(0, 0, 1, device.allocate(SIZE))], device.copy_back),
            backend.write_direct([framed(2).on(device)], device.copy_back),
        ):
            with pytest.raises(BackendError) as raised:
                await call
            assert str(raised.value).startswith(f"gds: {path}/")
            assert said in str(raised.value)
        standin.error = None
        assert await value(backend, CHUNK.key, SIZE) == CHUNK.data, "the old value stays"
    assert len(files(path)) == 2, "nothing unfinished is left"
    assert descriptors(path) == []


async def test_a_file_that_may_not_be_so_large_says_so(standin: StandIn, path: Path) -> None:
    one = framed()
    async with opened(path) as backend:
        standin.error = error_of("KvikIO failure at: posix_io.hpp:90: POSIX error on pwrite: {}", errno.EFBIG)
        with pytest.raises(BackendError, match=r"File too large; .*raise `ulimit -f`"):
            await backend.write_direct([one.on(standin.memory)], standin.memory.copy_back)


async def test_memory_that_kvikio_does_not_get_is_named(standin: StandIn, path: Path) -> None:
    async with opened(path, host_memory="kvikio") as backend:
        await backend.write([CHUNK])
        standin.error = MemoryError()
        with pytest.raises(BackendError, match="KvikIO got no memory"):
            await value(backend, CHUNK.key, SIZE)
        standin.error = None
        assert await value(backend, CHUNK.key, SIZE) == CHUNK.data


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
async def test_no_room_that_kvikio_meets_is_full_and_no_failure(standin: StandIn, path: Path, code: int) -> None:
    one, newer = framed(), framed(version=1)
    async with opened(path, host_memory="kvikio") as backend:
        await backend.write([CHUNK, one.plain()])
        standin.error = error_of("KvikIO failure at: posix_io.hpp:90: POSIX error on pwrite: {}", code)
        assert await backend.write([NEWER]) == [WriteResult.FULL]
        write = newer.on(standin.memory)
        assert await backend.write_direct([write], standin.memory.copy_back) == [WriteResult.FULL]
        standin.error = None
        assert await value(backend, CHUNK.key, SIZE) == CHUNK.data
        assert await value(backend, one.chunk.key, one.form.nbytes) == one.frame
        assert backend.counters()["full"] == 2
    assert len(files(path)) == 2


async def test_what_a_device_has_written_is_swept_as_anything(
    standin: StandIn, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = [framed(number) for number in range(8)]
    size = chunks[0].form.nbytes
    monkeypatch.setattr("lmcache_backends.nfs.session.FIRST", 1e9)  # this one sweeps nothing
    written: list[int] = []
    monkeypatch.setattr("lmcache_backends.nfs.session.Session.wrote", lambda _, nbytes: written.append(nbytes))
    async with opened(path) as backend:
        await backend.write_direct([one.on(standin.memory) for one in chunks], standin.memory.copy_back)
        await backend.touch([one.chunk.key for one in chunks])
        assert backend.counters()["touches"] == 0, "a write counts as a use"
    assert written == [8 * chunks[0].form.payload_bytes]
    for hours, one in enumerate(reversed(chunks), 1):
        then = time.time() - 3600 * hours
        os.utime(file_of(path, one.chunk.key), (then, then))
    monkeypatch.setattr("lmcache_backends.nfs.session.FIRST", 0.0)
    async with opened(path, capacity=5 * size) as backend:
        await asyncio.to_thread(until, lambda: backend.counters()["sweeps"] == 1)
        assert backend.counters()["swept_chunks"] == 4
        assert await backend.contains([one.chunk.key for one in chunks]) == [False] * 4 + [True] * 4


@pytest.mark.parametrize("at", [0, 7000, -1])
async def test_a_bit_that_flips_on_the_way_to_a_device_is_no_hit(standin: StandIn, path: Path, at: int) -> None:
    """The file is whole, and what the device got is not: only what is copied back tells."""
    one = framed()
    device = standin.memory
    address = device.allocate(one.form.shard_bytes)
    async with opened(path) as backend:
        await backend.write([one.plain()])
        read = one.pages(1, 0, 4, address)
        standin.damage = (at,)
        assert await backend.read_direct([read], device.copy_back) == [ReadResult.CORRUPT]
        standin.damage = ()
        assert await backend.read_direct([read], device.copy_back) == [ReadResult.HIT]
        assert device.get(address, one.form.shard_bytes) == one.of_shard(1)


async def test_a_bit_that_flips_on_the_way_from_a_device_is_never_stored(standin: StandIn, path: Path) -> None:
    one = framed()
    async with opened(path) as backend:
        standin.damage = (70000,) if one.form.shard_bytes > 70000 else (5000,)
        with pytest.raises(BackendError, match="is not on the medium as it was on the device"):
            await backend.write_direct([one.on(standin.memory)], standin.memory.copy_back)
        assert await backend.contains([one.chunk.key]) == [False]
    assert files(path) == []


async def test_less_than_was_asked_for_is_no_hit_and_not_stored(standin: StandIn, path: Path) -> None:
    one = framed()
    device = standin.memory
    async with opened(path, host_memory="kvikio", trust=True) as backend:
        await backend.write([CHUNK, one.plain()])
        standin.short = 1
        assert await value(backend, CHUNK.key, SIZE) is ReadResult.CORRUPT
        read = one.pages(0, 0, 4, device.allocate(one.form.shard_bytes))
        assert await backend.read_direct([read], device.copy_back) == [ReadResult.CORRUPT]
        for call in (backend.write([NEWER]), backend.write_direct([one.on(device)], device.copy_back)):
            with pytest.raises(BackendError, match=r"KvikIO writes nothing more after \d+ of \d+ bytes"):
                await call
        standin.short = 0
        assert await value(backend, CHUNK.key, SIZE) == CHUNK.data


async def test_transfers_are_of_whole_pages_one_task_each_and_of_the_payload_alone(
    standin: StandIn, path: Path
) -> None:
    """What is more than a task may be under way in part when the call has failed."""
    one = framed(page_bytes=4 * MIB, pages=3, shards=2)
    device = standin.memory
    async with opened(path) as backend:
        await backend.write_direct([one.on(device)], device.copy_back)
        await backend.read_direct([one.pages(1, 1, 2, device.allocate(8 * MIB))], device.copy_back)
    header = one.form.header_bytes
    assert standin.calls == [
        ("pwrite", True, 12 * MIB, header, 1),
        ("pwrite", True, 12 * MIB, header + 12 * MIB, 1),
        ("pread", True, 8 * MIB, header + 16 * MIB, 1),
    ]
    assert header % 4096 == 0


@pytest.mark.parametrize("verb", ["read", "write", "read_direct", "write_direct"])
async def test_a_call_that_is_cancelled_ends_when_its_transfer_has(standin: StandIn, path: Path, verb: str) -> None:
    """Until then its memory is not the caller's: the late bytes come."""
    one, newer = framed(), framed(version=1)
    device = standin.memory
    buffer = aligned_buffer(one.form.nbytes)
    address = device.allocate(one.form.shard_bytes)
    async with opened(path, host_memory="kvikio", threads=1) as backend:
        await backend.write([one.plain()])
        while standin.entered.acquire(blocking=False):
            pass
        standin.gate.clear()
        calls: dict[str, Any] = {
            "read": lambda: backend.read([one.chunk.key], [buffer]),
            "write": lambda: backend.write([newer.plain()]),
            "read_direct": lambda: backend.read_direct([one.pages(0, 0, 4, address)], device.copy_back),
            "write_direct": lambda: backend.write_direct([newer.on(device)], device.copy_back),
        }
        call = asyncio.ensure_future(calls[verb]())
        await asyncio.to_thread(standin.entered.acquire)
        call.cancel()
        for _ in range(20):
            await asyncio.sleep(0)
        assert not call.done()
        standin.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert standin.under_way == set()
        if verb == "read":
            assert buffer == one.frame
        if verb == "read_direct":
            assert device.get(address, one.form.shard_bytes) == one.of_shard(0)
        kept = await value(backend, one.chunk.key, one.form.nbytes)
        assert kept == (newer.frame if verb.startswith("write") else one.frame)


async def test_closing_does_not_wait_for_what_hangs_and_what_hangs_harms_nobody(
    standin: StandIn, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmcache_backends.nfs.session._LAST_CALLS", 0.05)
    one = framed()
    device = standin.memory
    address = device.allocate(one.form.shard_bytes)
    async with opened(path) as backend:
        await backend.write([one.plain()])
        standin.gate.clear()
        call = asyncio.ensure_future(backend.read_direct([one.pages(0, 0, 4, address)], device.copy_back))
        await asyncio.to_thread(standin.entered.acquire)
    assert not call.done()
    standin.gate.set()
    assert await call == [ReadResult.HIT]
    assert device.get(address, one.form.shard_bytes) == one.of_shard(0)
    await asyncio.to_thread(until, lambda: descriptors(path) == [])


def test_a_read_that_hangs_costs_its_deadline_and_its_slot_waits(standin: StandIn, path: Path) -> None:
    backend = GdsBackend(options(path, host_memory="kvikio"))
    tier = {"read_timeout": 0.2, "breaker": BreakerConfig(cooldown=0.05)}
    with open_cache(backend, tiers=[tier]) as cache:
        assert store(cache, "abcd")
        assert cache.flush(20)
    standin.gate.clear()
    backend = GdsBackend(options(path, host_memory="kvikio"))
    with open_cache(backend, tiers=[tier]) as cache:
        try:
            assert retrieve(cache, "abcd") == 0, "late is a miss"
            assert cache.stats().tiers[0].quarantined == CHUNK_FRAME
            assert retrieve(cache, "abcd") == 0
        finally:
            standin.gate.set()
        until(lambda: cache.stats().tiers[0].quarantined == 0)
        until(lambda: retrieve(cache, "abcd") == 4)
        at_rest(cache)


async def test_a_directory_that_is_removed_is_down_until_it_is_opened_anew(standin: StandIn, path: Path) -> None:
    one = framed()
    device = standin.memory
    async with opened(path, host_memory="kvikio") as backend:
        await backend.write([CHUNK, one.plain()])
        shutil.rmtree(path)
        for call in (backend.contains([CHUNK.key]), backend.write([NEWER])):
            with pytest.raises(BackendError, match=r"gds: .*the directory was removed or is no longer exported"):
                await call
        with pytest.raises(BackendError, match="the directory was removed"):
            await backend.write_direct([one.on(device)], device.copy_back)
        assert await value(backend, CHUNK.key, SIZE) is ReadResult.MISS
        read = one.pages(0, 0, 1, device.allocate(SIZE))
        assert await backend.read_direct([read], device.copy_back) == [ReadResult.MISS]
        await backend.open()
        assert await backend.write_direct([one.on(device)], device.copy_back) == [WriteResult.STORED]
        assert await backend.read_direct([read], device.copy_back) == [ReadResult.HIT]


async def test_a_file_that_is_cut_while_it_is_read_is_no_hit(
    standin: StandIn, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = framed()
    device = standin.memory
    real = CuFiles.read_at

    def cutting(self: CuFiles, fd: int, into: memoryview | DeviceMemory, nbytes: int, offset: int) -> bool:
        os.truncate(file_of(path, one.chunk.key), one.form.header_bytes + 100)
        return real(self, fd, into, nbytes, offset)

    async with opened(path, host_memory="kvikio") as backend:
        read = one.pages(0, 0, 4, device.allocate(one.form.shard_bytes))
        for _ in range(2):
            await backend.write([one.plain()])
            with monkeypatch.context() as patched:
                patched.setattr(CuFiles, "read_at", cutting)
                assert await backend.read_direct([read], device.copy_back) == [ReadResult.CORRUPT]
                await backend.write([one.plain()])
                assert await value(backend, one.chunk.key, one.form.nbytes) is ReadResult.CORRUPT


async def test_a_chunk_that_is_replaced_while_it_is_read_is_the_old_one(
    standin: StandIn, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Header and payload are of one file, whatever its name means meanwhile."""
    one, newer = framed(), framed(version=1)
    device = standin.memory
    address = device.allocate(one.form.shard_bytes)
    real = CuFiles.read_at

    def replacing(self: CuFiles, fd: int, into: memoryview | DeviceMemory, nbytes: int, offset: int) -> bool:
        newest = path / "newest"
        newest.write_bytes(newer.frame)
        newest.replace(file_of(path, one.chunk.key))
        return real(self, fd, into, nbytes, offset)

    async with opened(path) as backend:
        await backend.write([one.plain()])
        read = one.pages(0, 0, 4, address)
        with monkeypatch.context() as patched:
            patched.setattr(CuFiles, "read_at", replacing)
            assert await backend.read_direct([read], device.copy_back) == [ReadResult.HIT]
        assert device.get(address, one.form.shard_bytes) == one.of_shard(0)
        assert await backend.read_direct([read], device.copy_back) == [ReadResult.HIT]
        assert device.get(address, one.form.shard_bytes) == newer.of_shard(0)


async def test_a_link_in_a_chunks_place_is_not_followed(standin: StandIn, path: Path, tmp_path: Path) -> None:
    one = framed()
    secret = tmp_path / "secret"
    secret.write_bytes(one.frame)
    place = file_of(path, one.chunk.key)
    place.parent.mkdir(parents=True)
    place.symlink_to(secret)
    device = standin.memory
    address = device.allocate(one.form.shard_bytes)
    async with opened(path) as backend:
        with pytest.raises(BackendError, match="a symbolic link is in the way"):
            await backend.read_direct([one.pages(0, 0, 1, address)], device.copy_back)
        assert await backend.write_direct([one.on(device)], device.copy_back) == [WriteResult.STORED]
    assert not place.is_symlink()

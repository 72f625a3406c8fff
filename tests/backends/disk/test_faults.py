"""Disks that are full, read-only, gone or hung: the tier says so, and recovers by being opened again."""

import asyncio
import errno
import gc
import os
import shutil
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache_backends.disk import DiskBackend, backend
from lmcache_backends.disk.store import Store
from lmcache_core.errors import BackendError, ClosedError, ConfigError
from lmcache_core.health import CLOSE_TIMEOUT
from lmcache_core.protocols import ReadResult, WriteResult
from lmcache_core.testing import aligned_buffer
from tests.backends.disk.kit import (
    KIB,
    MIB,
    SIZE,
    assert_holds,
    assert_lacks,
    chunk,
    fill,
    opened,
    options,
    order,
    put,
    taken,
    use_up,
)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", path], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"the right to mount a tmpfs is missing: {mounted.stderr.strip()}")
    yield path
    subprocess.run(["umount", "--lazy", path], check=True)


@pytest.mark.needs_root
def test_a_full_file_system_is_full_and_works_on(small_disk: Path) -> None:
    with opened(small_disk, capacity=64 * MIB, segment=MIB) as store:
        chunks = [chunk(i, 64 * KIB) for i in range(80)]
        results = put(store, *chunks)
        held = [c for c, result in zip(chunks, results, strict=True) if result is WriteResult.STORED]
        assert 48 <= len(held) < 64
        assert_holds(store, *held)
        store.delete([c.key for c in held[:5]])
        fill(store, *[chunk(i, 64 * KIB) for i in range(100, 105)])
    with opened(small_disk, capacity=64 * MIB, segment=MIB) as store:
        assert order(store) == [c.key for c in held[5:]] + [chunk(i).key for i in range(100, 105)]
        assert_holds(store, *held[5:], *[chunk(i, 64 * KIB) for i in range(100, 105)])


@pytest.mark.needs_root
def test_evicting_works_when_others_filled_the_file_system(small_disk: Path) -> None:
    with opened(small_disk, capacity=2 * MIB, segment=MIB) as store:
        chunks = [chunk(i, 4 * KIB) for i in range(200)]
        fill(store, *chunks)
        with pytest.raises(OSError, match="No space left"):
            use_up(small_disk / "others")
        store.delete([c.key for c in chunks[:150]])
        assert_lacks(store, *chunks[:150])
        assert_holds(store, *chunks[150:])
        os.unlink(small_disk / "others")
        fill(store, *chunks[:150])
    with opened(small_disk, capacity=2 * MIB, segment=MIB) as store:
        assert_holds(store, *chunks)


def test_some_of_the_file_system_stays_free(tmp_path: Path) -> None:
    system = os.statvfs(tmp_path)
    free = system.f_bavail * system.f_frsize
    with opened(tmp_path, min_free=free + 2**30) as store:
        assert put(store, chunk(0)) == [WriteResult.FULL]
    with opened(tmp_path, min_free="99.9%") as store:
        assert put(store, chunk(0)) == [WriteResult.FULL]
        assert taken(tmp_path) == 0
    with opened(tmp_path, min_free="0%") as store:
        fill(store, chunk(0))


@pytest.mark.needs_root
def test_a_read_only_file_system_fails_writes_and_recovers(small_disk: Path) -> None:
    def remount(how: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{how}", small_disk], check=True)

    with opened(small_disk, segment=MIB) as store:
        fill(store, chunk(0))
    remount("ro")
    with pytest.raises(BackendError, match="the file system is read-only"), opened(small_disk):
        pass
    remount("rw")
    with opened(small_disk, segment=MIB) as store:
        assert_holds(store, chunk(0))
        fill(store, chunk(1))


async def test_a_directory_that_vanishes_fails_writes_and_recovers(tmp_path: Path) -> None:
    tier = DiskBackend(options(tmp_path / "cache"))
    await tier.open()
    assert await tier.write([chunk(0)]) == [WriteResult.STORED]
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(BackendError, match=r"/cache/.*/segment-.*: was removed while in use; .* put it back"):
        await tier.write([chunk(1)])
    for number in (1, 2):
        with pytest.raises(BackendError, match=r"/cache: No such file or directory; .* put it back"):
            await tier.write([chunk(number)])
    into = aligned_buffer(SIZE)
    assert await tier.read([chunk(0).key], [into]) == [ReadResult.HIT], "what is open can still be read"
    assert into == chunk(0).data
    await tier.close()
    await tier.open()
    assert tier.usage().chunks == 0
    assert await tier.write([chunk(1)]) == [WriteResult.STORED]
    await tier.close()
    await tier.open()
    assert await tier.contains([chunk(0).key, chunk(1).key]) == [False, True]
    await tier.close()


def test_a_directory_that_was_moved_fails_writes(tmp_path: Path) -> None:
    with opened(tmp_path / "cache") as store:
        fill(store, chunk(0))
        (tmp_path / "cache").rename(tmp_path / "elsewhere")
        with pytest.raises(BackendError, match="was removed while in use"):
            put(store, chunk(1))
        (tmp_path / "elsewhere").rename(tmp_path / "cache")
        fill(store, chunk(1))


async def test_a_path_that_cannot_be_used_says_so_and_works_when_it_can(tmp_path: Path) -> None:
    in_the_way = tmp_path / "cache"
    in_the_way.write_text("not a directory")
    tier = DiskBackend(options(in_the_way))
    for _ in range(2):
        with pytest.raises(ConfigError, match=f"disk: path {in_the_way} is no directory; .* remove what is there"):
            await tier.open()
    with pytest.raises(ClosedError):
        await tier.contains([])
    await tier.close()
    in_the_way.unlink()
    await tier.open()
    assert await tier.write([chunk(0)]) == [WriteResult.STORED]
    await tier.close()


def test_a_failed_opening_lets_go_of_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as store:
        fill(store, chunk(0))
    before = set(os.listdir("/proc/self/fd"))

    def broken(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pread", broken)
        with pytest.raises(BackendError, match="the drive reports an error"), opened(tmp_path):
            pass
    assert set(os.listdir("/proc/self/fd")) == before
    with opened(tmp_path) as store:
        assert_holds(store, chunk(0))


class Hanging:
    """Calls of a function of `os` hang while it is on, as on a mount that is gone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.entered, self.release = threading.Event(), threading.Event()
        self.on = True
        call = getattr(os, name)

        def hung(*args: Any, **kwargs: Any) -> Any:
            if self.on:
                self.entered.set()
                assert self.release.wait(60)
            return 0 if args[0] == -1 else call(*args, **kwargs)

        monkeypatch.setattr(os, name, hung)

    async def wait(self) -> None:
        assert await asyncio.to_thread(self.entered.wait, 30)


async def test_what_hangs_is_left_behind_and_its_locks_are_free_when_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "_LAST_CALLS", 0.01)
    tier = DiskBackend(options(tmp_path))
    await tier.open()
    assert await tier.write([chunk(0)]) == [WriteResult.STORED]
    capacity = tier.usage().capacity
    hanging = Hanging(monkeypatch, "preadv")
    into = aligned_buffer(SIZE)
    reading = asyncio.create_task(tier.read([chunk(0).key], [into]))
    await hanging.wait()
    reading.cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not reading.done(), "its buffer is still being used"
    await tier.close()
    hanging.on = False
    await tier.open()
    assert await tier.contains([chunk(0).key]) == [False], "the hung opening still has it"
    assert tier.usage().capacity == (capacity or 0) // 2
    assert await tier.write([chunk(1)]) == [WriteResult.STORED]
    session_end = asyncio.to_thread(_wait_for_end, tier)
    hanging.release.set()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await session_end
    await tier.open()
    assert await tier.contains([chunk(0).key, chunk(1).key]) == [True, True]
    assert tier.usage().capacity == capacity
    await tier.close()


def _wait_for_end(tier: DiskBackend) -> None:
    """Until the threads of openings before the present one have ended."""
    current = None if tier._sessions._open is None else tier._sessions._open._threads._work
    for thread in threading.enumerate():
        if thread.name.startswith("disk-") and getattr(thread, "_target", None) != current:
            thread.join(30)
            assert not thread.is_alive()


def test_closing_gives_up_what_hangs_before_the_node_gives_up_closing() -> None:
    assert 0 < backend._LAST_CALLS < CLOSE_TIMEOUT


async def test_what_hangs_without_anybody_waiting_keeps_its_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking up who shares the path gives empty segments back, in the background. What hangs there must not remove a
    file when another opening has the shard."""
    monkeypatch.setattr(backend, "_LAST_CALLS", 0.01)
    small = options(tmp_path, capacity=3 * SIZE, segment=SIZE)
    tier, other = DiskBackend(small), DiskBackend(small)
    await tier.open()
    assert await tier.write([chunk(0), chunk(1)]) == [WriteResult.STORED] * 2
    await tier.delete([chunk(1).key])
    assert taken(tmp_path) == 2 * SIZE, "one that is empty is kept"
    await other.open()
    hanging = Hanging(monkeypatch, "unlink")
    session = tier._sessions._open
    assert session is not None
    session.store._refreshed = 0.0
    tier.usage()
    await hanging.wait()
    await tier.close()
    hanging.on = False
    await other.close()
    await tier.open()
    assert tier.usage().capacity == 3 * SIZE // 2, "the hung opening still has its shard"
    assert await tier.contains([chunk(0).key]) == [False]
    assert await tier.write([chunk(2)]) == [WriteResult.STORED]
    hanging.release.set()
    await asyncio.to_thread(_wait_for_end, tier)
    await tier.open()
    assert await tier.contains([chunk(i).key for i in range(3)]) == [True, False, True]
    assert tier.usage().capacity == 3 * SIZE
    await tier.close()


def test_locks_are_free_when_what_hangs_has_ended_though_the_event_loop_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "_LAST_CALLS", 0.01)
    hanging = Hanging(monkeypatch, "preadv")
    loop = asyncio.new_event_loop()
    tier = DiskBackend(options(tmp_path))

    async def leave_hanging() -> asyncio.Task[object]:
        await tier.open()
        assert await tier.write([chunk(0)]) == [WriteResult.STORED]
        reading = asyncio.create_task(tier.read([chunk(0).key], [aligned_buffer(SIZE)]))
        await hanging.wait()
        await tier.close()
        return reading

    reading = loop.run_until_complete(leave_hanging())
    assert not reading.done()
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    with opened(tmp_path) as store:
        assert_lacks(store, chunk(0))
    hanging.on = False
    hanging.release.set()
    _wait_for_end(tier)
    with opened(tmp_path) as store:
        assert_holds(store, chunk(0))
    reading._log_destroy_pending = False  # type: ignore[attr-defined]  # it is left on purpose


async def test_an_opening_that_is_given_up_holds_no_locks_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = DiskBackend(options(tmp_path))
    await tier.open()
    assert await tier.write([chunk(0)]) == [WriteResult.STORED]
    await tier.close()
    hanging = Hanging(monkeypatch, "preadv")
    monkeypatch.setattr(Store, "open", _hang_at_the_end(Store.open))
    opening = asyncio.create_task(tier.open())
    await hanging.wait()
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    hanging.on = False
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("disk-")]
    hanging.release.set()
    for thread in threads:
        await asyncio.to_thread(thread.join, 30)
    await tier.open()
    assert await tier.contains([chunk(0).key]) == [True]
    await tier.close()


async def test_an_opening_that_fails_when_nobody_waits_any_more_bothers_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    tier = DiskBackend(options(tmp_path))
    hanging = Hanging(monkeypatch, "makedirs")
    opening = asyncio.create_task(tier.open())
    await hanging.wait()
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    await asyncio.to_thread(tmp_path.rmdir)
    tmp_path.write_text("in the way")
    hanging.release.set()
    await asyncio.to_thread(_wait_for_end, tier)
    await asyncio.sleep(0)
    gc.collect()
    assert not told


def _hang_at_the_end(call: Any) -> Any:
    def opening(store: Store) -> None:
        call(store)
        os.preadv(-1, [], 0)

    return opening


def _unreadable(monkeypatch: pytest.MonkeyPatch, *offsets: int, times: int = 1000) -> None:
    """Places of segments that the drive cannot read, or not at first."""
    read = os.preadv
    left = times

    def preadv(fd: int, views: list[memoryview], at: int) -> int:
        nonlocal left
        if at in offsets and left:
            left -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(fd, views, at)

    monkeypatch.setattr(os, "preadv", preadv)


@pytest.fixture
async def four(tmp_path: Path) -> AsyncIterator[DiskBackend]:
    """A tier with chunks 0 to 3, in this order."""
    tier = DiskBackend(options(tmp_path))
    await tier.open()
    for number in range(4):
        assert await tier.write([chunk(number)]) == [WriteResult.STORED]
    yield tier
    await tier.close()


async def read_four(tier: DiskBackend) -> list[ReadResult]:
    into = [aligned_buffer(SIZE) for _ in range(4)]
    results = await tier.read([chunk(i).key for i in range(4)], into)
    assert all(into[i] == chunk(i).data for i, result in enumerate(results) if result is ReadResult.HIT)
    return results


async def test_a_place_that_cannot_be_read_costs_the_others_of_the_call_nothing(
    four: DiskBackend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _unreadable(monkeypatch, SIZE)
    assert await read_four(four) == [ReadResult.HIT, ReadResult.CORRUPT, ReadResult.HIT, ReadResult.HIT]
    assert (four.counters()["values_unreadable"], four.counters()["reads_repeated"]) == (1, 1)
    await four.close()
    await asyncio.to_thread(_wait_for_end, four)
    assert [record.message for record in caplog.records if "/segment-00000001: Input/output error" in record.message]


async def test_an_error_that_passes_is_none(four: DiskBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    _unreadable(monkeypatch, SIZE, times=1)
    assert await read_four(four) == [ReadResult.HIT] * 4
    assert (four.counters()["values_unreadable"], four.counters()["reads_repeated"]) == (0, 1)


@pytest.mark.parametrize("offsets", [(0, SIZE), (0, SIZE, 2 * SIZE, 3 * SIZE)])
async def test_a_drive_that_fails_more_often_has_failed(
    four: DiskBackend, monkeypatch: pytest.MonkeyPatch, offsets: tuple[int, ...]
) -> None:
    _unreadable(monkeypatch, *offsets)
    with pytest.raises(BackendError, match="the drive reports an error"):
        await read_four(four)
    assert await four.contains([chunk(i).key for i in range(4)]) == [True] * 4


async def test_the_only_chunk_of_a_call_that_cannot_be_read_is_a_failure(
    four: DiskBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    _unreadable(monkeypatch, SIZE)
    with pytest.raises(BackendError, match="the drive reports an error"):
        await four.read([chunk(1).key], [aligned_buffer(SIZE)])
    with pytest.raises(BackendError, match="the drive reports an error"):
        await four.read([chunk(1).key, chunk(9).key], [aligned_buffer(SIZE), aligned_buffer(SIZE)])
    assert four.counters()["values_unreadable"] == 0

"""Past the page cache, or through it where the kernel wants that."""

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

import pytest

from lmcache_backends.disk import DiskBackend
from lmcache_backends.disk.backend import _whole
from lmcache_core.errors import BackendError
from lmcache_core.protocols import ReadResult, WriteResult
from lmcache_core.testing import aligned_buffer
from tests.backends.disk.kit import MIB, SIZE, assert_holds, chunk, fill, get, opened, options, put

AT_ALL = "os.open"
EACH = "os.pwritev"


def refuse_direct(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """As a file system does that cannot do O_DIRECT, when a file is opened or only when it is used."""
    open_, write, read = os.open, os.pwritev, os.preadv

    def is_direct(fd: int) -> bool:
        info = Path(f"/proc/self/fdinfo/{fd}").read_text()
        return bool(int(info.split("flags:")[1].split()[0], 8) & os.O_DIRECT)

    def opening(path: str, flags: int, *args: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return open_(path, flags, *args)

    def moving(call: Any) -> Any:
        def moved(fd: int, *args: Any) -> int:
            if is_direct(fd):
                raise OSError(errno.EINVAL, "Invalid argument")
            return int(call(fd, *args))

        return moved

    if where == AT_ALL:
        monkeypatch.setattr(os, "open", opening)
    else:
        monkeypatch.setattr(os, "pwritev", moving(write))
        monkeypatch.setattr(os, "preadv", moving(read))


@pytest.mark.parametrize("where", [AT_ALL, EACH])
def test_what_refuses_o_direct_is_used_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    refuse_direct(monkeypatch, where)
    with opened(tmp_path) as store:
        fill(store, chunk(0), chunk(1))
        assert_holds(store, chunk(0), chunk(1))
        assert store.count("buffered_fallback") == 4, "each of two writes and two reads is counted"
    with opened(tmp_path) as store:
        assert_holds(store, chunk(0), chunk(1))


@pytest.mark.parametrize("where", [AT_ALL, EACH])
def test_always_means_always(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    refuse_direct(monkeypatch, where)
    with opened(tmp_path, direct="always") as store:
        with pytest.raises(BackendError, match="set `direct: auto`"):
            put(store, chunk(0))
        assert get(store, chunk(0).key) is ReadResult.MISS
        assert store.count("buffered_fallback") == 0


def test_never_means_never_and_is_no_fallback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags: list[int] = []
    open_ = os.open

    def opening(path: str, how: int, *rest: Any) -> int:
        flags.append(how)
        return open_(path, how, *rest)

    monkeypatch.setattr(os, "open", opening)
    with opened(tmp_path, direct="never") as store:
        fill(store, chunk(0))
        assert_holds(store, chunk(0))
        assert store.count("buffered_fallback") == 0
    assert flags
    assert not any(how & os.O_DIRECT for how in flags)


def test_a_large_value_goes_in_calls_that_hold_up_no_other_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: dict[str, list[int]] = {"pwritev": [], "preadv": []}

    def moving(name: str) -> Any:
        call = getattr(os, name)

        def moved(fd: int, views: list[memoryview], at: int) -> int:
            done = int(call(fd, views, at))
            sizes[name].append(done)
            return done

        return moved

    for name in sizes:
        monkeypatch.setattr(os, name, moving(name))
    with opened(tmp_path, capacity=64 * MIB) as store:
        fill(store, chunk(0, 17 * MIB))
        assert_holds(store, chunk(0, 17 * MIB))
    assert sizes == {name: [8 * MIB, 8 * MIB, MIB] for name in ("pwritev", "preadv")}


async def test_a_long_value_is_read_in_parts_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = DiskBackend(options(tmp_path, capacity=64 * MIB, threads=1))
    await tier.open()
    long, next_one = chunk(0, 17 * MIB), chunk(1, 9 * MIB)
    assert await tier.write([long, next_one]) == [WriteResult.STORED] * 2
    read: list[int] = []
    preadv = os.preadv

    def noted(fd: int, buffers: list[memoryview], offset: int) -> int:
        read.append(len(buffers[0]))
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", noted)
    into = [aligned_buffer(17 * MIB), aligned_buffer(9 * MIB)]
    assert await tier.read([long.key, next_one.key], into) == [ReadResult.HIT] * 2
    assert into == [long.data, next_one.data]
    assert read == [8 * MIB, 8 * MIB, MIB, 8 * MIB, MIB]
    await tier.close()


def test_parts_of_two_values_are_none(tmp_path: Path) -> None:
    with opened(tmp_path, capacity=64 * MIB) as store:
        value, into = chunk(0, 9 * MIB), aligned_buffer(9 * MIB)
        fill(store, value)
        first = store.read_part(value.key, into, 0, 8 * MIB)
        fill(store, value)
        second = store.read_part(value.key, into, 8 * MIB, 9 * MIB)
        assert (first[0], second[0]) == (ReadResult.HIT, ReadResult.HIT)
        assert _whole([first, second]) is ReadResult.MISS
        assert_holds(store, value)


async def test_a_buffer_that_is_not_aligned_works(tmp_path: Path) -> None:
    """The contract promises alignment; what breaks it is slower, not broken."""
    backend = DiskBackend(options(tmp_path))
    await backend.open()
    odd = aligned_buffer(SIZE + 4096)[3 : SIZE + 3]
    odd[:] = chunk(0).data
    assert await backend.write([chunk(0)._replace(data=odd)]) == [WriteResult.STORED]
    into = aligned_buffer(SIZE + 4096)[5 : SIZE + 5]
    assert await backend.read([chunk(0).key], [into]) == [ReadResult.HIT]
    assert into == chunk(0).data
    await backend.close()


async def test_a_length_that_is_not_whole_works(tmp_path: Path) -> None:
    backend = DiskBackend(options(tmp_path))
    await backend.open()
    for number, nbytes in enumerate((1, 4095, 4097, 10_000)):
        data = aligned_buffer(12288)[:nbytes]
        data[:] = os.urandom(nbytes)
        assert await backend.write([chunk(number)._replace(data=data)]) == [WriteResult.STORED]
        into = memoryview(bytearray(nbytes))
        assert await backend.read([chunk(number).key], [into]) == [ReadResult.HIT]
        assert into == data
    await asyncio.gather(*(backend.delete([chunk(number).key]) for number in range(4)))
    assert backend.usage().nbytes == 0
    await backend.close()

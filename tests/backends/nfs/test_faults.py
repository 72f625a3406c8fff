"""What file systems answer when servers, networks and other hosts interfere: every value is whole, every failure has a
line that says what to do, and nothing is left behind."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lmcache_backends.nfs import chunks as chunks_module
from lmcache_backends.nfs import sweep
from lmcache_core.errors import BackendError
from lmcache_core.protocols import ReadResult, WriteResult
from lmcache_core.testing import make_chunk, make_key
from tests.backends.nfs.kit import (
    HOUR,
    KIB,
    MIB,
    descriptors,
    file_of,
    files,
    mounted,
    opened,
    system,
    unfinished,
    until,
    value,
)

SIZE = 64 * KIB
CHUNK = make_chunk(make_key(1), SIZE)
NEWER = make_chunk(make_key(1), SIZE, version=1)


class Failing:
    """A function of `os` that fails for chunks of the cache, as often as it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, code: int, times: int = 10**9) -> None:
        self._real: Callable[..., Any] = getattr(os, name)
        self._code = code
        self.times = times
        self.calls = 0
        monkeypatch.setattr(os, name, self)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if not _is_of_a_chunk(arguments[0]):
            return self._real(*arguments, **named)
        self.calls += 1
        if self.calls <= self.times:
            raise OSError(self._code, os.strerror(self._code))
        return self._real(*arguments, **named)


def _is_of_a_chunk(where: object) -> bool:
    if isinstance(where, int):
        try:
            where = os.readlink(f"/proc/self/fd/{where}")
        except OSError:
            return False
    return CHUNK.key.page.hex() in str(where)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks_module, "PAUSES", (0, 0, 0))


@pytest.mark.parametrize("call", ["open", "fstat", "preadv"])
async def test_a_handle_that_became_stale_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    async with opened(tmp_path / "kv") as backend:
        await backend.write([CHUNK])
        Failing(monkeypatch, call, errno.ESTALE, times=2)
        assert await value(backend, CHUNK.key, SIZE) == CHUNK.data
        assert backend.counters()["stale_retries"] == 2


async def test_what_stays_stale_is_a_miss_and_the_tier_is_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This host has the name for a file that another one has replaced; in a second it will know."""
    async with opened(tmp_path / "kv") as backend:
        await backend.write([CHUNK])
        stale = Failing(monkeypatch, "preadv", errno.ESTALE)
        assert await value(backend, CHUNK.key, SIZE) is ReadResult.MISS
        assert stale.calls == chunks_module.ATTEMPTS
        stale.times = 0
        assert await value(backend, CHUNK.key, SIZE) == CHUNK.data


async def test_a_root_that_is_stale_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(tmp_path / "kv") as backend:
        await backend.write([CHUNK])
        real = os.fstat

        def all_stale(fd: int) -> os.stat_result:
            if os.readlink(f"/proc/self/fd/{fd}").startswith(str(tmp_path)):
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            return real(fd)

        monkeypatch.setattr(os, "fstat", all_stale)
        for call in (value(backend, CHUNK.key, SIZE), backend.contains([make_key(7)])):
            with pytest.raises(BackendError, match="Stale file handle; the directory was removed or is no longer"):
                await call


@pytest.mark.parametrize("code", [errno.ESTALE, errno.ENOENT, errno.EEXIST])
@pytest.mark.parametrize("call", ["open", "rename"])
async def test_a_write_that_meets_another_host_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    """A lost answer to a rename that was done comes as ENOENT, one to an exclusive create as EEXIST."""
    async with opened(tmp_path / "kv") as backend:
        await backend.write([CHUNK])
        failing = Failing(monkeypatch, call, code, times=3)
        assert await backend.write([NEWER]) == [WriteResult.STORED]
        assert failing.calls == 4
        assert await value(backend, CHUNK.key, SIZE) == NEWER.data
    assert unfinished(tmp_path / "kv") == []


@pytest.mark.parametrize("call", ["open", "fstat", "preadv"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ETIMEDOUT, errno.ENOTCONN])
async def test_a_read_that_fails_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    async with opened(tmp_path / "kv") as backend:
        await backend.write([CHUNK])
        Failing(monkeypatch, call, code)
        with pytest.raises(BackendError) as raised:
            await value(backend, CHUNK.key, SIZE)
        assert str(raised.value).startswith(f"nfs: {file_of(tmp_path / 'kv', CHUNK.key)}: {os.strerror(code)}; ")
        assert "look in dmesg, or choose another" not in str(raised.value), "there is better advice"


@pytest.mark.parametrize("call", ["open", "pwritev", "fsync", "close", "rename"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
async def test_a_write_that_fails_leaves_the_old_value_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Some file systems say only at the end that there is no room."""
    async with opened(tmp_path / "kv", fsync=True) as backend:
        await backend.write([CHUNK])
        with monkeypatch.context() as failing:
            real = os.close
            if call != "close":
                Failing(failing, call, code)
            else:

                def closing(fd: int) -> None:
                    ours = _is_of_a_chunk(fd)
                    real(fd)
                    if ours:
                        raise OSError(code, os.strerror(code))

                failing.setattr(os, "close", closing)
            if code == errno.EIO:
                with pytest.raises(BackendError, match="Input/output error; the server or the network fails"):
                    await backend.write([NEWER])
            else:
                assert await backend.write([NEWER, NEWER]) == [WriteResult.FULL, WriteResult.FULL]
        assert await value(backend, CHUNK.key, SIZE) == CHUNK.data
        assert await backend.write([NEWER]) == [WriteResult.STORED]
        said = [record.message for record in caplog.records]
        assert len(said) == (code != errno.EIO), "once, not for each chunk"
        assert all("chunks are not stored there until there is room" in line for line in said)
        assert backend.counters()["full"] == (0 if code == errno.EIO else 2)
    assert unfinished(tmp_path / "kv") == []
    assert descriptors(tmp_path) == []


async def test_where_o_direct_is_refused_the_page_cache_is_used_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refusing(name: Any, flags: int, *arguments: Any, **named: Any) -> int:
        fd = real(name, flags, *arguments, **named)
        if flags & os.O_DIRECT:  # as tmpfs did: the file is made all the same
            os.close(fd)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return fd

    monkeypatch.setattr(os, "open", refusing)
    chunks = [make_chunk(make_key(number), SIZE) for number in range(20)]
    async with opened(tmp_path / "kv") as backend:
        assert await backend.write(chunks) == [WriteResult.STORED] * 20
        assert [await value(backend, chunk.key, SIZE) for chunk in chunks] == [bytes(chunk.data) for chunk in chunks]
        assert backend.counters()["buffered_fallback"] == 1
    assert len(files(tmp_path / "kv")) == 20
    async with opened(tmp_path / "kv", direct="always") as backend:
        for call in (backend.write([CHUNK]), value(backend, CHUNK.key, SIZE)):
            with pytest.raises(BackendError, match="the file system refuses O_DIRECT; set `direct: auto`"):
                await call
    assert len(files(tmp_path / "kv")) == 20


async def test_a_value_that_is_replaced_while_it_is_read_is_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of the read the name comes to mean another file."""
    newer = tmp_path / "newer"
    newer.write_bytes(NEWER.data)
    real = os.preadv

    def halves(fd: int, buffers: list[memoryview], offset: int) -> int:
        if not offset:
            os.replace(newer, file_of(tmp_path / "kv", CHUNK.key))
        return real(fd, [buffers[0][: SIZE // 2]], offset)

    async with opened(tmp_path / "kv") as backend:
        await backend.write([CHUNK])
        with monkeypatch.context() as patched:
            patched.setattr(os, "preadv", halves)
            assert await value(backend, CHUNK.key, SIZE) == CHUNK.data
        assert await value(backend, CHUNK.key, SIZE) == NEWER.data


async def test_a_file_that_becomes_shorter_while_it_is_read_is_no_hit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.preadv

    def cutting(fd: int, buffers: list[memoryview], offset: int) -> int:
        os.truncate(file_of(tmp_path / "kv", CHUNK.key), SIZE // 2 - 100)
        return real(fd, buffers, offset)

    for direct in ("always", "never"):
        async with opened(tmp_path / "kv", direct=direct) as backend:
            await backend.write([CHUNK])
            with monkeypatch.context() as patched:
                patched.setattr(os, "preadv", cutting)
                assert await value(backend, CHUNK.key, SIZE) is ReadResult.CORRUPT


async def test_a_size_that_is_old_is_looked_at_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name shows the new file, and for a moment the size of the one before."""
    real = os.fstat
    looks = 0

    def old(fd: int) -> Any:
        nonlocal looks
        if not _is_of_a_chunk(fd):
            return real(fd)
        looks += 1
        status = real(fd)
        return status if looks > 1 else os.stat_result([*status[:6], 1, *status[7:]])

    async with opened(tmp_path / "kv") as backend:
        await backend.write([CHUNK])
        monkeypatch.setattr(os, "fstat", old)
        assert await value(backend, CHUNK.key, SIZE) == CHUNK.data
        assert looks == 2


@pytest.mark.parametrize("kind", ["directory", "link", "fifo", "empty"])
async def test_what_somebody_put_in_a_chunks_place_is_no_hit(tmp_path: Path, kind: str) -> None:
    place = file_of(tmp_path / "kv", CHUNK.key)
    place.parent.mkdir(parents=True)
    secret = tmp_path / "secret"
    secret.write_bytes(CHUNK.data)
    if kind == "directory":
        place.mkdir()
    elif kind == "link":
        place.symlink_to(secret)
    elif kind == "fifo":
        os.mkfifo(place)
    else:
        place.touch()
    async with opened(tmp_path / "kv") as backend:
        assert await backend.contains([CHUNK.key]) == [kind == "empty"]
        if kind == "link":
            with pytest.raises(BackendError, match="a symbolic link is in the way; remove it"):
                await value(backend, CHUNK.key, SIZE)
        else:
            expected = ReadResult.CORRUPT if kind == "empty" else ReadResult.MISS
            assert await value(backend, CHUNK.key, SIZE) is expected
        if kind == "directory":
            with pytest.raises(BackendError, match="something that is none of ours is in the way"):
                await backend.write([CHUNK])
        else:
            assert await backend.write([CHUNK]) == [WriteResult.STORED]
            assert await value(backend, CHUNK.key, SIZE) == CHUNK.data
    assert secret.read_bytes() == CHUNK.data
    assert unfinished(tmp_path / "kv") == []


KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from tests.backends.nfs.kit import opened
from lmcache_core.testing import make_chunk, make_key
real = os.pwritev
def half(fd, buffers, offset):
    if offset:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(fd, [buffers[0][:32768]], offset)
async def main():
    async with opened(Path(sys.argv[1])) as backend:
        await backend.write([make_chunk(make_key(1), 65536)])
        os.pwritev = half
        await backend.write([make_chunk(make_key(1), 65536, version=1)])
asyncio.run(main())
"""


async def test_a_writer_that_is_killed_leaves_the_old_value_and_what_a_sweep_removes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kv"
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(each for each in sys.path if each)}
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], env=paths, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    (half,) = unfinished(path)
    assert (path / half).stat().st_size == SIZE // 2
    async with opened(path) as backend:
        assert await value(backend, CHUNK.key, SIZE) == CHUNK.data
        assert await value(backend, CHUNK.key, SIZE // 2) is ReadResult.CORRUPT
        assert await backend.write([NEWER]) == [WriteResult.STORED]
    assert unfinished(path) == [half], "it may be another host's, which is at it"
    then = os.stat(path / half).st_mtime - sweep.UNFINISHED - HOUR
    os.utime(path / half, (then, then))
    monkeypatch.setattr("lmcache_backends.nfs.session.FIRST", 0.0)
    async with opened(path) as backend:
        await until(lambda: backend.counters()["sweeps"] == 1)
        assert backend.counters()["temporaries_removed"] == 1
        assert await value(backend, CHUNK.key, SIZE) == NEWER.data
    assert files(path) == [str(file_of(Path(), CHUNK.key))]


@pytest.mark.needs_root
async def test_a_file_system_that_is_full_takes_nothing_and_gives_what_it_has(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    image = tmp_path / "image"
    with open(image, "wb") as file:
        file.truncate(24 * MIB)
    try:
        system("mkfs.ext4", "-q", image)
    except FileNotFoundError:
        pytest.skip("mkfs.ext4 is missing: apt-get install e2fsprogs")
    chunks = [make_chunk(make_key(number), MIB) for number in range(40)]
    with mounted(tmp_path / "small", "-o", "loop", image), caplog.at_level(logging.WARNING):
        async with opened(tmp_path / "small" / "kv") as backend:
            results = await backend.write(chunks)
            stored = [chunk for chunk, result in zip(chunks, results, strict=True) if result is WriteResult.STORED]
            assert 5 < len(stored) < 24
            assert results.count(WriteResult.FULL) == 40 - len(stored) == backend.counters()["full"]
            assert unfinished(tmp_path / "small" / "kv") == []
            for chunk in stored:
                assert await value(backend, chunk.key, MIB) == chunk.data
            assert await backend.write([make_chunk(stored[0].key, MIB, version=1)]) == [WriteResult.FULL]
            assert await value(backend, stored[0].key, MIB) == stored[0].data
            await backend.delete([chunk.key for chunk in stored[:4]])
            assert await backend.write(chunks[-1:]) == [WriteResult.STORED]
        (said,) = [record.message for record in caplog.records]
        assert "No space left on device; the file system is full; free some space, or set a smaller `capacity`" in said

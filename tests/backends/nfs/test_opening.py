"""What is at the path when the cache is opened, or comes and goes while it is open."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lmcache_backends.nfs import NfsBackend
from lmcache_backends.nfs.mounts import Mount, is_of_one_machine, mount_of
from lmcache_core import Cache
from lmcache_core.config import InvalidSetting
from lmcache_core.errors import BackendError
from lmcache_core.protocols import ReadResult, WriteResult
from lmcache_core.testing import make_chunk, make_key
from tests.backends.nfs.kit import KIB, Two, descriptors, file_of, files, mounted, opened, options, system, value
from tests.node.kv import CHUNK_TOKENS, PAGE_TOKENS, namespace, retrieve, store, until
from tests.servers import gluster

SIZE = 64 * KIB


async def test_a_mount_point_with_nothing_mounted_is_refused_and_left_empty(tmp_path: Path) -> None:
    point = tmp_path / "mnt"
    point.mkdir()
    for path in (point, point / "kv" / "deeper"):
        with pytest.raises(BackendError) as raised:
            await NfsBackend(options(path, must_be_mounted=True)).open()
        assert f"nfs: {path}: nothing shared is mounted there; it is on " in str(raised.value)
        assert "Mount the shared file system" in str(raised.value)
        assert "`must_be_mounted: false`" in str(raised.value)
    assert list(point.iterdir()) == []


@pytest.mark.needs_root
async def test_a_shared_file_system_is_taken(shared: Two) -> None:
    async with opened(shared.one / "deep" / "er", must_be_mounted=True) as backend:
        assert await backend.write([make_chunk(make_key(1))]) == [WriteResult.STORED]
    assert file_of(shared.true / "deep" / "er", make_key(1)).stat().st_mode & 0o007 == 0


@pytest.mark.needs_root
async def test_nothing_goes_to_the_mount_point_when_it_is_unmounted_meanwhile(
    volume: gluster.Volume, tmp_path: Path
) -> None:
    """A bind mount of the volume, taken away under the open cache."""
    point = tmp_path / "mnt"
    with mounted(point, "--bind", volume.one.path):
        async with opened(point / "unmounted", must_be_mounted=True) as backend:
            assert await backend.write([make_chunk(make_key(1), SIZE)]) == [WriteResult.STORED]
            system("umount", "--lazy", point)
            assert await backend.write([make_chunk(make_key(2), SIZE)]) == [WriteResult.STORED]
            assert await value(backend, make_key(1), SIZE) == make_chunk(make_key(1), SIZE).data
            assert list(point.iterdir()) == []
            with pytest.raises(BackendError, match="nothing shared is mounted there"):
                await backend.open()
    assert list(point.iterdir()) == []
    assert file_of(volume.true.path / "unmounted", make_key(2)).read_bytes() == make_chunk(make_key(2), SIZE).data


@pytest.mark.parametrize(
    ("mount", "alone"),
    [
        (Mount("/mnt/kv", "nfs4", "filer:/kv"), False),
        (Mount("/mnt/kv", "lustre", "10.0.0.1@tcp:/fs"), False),
        (Mount("/mnt/kv", "wekafs", "default"), False),
        (Mount("/mnt/kv", "gpfs", "fs1"), False),
        (Mount("/mnt/kv", "ceph", "a:/"), False),
        (Mount("/mnt/kv", "fuse.glusterfs", "filer:/kv"), False),
        (Mount("/mnt/kv", "virtiofs", "kv"), False),
        (Mount("/mnt", "ext4", "/dev/sdb"), True),
        (Mount("/", "9p", "root"), True),
        (Mount("/", "nfs", "filer:/root"), True),
        (Mount("/tmp", "tmpfs", "tmpfs"), True),
        (Mount("/mnt/kv", "autofs", "auto.kv"), True),
        (Mount("/", "overlay", "overlay"), True),
    ],
)
def test_which_file_systems_are_of_one_machine(mount: Mount, alone: bool) -> None:
    assert is_of_one_machine(mount) == alone


@pytest.mark.needs_root
def test_the_mount_of_a_directory_is_found_whatever_it_is_called(tmp_path: Path) -> None:
    with mounted(tmp_path / "with space\tand tab", "-t", "tmpfs", "a source") as point:
        fd = os.open(point, os.O_RDONLY)
        assert mount_of(fd) == Mount(str(point), "tmpfs", "a source")
        os.close(fd)


@pytest.mark.parametrize("where", ["itself", "above"])
async def test_a_path_through_a_file_can_never_work(tmp_path: Path, where: str) -> None:
    file = tmp_path / "file"
    file.write_text("of somebody")
    path = file if where == "itself" else file / "kv"
    with pytest.raises(InvalidSetting, match="leads to or through a file; write a directory, or remove that file"):
        await NfsBackend(options(path)).open()
    assert file.read_text() == "of somebody"


async def test_a_path_that_is_too_long_can_never_work(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="is too long for a file system; write a shorter one"):
        await NfsBackend(options(tmp_path / ("x" * 300) / "kv")).open()


@pytest.mark.needs_root
async def test_a_read_only_export_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    chunk = make_chunk(make_key(1), SIZE)
    async with opened(tmp_path / "kv") as backend:
        await backend.write([chunk])
    with mounted(tmp_path / "mnt", "--bind", tmp_path):
        system("mount", "-o", "remount,bind,ro", tmp_path / "mnt")
        async with opened(tmp_path / "mnt" / "kv", capacity=2**20, sweep_interval=1.0) as backend:
            assert await value(backend, make_key(1), SIZE) == chunk.data
            assert await backend.contains([make_key(1), make_key(2)]) == [True, False]
            with pytest.raises(BackendError) as raised:
                await backend.write([make_chunk(make_key(2))])
            said = "Read-only file system; the file system is read-only; mount it read-write, or set `write: never`"
            assert said in str(raised.value)
            await backend.touch([make_key(1)])
            await backend.delete([make_key(1)])
            await backend.describe(b"s" * 32, b"{}")
            assert backend.counters()["not_permitted"] == 3
        with pytest.raises(BackendError, match="set `write: never`"):
            await NfsBackend(options(tmp_path / "mnt" / "other")).open()
    assert files(tmp_path / "kv") == [str(file_of(Path(), make_key(1)))]
    assert caplog.records == []


@pytest.mark.needs_root
async def test_what_another_user_may_not_read_or_write_is_said(tmp_path: Path) -> None:
    """Root may all, so a process of another user tries."""
    script = """
import asyncio, os, sys
from pathlib import Path
from tests.backends.nfs.kit import opened
from lmcache_core.errors import BackendError
from lmcache_core.testing import aligned_buffer, make_chunk, make_key
os.setgroups([]); os.setgid(65534); os.setuid(65534)
async def main():
    async with opened(Path(sys.argv[1])) as backend:
        for call in (backend.write([make_chunk(make_key(2))]), backend.read([make_key(1)], [aligned_buffer(16384)])):
            try: print(await call)
            except BackendError as error: print(error)
        await backend.delete([make_key(1)])
        print(backend.counters()["not_permitted"])
asyncio.run(main())
"""
    top = Path("/var/tmp") / f"lmcache-test-{os.getpid()}"  # pytest's own are for root alone
    try:
        async with opened(top) as backend:
            await backend.write([make_chunk(make_key(1))])
        for directory in (top, *(each for each in top.rglob("*") if each.is_dir())):
            directory.chmod(0o755)
        paths = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        done = subprocess.run(
            [sys.executable, "-c", script, str(top)], capture_output=True, text=True, env=paths, timeout=60
        )
    finally:
        shutil.rmtree(top)
    assert done.returncode == 0, done.stderr
    write, read, refused = done.stdout.splitlines()
    assert "Permission denied; let this user write there, run all engines as one user or one group" in write
    assert "Permission denied; let this user read there: run all engines as one user" in read
    assert refused == "1"


async def test_a_directory_that_is_removed_is_said_and_found_again(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    async with opened(path) as backend:
        await backend.write([make_chunk(make_key(1))])
        shutil.rmtree(path)
        with pytest.raises(BackendError, match="the directory was removed or is no longer exported; put it back"):
            await backend.write([make_chunk(make_key(1))])
        with pytest.raises(BackendError, match="the directory was removed"):
            await backend.contains([make_key(1)])
        assert await value(backend, make_key(1), SIZE) is ReadResult.MISS
        await backend.open()
        await backend.write([make_chunk(make_key(1), SIZE)])
        assert await value(backend, make_key(1), SIZE) == make_chunk(make_key(1), SIZE).data


async def test_directories_below_that_are_removed_are_made_again(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    chunk = make_chunk(make_key(1), SIZE)
    async with opened(path) as backend:
        for gone in (file_of(path, chunk.key).parent, file_of(path, chunk.key).parent.parent):
            assert await backend.write([chunk]) == [WriteResult.STORED]
            shutil.rmtree(gone)
            assert await value(backend, chunk.key, SIZE) is ReadResult.MISS
            assert await backend.contains([chunk.key]) == [False]
            await backend.delete([chunk.key])
        assert await backend.write([chunk]) == [WriteResult.STORED]
        assert await value(backend, chunk.key, SIZE) == chunk.data


async def test_opening_and_closing_leaves_nothing_open(tmp_path: Path) -> None:
    for _ in range(5):
        async with opened(tmp_path / "kv") as backend:
            await backend.write([make_chunk(make_key(number)) for number in range(20)])
            await backend.open()
            assert await value(backend, make_key(1), SIZE) is ReadResult.CORRUPT
            assert descriptors(tmp_path) == [str(tmp_path / "kv")]
        assert descriptors(tmp_path) == []


async def test_what_is_remembered_of_uses_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmcache_backends.nfs.backend._REMEMBERED", 10)
    async with opened(tmp_path / "kv") as backend:
        for start in range(0, 60, 20):
            await backend.write([make_chunk(make_key(number)) for number in range(start, start + 20)])
            await backend.touch([make_key(number) for number in range(start, start + 20)])
            assert len(backend._used) == 10


@pytest.mark.needs_root
def test_a_node_has_other_tiers_while_nothing_is_mounted_and_uses_this_one_afterwards(
    volume: gluster.Volume, tmp_path: Path
) -> None:
    point = tmp_path / "mnt"
    point.mkdir()
    file = tmp_path / "node.yaml"
    file.write_text(
        f"chunk_tokens: {CHUNK_TOKENS}\npage_tokens: {PAGE_TOKENS}\ncpu: {{capacity: 1MiB}}\n"
        f"tiers:\n  - {{backend: nfs, path: {point}/node, breaker: {{cooldown: 100ms, max_cooldown: 200ms}}}}\n"
        f"  - {{backend: disk, path: {tmp_path}/disk, capacity: 16MiB, min_free: 0}}\n"
    )
    with Cache.open(file, namespace()) as cache:
        assert "nothing shared is mounted there" in cache.stats().tiers[0].why
        store(cache, "abcd")
        cache.clear(["cpu"])
        assert retrieve(cache, "abcd") == 4
        assert list(point.iterdir()) == []
        with mounted(point, "--bind", volume.one.path):
            until(lambda: cache.stats().tiers[0].up)
            assert store(cache, "efgh")
            cache.clear(["cpu", "disk"])
            assert retrieve(cache, "efgh") == 4
    assert list(point.iterdir()) == []


@pytest.mark.needs_root
def test_a_node_that_only_reads_uses_a_read_only_export(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "node.yaml"
    lines = f"chunk_tokens: {CHUNK_TOKENS}\npage_tokens: {PAGE_TOKENS}\ncpu: {{capacity: 1MiB}}\n"
    tier = "tiers: [{backend: nfs, must_be_mounted: false, path: %s, write: %s}]\n"
    file.write_text(lines + tier % (tmp_path / "kv", "through"))
    with Cache.open(file, namespace()) as cache:
        assert store(cache, "abcdefgh")
    before = files(tmp_path / "kv")
    with mounted(tmp_path / "mnt", "--bind", tmp_path):
        system("mount", "-o", "remount,bind,ro", tmp_path / "mnt")
        file.write_text(lines + tier % (tmp_path / "mnt" / "kv", "never"))
        with Cache.open(file, namespace()) as cache:
            assert retrieve(cache, "abcdefgh") == 8
            store(cache, "ijkl")
            cache.flush(5)
            cache.clear(["cpu"])
            assert retrieve(cache, "abcdefgh") == 8
            assert cache.stats().tiers[0].up
    assert files(tmp_path / "kv") == before
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_closing_ends_all_threads(tmp_path: Path) -> None:
    async def use() -> None:
        async with opened(tmp_path / "kv", capacity=2**20, sweep_interval=1.0) as backend:
            await backend.write([make_chunk(make_key(number)) for number in range(20)])

    for _ in range(3):
        asyncio.run(use())
    until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("nfs")])

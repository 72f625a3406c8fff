"""Several paths share the chunks, and one that fails does not make the others wrong."""

import errno
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from lmcache_backends.disk import DiskBackend, log
from lmcache_core.errors import BackendError, ConfigError
from lmcache_core.protocols import WriteResult
from lmcache_core.testing import aligned_buffer, run_model
from tests.backends.disk.kit import (
    KIB,
    MIB,
    assert_holds,
    assert_lacks,
    chunk,
    copy_of,
    fill,
    opened,
    options,
    order,
    put,
    taken,
)

BIG = 256 * KIB


def test_chunks_are_spread_and_found_again(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a", "b", "c")]
    chunks = [chunk(i, BIG) for i in range(24)]
    with opened(*paths, capacity=6 * MIB) as store:
        fill(store, *chunks)
        assert [taken(path) for path in paths] == [2 * MIB] * 3
        assert put(store, chunk(100, BIG)) == [WriteResult.FULL]
        store.touch([chunks[i].key for i in (5, 3, 4)])
        usage = store.usage()
        assert (usage.nbytes, usage.capacity) == (6 * MIB, 6 * MIB)
    with opened(*paths, capacity=6 * MIB) as store:
        assert store.usage() == usage
        assert order(store) == [chunks[i].key for i in (0, 1, 2, *range(6, 24), 5, 3, 4)]
        assert_holds(store, *chunks)


def test_one_path_that_is_full_leaves_the_others(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a", "b")]
    with opened(*paths, capacity=4 * MIB) as store, opened(paths[0], capacity=2 * MIB) as other:
        store.refresh()
        assert store.usage().capacity == 3 * MIB
        fill(other, *[chunk(100 + i, BIG) for i in range(4)])
        fill(store, *[chunk(i, BIG) for i in range(12)])
        assert [taken(path) for path in paths] == [2 * MIB, 2 * MIB]
        assert put(store, chunk(50, BIG)) == [WriteResult.FULL]


def test_a_crash_between_two_paths_leaves_the_newer_value(tmp_path: Path) -> None:
    """The new value is recorded on one path; the crash comes before the old one's eviction is on the other."""
    a, b = tmp_path / "a", tmp_path / "b"
    with opened(a, b) as store:
        fill(store, chunk(0))
        (was_in,) = [path for path in (a, b) if taken(path)]
        copy_of(was_in, tmp_path / "before")
        fill(store, chunk(0, version=1))
        assert taken(a)
        assert taken(b)
    shutil.rmtree(was_in)
    copy_of(tmp_path / "before", was_in)
    for _ in range(2):
        with opened(a, b) as store:
            assert store.usage().chunks == 1
            assert_holds(store, chunk(0, version=1))


async def test_a_path_that_is_gone_fails_the_tier_until_it_is_back(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").write_text("in the way")
    tier = DiskBackend(options(tmp_path / "a", tmp_path / "b"))
    with pytest.raises(ConfigError, match=f"disk: path {tmp_path}/b is no directory"):
        await tier.open()
    (tmp_path / "b").unlink()
    await tier.open()
    assert await tier.write([chunk(0), chunk(1)]) == [WriteResult.STORED] * 2
    await tier.close()


def test_behaves_like_a_dict_with_paths_and_small_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_FLOOR", 2 * KIB)
    paths = [tmp_path / "a", tmp_path / "b"]
    run_model(lambda: DiskBackend(options(*paths, capacity=64 * MIB, segment=128 * KIB)), persistent=True)
    run_model(lambda: DiskBackend(options(tmp_path / "s", fsync=True, capacity=64 * MIB)), persistent=True)


def test_what_is_deleted_is_gone_from_all_paths(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a", "b")]
    chunks = [chunk(i, BIG) for i in range(8)]
    with opened(*paths) as store:
        fill(store, *chunks)
        store.delete([c.key for c in chunks])
        assert [taken(path) for path in paths] == [0, 0]
    with opened(*paths) as store:
        assert_lacks(store, *chunks)


@pytest.mark.parametrize("verb", ["read", "write", "delete", "touch"])
async def test_what_fails_on_one_path_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    """The tier fails as a whole; its operator has to learn which drive it is."""
    tier = DiskBackend(options(tmp_path / "a", tmp_path / "b", segment=BIG))
    await tier.open()
    chunks = [chunk(i, BIG) for i in range(8)]
    assert await tier.write(chunks) == [WriteResult.STORED] * 8

    def broken(call: Callable[..., int]) -> Callable[..., int]:
        def moved(fd: int, *args: object) -> int:
            if f"{tmp_path}/b/" in os.readlink(f"/proc/self/fd/{fd}"):
                raise OSError(errno.EIO, "Input/output error")
            return call(fd, *args)

        return moved

    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "read": lambda: tier.read([c.key for c in chunks], [aligned_buffer(BIG) for _ in chunks]),
        "write": lambda: tier.write([chunk(i, BIG) for i in range(8, 16)]),
        "delete": lambda: tier.delete([c.key for c in chunks]),
        "touch": lambda: tier.touch([c.key for c in chunks]),
    }
    message = rf"disk: {tmp_path}/b/.*: Input/output error; the drive reports an error"
    with monkeypatch.context() as patch:
        for name in ("pwrite", "pwritev", "preadv"):
            patch.setattr(os, name, broken(getattr(os, name)))
        with pytest.raises(BackendError, match=message):
            await calls[verb]()
    await tier.close()

"""Looking at a cache from outside."""

import asyncio
import os
import time
from pathlib import Path

import pytest

from lmcache_backends.disk import DiskBackend, inspection
from lmcache_backends.disk.inspection import inspect_path
from lmcache_backends.disk.locks import is_locked, locked_files
from lmcache_backends.disk.shard import segment_sizes
from lmcache_core.errors import BackendError
from lmcache_core.protocols import WriteResult
from tests.backends.disk.kit import SIZE, assert_holds, chunk, fill, opened, options, shard_in, tree


def test_all_is_shown_and_nothing_is_changed(tmp_path: Path) -> None:
    chunks = [chunk(i, (1 + i) * SIZE, parent=chunk(i - 1).key.page if i else b"") for i in range(4)]
    with opened(tmp_path) as store:
        fill(store, *chunks)
        store.touch([chunks[1].key])
        store.delete([chunks[3].key])
        before = tree(tmp_path)
        seen = inspect_path(tmp_path)
        assert tree(tmp_path) == before
        (shard,) = seen.shards
        assert shard.owner.startswith(f"{os.getpid()}-")
        assert shard.locked is True
        assert shard.nbytes >= 6 * SIZE
        assert (shard.damaged, shard.lost) == (0, 0)
        assert [entry.stored for entry in shard.entries] == [entry.stored() for entry in store.entries()]
        for entry, wanted in zip(seen.entries(), [chunks[i] for i in (0, 2, 1)], strict=True):
            assert entry.stored.parent == wanted.parent
            with open(entry.file, "rb") as file:
                assert os.pread(file.fileno(), entry.stored.nbytes, entry.offset) == wanted.data
            assert 0 <= time.time() - entry.used < 60
        assert_holds(store, *chunks[:3])
    (shard,) = inspect_path(tmp_path).shards
    assert shard.locked is False
    assert len(shard.entries) == 3


def test_a_lock_on_another_file_system_is_not_ours(tmp_path: Path) -> None:
    with opened(tmp_path):
        lock = os.fspath(shard_in(tmp_path) / "lock")
        everywhere = locked_files()
        assert everywhere is not None
        assert is_locked(lock, everywhere) is True
        inode = os.stat(lock).st_ino
        ours = {file for file in everywhere if file[2] == inode and is_locked(lock, frozenset({file}))}
        assert len(ours) == 1
        ((major, minor, _),) = ours
        elsewhere = frozenset({(major, minor + 1, inode), (major + 1, minor, inode), (major, minor, inode + 1)})
        assert is_locked(lock, elsewhere) is False


def test_a_segment_made_while_one_looks_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path, segment=SIZE) as store:
        fill(store, chunk(0))
        looked: list[str] = []

        def sizes(path: str) -> dict[int, int]:
            found = segment_sizes(path)
            if not looked:
                fill(store, chunk(1))
            looked.append(path)
            return found

        monkeypatch.setattr(inspection, "segment_sizes", sizes)
        (shard,) = inspect_path(tmp_path).shards
        assert (shard.lost, len(shard.entries)) == (0, 2)
        assert len(looked) <= 3


async def test_manifests_are_kept_replaced_and_shown(tmp_path: Path) -> None:
    spaces = [bytes([i]) * 32 for i in range(2)]
    tier = DiskBackend(options(tmp_path))
    await tier.open()
    assert await tier.manifests() == {}
    await tier.describe(spaces[0], b'{"model": "old"}')
    await tier.describe(spaces[0], b'{"model": "a"}')
    await tier.describe(spaces[1], b'{"model": "b"}')
    expected = {spaces[0]: b'{"model": "a"}', spaces[1]: b'{"model": "b"}'}
    assert await tier.manifests() == expected
    assert await tier.write([chunk(0)]) == [WriteResult.STORED]
    await tier.close()
    await tier.open()
    assert await tier.manifests() == expected
    await tier.close()
    assert (await asyncio.to_thread(inspect_path, tmp_path)).manifests == expected
    notes = tmp_path / "manifests" / "notes.tmp"
    notes.write_text("somebody's own")
    (tmp_path / "manifests" / f"{spaces[0].hex()}.json.0123abcd.tmp").write_text('{"model')
    await tier.open()
    assert tier.counters()["orphans_removed"] == 1
    assert await tier.manifests() == expected
    await tier.close()
    notes.unlink()
    assert sorted(file.suffix for file in (tmp_path / "manifests").iterdir()) == [".json", ".json"]


def test_half_made_and_damaged_shards_are_shown(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        fill(store, chunk(0), chunk(1), chunk(2))
    (shard,) = inspect_path(tmp_path).shards
    log = shard.entries[0].file.with_name("log")
    content = bytearray(log.read_bytes())
    content[content.index(chunk(1).key.page)] ^= 1
    log.write_bytes(content)
    (tmp_path / "0123456789abcdef").mkdir()
    empty, damaged = sorted(inspect_path(tmp_path).shards, key=lambda shard: len(shard.entries))
    assert (empty.name, empty.owner, empty.locked, empty.entries) == ("0123456789abcdef", "", None, ())
    assert damaged.damaged == 1
    assert [entry.stored.key for entry in damaged.entries] == [chunk(0).key, chunk(2).key]


def test_a_path_without_a_cache(tmp_path: Path) -> None:
    assert inspect_path(tmp_path) == ((), {})
    with pytest.raises(BackendError, match=f"disk: {tmp_path}/none: "):
        inspect_path(tmp_path / "none")

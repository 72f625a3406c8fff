"""Things that are not what they should be where the cache has its files: what they stand for is left out, what is
beside them works, and nothing hangs."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lmcache_backends.disk.inspection import inspect_path
from lmcache_core.errors import BackendError, ConfigError
from lmcache_core.protocols import WriteResult
from tests.backends.disk.kit import (
    KIB,
    SIZE,
    OpenStore,
    assert_holds,
    assert_lacks,
    chunk,
    fill,
    opened,
    options,
    put,
    shard_in,
    taken,
)

Odd = Callable[[Path], None]


def directory(path: Path) -> None:
    path.mkdir()
    (path / "own").write_text("somebody's")


def link(path: Path) -> None:
    path.symlink_to("nowhere")


ODD: list[Odd] = [directory, os.mkfifo, link]
named = pytest.mark.parametrize("odd", ODD, ids=["directory", "fifo", "link"])


def two_shards(path: Path, **changes: Any) -> tuple[Path, Path]:
    """The shards of two owners that have ended, of chunk 0 and of chunk 1."""
    with opened(path, **changes) as a, opened(path, **changes) as b:
        for number, store in enumerate((a, b)):
            fill(store, chunk(number))
        found = tuple(Path(store._volumes[0].shards[0].path) for store in (a, b))
    return found[0], found[1]


def values(shard: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in shard.glob("segment-*")}


def replace(path: Path, odd: Odd) -> None:
    path.unlink(missing_ok=True)
    odd(path)


@named
@pytest.mark.parametrize("name", ["lock", "log"])
def test_a_shard_with_something_odd_in_it_is_left_out(tmp_path: Path, name: str, odd: Odd) -> None:
    whole, broken = two_shards(tmp_path)
    replace(broken / name, odd)
    before = values(broken)
    with opened(tmp_path) as store:
        assert store.count("shards_unreadable") == 1
        assert_holds(store, chunk(0))
        assert_lacks(store, chunk(1))
        fill(store, chunk(2))
        store.delete([chunk(0).key])
        store.describe(b"s" * 32, b"{}")
        store.refresh()
        assert_holds(store, chunk(2))
    assert values(broken) == before
    inspected = {shard.name: shard for shard in inspect_path(tmp_path).shards}
    assert (inspected[broken.name].readable, inspected[broken.name].entries) == (False, ())
    assert inspected[broken.name].locked in (False, None)
    assert [entry.stored.key for entry in inspected[whole.name].entries] == [chunk(2).key]


def test_a_directory_in_the_place_of_a_new_log_leaves_the_shard_out(tmp_path: Path) -> None:
    _, broken = two_shards(tmp_path)
    directory(broken / "log.new")
    with opened(tmp_path) as store:
        assert store.count("shards_unreadable") == 1
        assert_holds(store, chunk(0))
    (broken / "log.new" / "own").unlink()
    (broken / "log.new").rmdir()
    with opened(tmp_path) as store:
        assert store.count("shards_unreadable") == 0
        assert_holds(store, chunk(0), chunk(1))


def test_values_of_a_shard_whose_log_is_none_make_room(tmp_path: Path) -> None:
    small = {"capacity": 2 * SIZE, "segment": SIZE}
    _, broken = two_shards(tmp_path, **small)
    replace(broken / "log", directory)
    with opened(tmp_path, **small) as store:
        fill(store, chunk(2))
        assert_holds(store, chunk(0), chunk(2))
        assert store.count("shards_evicted") == 1
        assert put(store, chunk(3)) == [WriteResult.FULL]
        assert store.count("shards_evicted") == 1
    assert values(broken) == {}
    assert (broken / "log" / "own").read_text() == "somebody's"


def test_a_shard_that_cannot_be_locked_counts_for_what_it_takes(tmp_path: Path) -> None:
    _, broken = two_shards(tmp_path)
    replace(broken / "lock", directory)
    size = taken(tmp_path)
    with opened(tmp_path, capacity=size) as store:
        assert_holds(store, chunk(0))
        assert store.usage().capacity == size, "it is nobody's"
        while put(store, chunk(store.usage().chunks + 1, 64 * KIB)) == [WriteResult.STORED]:
            pass
        assert taken(tmp_path) == size
        assert store.count("shards_evicted") == 0


def test_a_segment_is_made_beside_what_has_its_name(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        directory(shard_in(tmp_path) / "segment-00000001")
        link(shard_in(tmp_path) / "segment-00000002")
        fill(store, chunk(0))
    with opened(tmp_path) as store:
        assert_holds(store, chunk(0))
        assert {path.name for path in shard_in(tmp_path).glob("segment-*") if path.is_file()} == {"segment-00000003"}


@named
def test_something_odd_in_the_place_of_the_lock_of_all_is_named(tmp_path: Path, odd: Odd) -> None:
    odd(tmp_path / "node.lock")
    with pytest.raises(BackendError, match=f"disk: {tmp_path}/node.lock: .*in the way; remove it"):
        OpenStore(options(tmp_path))


@pytest.mark.parametrize("odd", [Path.touch, os.mkfifo, link], ids=["file", "fifo", "link"])
def test_without_a_place_for_descriptions_all_else_works(tmp_path: Path, odd: Odd) -> None:
    odd(tmp_path / "manifests")
    with opened(tmp_path) as store:
        fill(store, chunk(0))
        with pytest.raises(BackendError, match=rf"disk: {tmp_path}/manifests: is no directory; .* in the way"):
            store.describe(b"s" * 32, b"{}")
        assert store.manifests() == {}
        assert_holds(store, chunk(0))
    assert inspect_path(tmp_path).manifests == {}


@named
def test_an_odd_description_is_passed_over(tmp_path: Path, odd: Odd) -> None:
    with opened(tmp_path) as store:
        store.describe(b"s" * 32, b"{}")
    odd(tmp_path / "manifests" / f"{b'a'.hex() * 32}.json")
    odd(tmp_path / "manifests" / f"{b'b'.hex() * 32}.json.01234567.tmp")
    with opened(tmp_path) as store:
        assert store.manifests() == {b"s" * 32: b"{}"}


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("file", "is no directory; write one, or remove what is there"),
        ("file/kv", "leads through a file; write a directory, or remove that file"),
        ("x" * 300, "is too long for a file system; write a shorter one"),
        ("/proc/kv", "is on proc, which keeps no files; write a directory on a drive"),
        ("/proc/self/fd", "is on proc, which keeps no files"),
        ("/sys/kernel/kv", "is on sysfs, which keeps no files"),
    ],
)
def test_a_path_that_never_can_work_is_a_mistake_of_the_configuration(tmp_path: Path, path: str, problem: str) -> None:
    (tmp_path / "file").write_text("in the way")
    wanted = tmp_path / path
    with pytest.raises(ConfigError, match=f"^disk: path {wanted} {problem}"):
        OpenStore(options(wanted))

"""Rewriting the log: when, what stays, and a crash or failure at any step."""

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lmcache_backends.disk import log
from lmcache_backends.disk.records import HEAD
from lmcache_core.errors import BackendError
from lmcache_core.protocols import WriteResult
from tests.backends.disk.kit import (
    KIB,
    OpenStore,
    assert_holds,
    assert_lacks,
    chunk,
    fill,
    opened,
    order,
    put,
    shard_in,
)

CALLS = ["open", "pwrite", "pread", "posix_fallocate", "fsync", "fdatasync", "fstat", "rename", "close"]
SMALL = 4 * KIB


@pytest.fixture(autouse=True)
def small_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_FLOOR", 2 * KIB)
    monkeypatch.setattr(log, "_STEP", 4 * KIB)
    monkeypatch.setattr(log, "_RESERVE", KIB)


def churn(store: OpenStore) -> None:
    """Use a few chunks until one more touch makes their log due."""
    fill(store, *[chunk(i, SMALL) for i in range(8)])
    store.delete([chunk(7).key])
    (shard,) = store._volumes[0].shards
    while not shard.log.end + 60 > max(2 * KIB, 2 * shard.live):
        store.touch([chunk(i).key for i in (4, 2)])
    assert store.count("compactions") == 0


def test_at_twice_its_live_size_the_log_is_rewritten(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        churn(store)
        before = order(store)
        store.touch([chunk(2).key])
        assert store.count("compactions") == 1
        (shard,) = store._volumes[0].shards
        assert shard.log.end == len(HEAD) + shard.live
        assert order(store) == before
        fill(store, chunk(9, SMALL))
    with opened(tmp_path) as store:
        assert order(store) == [*before, chunk(9).key]
        assert_holds(store, *[chunk(i, SMALL) for i in (0, 1, 2, 3, 4, 5, 6, 9)])
        assert_lacks(store, chunk(7, SMALL))


def test_a_log_never_grows_far_beyond_twice_its_live_size(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        (shard,) = store._volumes[0].shards
        for number in range(300):
            fill(store, chunk(number % 20, SMALL, version=number))
            assert shard.log.end <= max(2 * KIB, 2 * shard.live) + KIB
        assert store.count("compactions") > 5
    with opened(tmp_path) as store:
        assert_holds(store, *[chunk(i % 20, SMALL, version=i) for i in range(280, 300)])


class Steps:
    """Does something at the calls to the system that one rewrite makes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: Callable[[int, str], None]) -> None:
        self.number = 0
        self.on = False
        self.at = at
        for name in CALLS:
            monkeypatch.setattr(os, name, self.wrapped(name, getattr(os, name)))

    def wrapped(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if self.on:
                self.on = False
                self.number += 1
                try:
                    self.at(self.number, name)
                finally:
                    self.on = True
            return call(*args, **kwargs)

        return wrapper


@pytest.mark.parametrize("fsync", [False, True])
def test_a_crash_at_any_step_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fsync: bool) -> None:
    seen: list[str] = []

    def crash(number: int, name: str) -> None:
        seen.append(name)
        shutil.copytree(tmp_path / "a", tmp_path / f"crash-{number}")

    steps = Steps(monkeypatch, crash)
    with opened(tmp_path / "a", fsync=fsync) as store:
        churn(store)
        expected = order(store)
        steps.on = True
        store._compact(store._volumes[0].shards[0])
        assert not seen, "not due yet"
        store.touch([expected[-1]])  # it stays the last
        steps.on = False
        assert store.count("compactions") == 1
    assert {"open", "pwrite", "fsync", "rename", "close"} <= set(seen)
    for number in range(1, len(seen) + 1):
        path = tmp_path / f"crash-{number}"
        with opened(path) as store:
            assert order(store) == expected, f"crash before {seen[number - 1]}, call {number}"
            assert store.count("log_records_damaged") == store.count("log_tails_cut") == 0
            assert_holds(store, *[chunk(i, SMALL) for i in range(7)])
            assert_lacks(store, chunk(7, SMALL))
            assert not (shard_in(path) / "log.new").exists()


@pytest.mark.parametrize("name", [name for name in CALLS if name not in ("pread", "fdatasync", "close")])
def test_a_rewrite_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    class Failure(OSError):
        pass

    def fail(number: int, called: str) -> None:
        if called == name and (shard_in(tmp_path) / "log.new").exists() == (name != "open"):
            raise Failure(28, "No space left on device")

    with opened(tmp_path) as store:
        churn(store)
        (shard,) = store._volumes[0].shards
        store._compact(shard)
        shard.log.damaged = True  # due, without another record
        expected = order(store)
        with pytest.MonkeyPatch.context() as patch:
            steps = Steps(patch, fail)
            steps.on = True
            store._compact(shard)
            steps.on = False
        assert store.count("compactions_failed") == 1
        assert not (shard_in(tmp_path) / "log.new").exists()
        store.touch(expected)
        fill(store, chunk(9, SMALL))
        assert store.count("compactions_failed") <= 1, "it is not tried again at once"
        assert_holds(store, chunk(9, SMALL), *[chunk(i, SMALL) for i in range(7)])
    with opened(tmp_path) as store:
        assert order(store) == [*expected, chunk(9).key]


def test_what_happens_during_a_rewrite_is_in_the_new_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks are stored, replaced, deleted, touched and read while the new log is being filled."""
    reached, go_on = threading.Event(), threading.Event()
    fill_log = log.Rewrite.fill

    def slowly(self: log.Rewrite, live: Any) -> None:
        fill_log(self, live)
        reached.set()
        assert go_on.wait(30)

    monkeypatch.setattr(log.Rewrite, "fill", slowly)
    with opened(tmp_path) as store:
        churn(store)
        thread = threading.Thread(target=store.touch, args=([chunk(2).key],))
        thread.start()
        assert reached.wait(30)
        fill(store, chunk(9, SMALL), chunk(3, SMALL, version=1))
        store.delete([chunk(0).key])
        store.touch([chunk(1).key])
        assert_holds(store, chunk(5, SMALL))
        go_on.set()
        thread.join(30)
        assert store.count("compactions") == 1
        now = order(store)
        assert now == [chunk(i).key for i in (5, 6, 4, 2, 9, 3, 1)]
    with opened(tmp_path) as store:
        assert order(store) == now
        assert_holds(store, chunk(9, SMALL), chunk(3, SMALL, version=1), chunk(1, SMALL))
        assert_lacks(store, chunk(0, SMALL))


@contextmanager
def failing_syncs(*names: str) -> Iterator[None]:
    """The drive does not confirm that it has a file of one of these names; the kernel says so once for each file that
    is not a new one, and takes it for written afterwards."""
    told: set[str] = set()

    def wrapped(call: Callable[[int], None]) -> Callable[[int], None]:
        def sync(fd: int) -> None:
            name = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
            if name in names and name not in told:
                told.update({name} - {"log.new"})
                raise OSError(5, "Input/output error")
            call(fd)

        return sync

    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "fdatasync"):
            patch.setattr(os, name, wrapped(getattr(os, name)))
        yield


def test_a_log_that_cannot_be_made_durable_is_written_anew(tmp_path: Path) -> None:
    with opened(tmp_path, fsync=True, capacity=4 * SMALL, segment=4 * SMALL) as store:
        fill(store, chunk(0, SMALL))
        with failing_syncs("log"):
            fill(store, chunk(1, SMALL))
        assert store.count("compactions") == 1
        with failing_syncs("log"):
            store.delete([chunk(0, SMALL).key])
        assert store.count("compactions") == 2
        fill(store, *[chunk(i, SMALL) for i in (2, 3, 4)])
        assert_holds(store, *[chunk(i, SMALL) for i in (1, 2, 3, 4)])


def test_while_no_log_can_be_made_durable_nothing_is_and_no_place_is_lost(tmp_path: Path) -> None:
    with opened(tmp_path, fsync=True, capacity=4 * SMALL, segment=4 * SMALL) as store:
        fill(store, *[chunk(i, SMALL) for i in range(3)])
        with (
            failing_syncs("log", "log.new"),
            pytest.raises(BackendError, match=r"/log: .*; the drive reports an error"),
        ):
            put(store, chunk(0, SMALL, version=1))  # in the fourth place; the first is not free yet
        with failing_syncs("log.new"), pytest.raises(BackendError, match="could not be made durable"):
            store.delete([chunk(1).key])
        assert_lacks(store, chunk(1, SMALL))
        with failing_syncs("log.new"):
            assert put(store, chunk(5, SMALL)) == [WriteResult.FULL], "of neither is it known that it may be used again"
        store.delete([chunk(2).key])
        assert store.count("compactions") == 1
        fill(store, *[chunk(i, SMALL) for i in (5, 6, 7)])
        assert_holds(store, chunk(0, SMALL, version=1), *[chunk(i, SMALL) for i in (5, 6, 7)])
    with opened(tmp_path, fsync=True, capacity=4 * SMALL, segment=4 * SMALL) as store:
        assert_holds(store, chunk(0, SMALL, version=1), *[chunk(i, SMALL) for i in (5, 6, 7)])


def test_a_new_log_whose_name_is_not_durable_is_not_trusted(tmp_path: Path) -> None:
    with opened(tmp_path, fsync=True) as store:
        churn(store)
        with failing_syncs(shard_in(tmp_path).name):
            store.touch([chunk(2).key])
        assert store.count("compactions_failed") == 1
        with failing_syncs("log.new"), pytest.raises(BackendError, match="could not be made durable"):
            put(store, chunk(9, SMALL))
        fill(store, chunk(9, SMALL))
        assert store.count("compactions") == 1
        assert_holds(store, chunk(2, SMALL), chunk(9, SMALL))


def test_a_write_beside_one_that_could_not_be_made_durable_is_not_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads wait for one file, and the kernel tells only one of them."""
    both, told = threading.Barrier(2), threading.Event()
    sync = os.fdatasync

    def synced(fd: int) -> None:
        if "segment" in os.readlink(f"/proc/self/fd/{fd}"):
            if both.wait(30) == 0:
                told.set()
                raise OSError(5, "Input/output error")
            assert told.wait(30)
            time.sleep(0.05)  # so that the failure is noted first; the outcome must be right in either order
        sync(fd)

    with opened(tmp_path, fsync=True, segment=64 * KIB) as store, ThreadPoolExecutor(2) as threads:
        fill(store, chunk(9, SMALL))
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", synced)
            writes = [threads.submit(put, store, chunk(i, SMALL)) for i in range(2)]
            for write in writes:
                assert isinstance(write.exception(60), BackendError)
        assert_lacks(store, chunk(0, SMALL), chunk(1, SMALL))
        fill(store, *[chunk(i, SMALL) for i in range(2)])
        assert_holds(store, *[chunk(i, SMALL) for i in (0, 1, 9)])

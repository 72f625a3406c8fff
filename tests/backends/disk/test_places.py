"""When a place may be used again: not before its evict record is written and its readers are gone, and always then."""

import errno
import os
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lmcache_backends.disk.records import Reader
from lmcache_backends.disk.replay import Replay
from lmcache_backends.disk.shard import seed_of, segment_sizes
from lmcache_core.errors import BackendError
from lmcache_core.protocols import ReadResult, WriteResult
from tests.backends.disk.kit import (
    KIB,
    MIB,
    SIZE,
    OpenStore,
    assert_holds,
    assert_lacks,
    chunk,
    fill,
    get,
    opened,
    order,
    put,
    shard_in,
    taken,
)

ONE_PLACE = {"capacity": SIZE, "segment": SIZE}


class Gate:
    """Stops the next call of a function of `os` until it is told to go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        call = getattr(os, name)

        def gated(*args: Any) -> Any:
            if not self.reached.is_set():
                self.reached.set()
                assert self.go_on.wait(30)
            return call(*args)

        monkeypatch.setattr(os, name, gated)


@contextmanager
def failing(name: str, number: int, *, only: str = "") -> Iterator[None]:
    """Calls of a function of `os` fail, if `only` is in the name of the file they are for."""
    call = getattr(os, name)

    def failed(fd: int, *args: Any) -> Any:
        if only in os.path.basename(os.readlink(f"/proc/self/fd/{fd}")):
            raise OSError(number, os.strerror(number))
        return call(fd, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, name, failed)
        yield


def test_a_place_that_is_read_is_not_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch, "preadv")
    with opened(tmp_path, **ONE_PLACE) as store, ThreadPoolExecutor() as threads:
        fill(store, chunk(0))
        reading = threads.submit(get, store, chunk(0).key)
        assert gate.reached.wait(30)
        store.delete([chunk(0).key])
        assert_lacks(store, chunk(0))
        assert store.usage().nbytes == 0
        assert put(store, chunk(1)) == [WriteResult.FULL]
        gate.go_on.set()
        assert reading.result() == bytes(chunk(0).data), "a read that had begun is not disturbed"
        fill(store, chunk(1))
        assert_holds(store, chunk(1))


def test_an_old_value_that_is_read_is_not_overwritten_by_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, "preadv")
    with opened(tmp_path, capacity=2 * SIZE, segment=SIZE) as store, ThreadPoolExecutor() as threads:
        fill(store, chunk(0))
        reading = threads.submit(get, store, chunk(0).key)
        assert gate.reached.wait(30)
        fill(store, chunk(0, version=1))
        assert put(store, chunk(0, version=2)) == [WriteResult.FULL]
        gate.go_on.set()
        assert reading.result() == bytes(chunk(0).data)
        assert_holds(store, chunk(0, version=1))
        fill(store, chunk(0, version=2))
        assert_holds(store, chunk(0, version=2))


def test_a_value_is_found_only_when_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as store, ThreadPoolExecutor() as threads:
        fill(store, chunk(1))
        gate = Gate(monkeypatch, "pwritev")
        writing = threads.submit(put, store, chunk(0))
        assert gate.reached.wait(30)
        assert_lacks(store, chunk(0))
        assert not store.contains(chunk(0).key)
        with Path(shard_in(tmp_path), "log").open("rb") as log:
            assert chunk(0).key.page not in log.read(), "the record follows the value"
        gate.go_on.set()
        assert writing.result() == [WriteResult.STORED]
        assert_holds(store, chunk(0), chunk(1))


@pytest.mark.parametrize("changes", [{}, {"fsync": True}, {"segment": 64 * KIB}])
def test_at_no_time_does_a_write_touch_what_the_log_says_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object]
) -> None:
    """A crash in the middle of any write leaves every chunk that the log speaks of whole."""
    write = os.pwritev
    writes = 0

    def checked(fd: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal writes
        writes += 1
        file = Path(os.readlink(f"/proc/self/fd/{fd}"))
        log = os.open(file.with_name("log"), os.O_RDONLY)
        replay = Replay(segment_sizes(os.fspath(file.parent)))
        replay.apply(Reader(log, seed_of(os.fspath(file.parent))))
        os.close(log)
        number, end = int(file.name[-8:], 16), offset + sum(buffer.nbytes for buffer in buffers)
        for entry in replay.by_place.values():
            apart = entry.segment != number or entry.offset >= end or entry.offset + entry.nbytes <= offset
            assert apart, "a place that is in use is written to"
        return write(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", checked)
    rng = random.Random(2)
    with opened(tmp_path, capacity=MIB, **changes) as store:
        for number in range(200):
            (result,) = put(store, chunk(rng.randrange(24), 4 * KIB * rng.randrange(1, 24), version=number))
            if result is WriteResult.FULL or rng.random() < 0.1:
                store.delete(rng.sample(order(store), len(order(store)) // 3))
    assert writes > 150


def test_many_threads_on_few_keys_see_whole_values_and_leak_nothing(tmp_path: Path) -> None:
    allowed = {(i, v): bytes(chunk(i, SIZE, version=v).data) for i in range(3) for v in range(4)}

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(150):
            number = rng.randrange(3)
            match rng.randrange(4):
                case 0:
                    store.delete([chunk(number).key])
                case 1:
                    put(store, chunk(number, version=rng.randrange(4)))
                case _:
                    found = get(store, chunk(number).key)
                    assert found is ReadResult.MISS or found in [allowed[number, v] for v in range(4)]

    with opened(tmp_path, capacity=8 * SIZE, segment=2 * SIZE) as store:
        with ThreadPoolExecutor(6) as threads:
            list(threads.map(work, range(6)))
        left = {key: get(store, key) for key in order(store)}
        store.delete(list(left)[:1])
        assert store._volumes[0].shards[0].taken == SIZE * (len(left) - len(list(left)[:1]))
    with opened(tmp_path, capacity=8 * SIZE, segment=2 * SIZE) as store:
        assert {key: get(store, key) for key in order(store)} == dict(list(left.items())[1:])


def assert_one_place(store: OpenStore) -> None:
    """The only place there is can be used."""
    assert store.usage().nbytes == 0
    assert_lacks(store, chunk(0))
    fill(store, chunk(0))
    assert_holds(store, chunk(0))


@pytest.mark.parametrize(("call", "file"), [("pwritev", "segment"), ("pwrite", "log"), ("stat", "log")])
def test_a_failed_write_leaks_no_place_and_stores_nothing(tmp_path: Path, call: str, file: str) -> None:
    with opened(tmp_path, **ONE_PLACE) as store:
        for _ in range(3):
            fault = _replaced(tmp_path) if call == "stat" else failing(call, errno.EIO, only=file)
            with fault, pytest.raises(BackendError, match=r"disk: /.*: .*; "):
                put(store, chunk(0))
            assert_lacks(store, chunk(0))
        assert_one_place(store)


@contextmanager
def _replaced(path: Path) -> Iterator[None]:
    """Another file is where the log was."""
    log = shard_in(path) / "log"
    log.rename(log.with_name("aside"))
    log.write_bytes(b"")
    yield
    log.with_name("aside").rename(log)


@pytest.mark.parametrize(("call", "file"), [("pwritev", "segment"), ("pwrite", "log")])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_no_room_is_full_and_no_failure(tmp_path: Path, call: str, file: str, number: int) -> None:
    with opened(tmp_path, **ONE_PLACE) as store:
        with failing(call, number, only=file):
            assert put(store, chunk(0)) == [WriteResult.FULL]
        assert store.count("enospc") == 1
        assert_one_place(store)


def test_an_eviction_that_cannot_be_recorded_did_not_happen(tmp_path: Path) -> None:
    with opened(tmp_path, **ONE_PLACE) as store:
        fill(store, chunk(0))
        with failing("pwrite", errno.EIO, only="log"), pytest.raises(BackendError, match="the drive reports an error"):
            store.delete([chunk(0).key])
        assert_holds(store, chunk(0))
        assert put(store, chunk(1)) == [WriteResult.FULL]
        store.delete([chunk(0).key])
        fill(store, chunk(1))
    with opened(tmp_path, **ONE_PLACE) as store:
        assert_holds(store, chunk(1))
        assert_lacks(store, chunk(0))


def test_a_read_error_is_a_failure_and_leaves_the_chunk(tmp_path: Path) -> None:
    with opened(tmp_path, **ONE_PLACE) as store:
        fill(store, chunk(0))
        with failing("preadv", errno.EIO), pytest.raises(BackendError, match=r"segment-00000001: .*; the drive"):
            get(store, chunk(0).key)
        assert_holds(store, chunk(0))
        store.delete([chunk(0).key])
        assert_one_place(store)


def test_a_file_cut_short_while_open_is_corrupt(tmp_path: Path) -> None:
    with opened(tmp_path, capacity=2 * SIZE, segment=2 * SIZE) as store:
        fill(store, chunk(0), chunk(1))
        os.truncate(shard_in(tmp_path) / "segment-00000001", SIZE + 4096)
        assert_holds(store, chunk(0))
        assert get(store, chunk(1).key) is ReadResult.CORRUPT


def test_short_reads_and_writes_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, write, append = os.preadv, os.pwritev, os.pwrite
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: read(fd, [views[0][:4096]], at))
    monkeypatch.setattr(os, "pwritev", lambda fd, views, at: write(fd, [views[0][:8192]], at))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: append(fd, data[:7], at))
    with opened(tmp_path) as store:
        fill(store, chunk(0), chunk(1))
        assert_holds(store, chunk(0), chunk(1))
    with opened(tmp_path) as store:
        assert_holds(store, chunk(0), chunk(1))
        assert store.count("buffered_fallback") == 0


@pytest.mark.parametrize("opening", [1, 2, 3])
def test_a_segment_that_cannot_be_opened_for_want_of_descriptors_is_no_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opening: int
) -> None:
    """Else it would take room that no owner knows of."""
    open_ = os.open
    left = opening

    def opened_(path: Any, *args: Any, **named: Any) -> int:
        nonlocal left
        left -= "segment-" in os.fspath(path)
        if not left:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return open_(path, *args, **named)

    with opened(tmp_path, **ONE_PLACE) as store:
        monkeypatch.setattr(os, "open", opened_)
        with pytest.raises(BackendError, match="raise `ulimit -n`"):
            put(store, chunk(0))
        assert taken(tmp_path) == 0
        left = 1000
        assert_one_place(store)

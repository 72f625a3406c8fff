"""Several processes, or several openings of one, on one path: each has its shards, and the capacity is for all."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lmcache_backends.disk import store as store_module
from lmcache_core.protocols import WriteResult
from tests.backends.disk.kit import (
    KIB,
    MIB,
    OpenStore,
    assert_holds,
    assert_lacks,
    chunk,
    fill,
    opened,
    options,
    order,
    put,
    taken,
)

BIG = 256 * KIB
CAPACITY = 4 * MIB


@pytest.fixture(autouse=True)
def look_up_owners_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "REFRESH", 0.0)


def shards(path: Path) -> set[str]:
    return {found.name for found in path.iterdir() if len(found.name) == 16}


def test_two_owners_share_the_capacity(tmp_path: Path) -> None:
    with opened(tmp_path, capacity=CAPACITY) as a:
        assert a.usage().capacity == CAPACITY
        with opened(tmp_path, capacity=CAPACITY) as b:
            a.refresh()
            assert (a.usage().capacity, b.usage().capacity) == (CAPACITY // 2, CAPACITY // 2)
            for number, owner in enumerate((a, b)):
                results = put(owner, *[chunk(100 * number + i, BIG) for i in range(12)])
                assert results == [WriteResult.STORED] * 8 + [WriteResult.FULL] * 4
            assert taken(tmp_path) == CAPACITY
            assert_lacks(b, chunk(0, BIG))
        a.touch([chunk(0).key])
        assert a.usage().capacity == CAPACITY
        with opened(tmp_path, capacity=CAPACITY) as c:
            assert_holds(c, *[chunk(100 + i, BIG) for i in range(8)])
            assert c.count("shards_adopted") == 1
    with opened(tmp_path, capacity=CAPACITY) as d:
        assert_holds(d, *[chunk(n, BIG) for i in range(8) for n in (i, 100 + i)])
        assert d.usage().nbytes == CAPACITY
        assert d.count("shards_adopted") == 2
        assert put(d, chunk(50, BIG)) == [WriteResult.FULL]


def test_who_has_too_much_gives_back_what_it_evicts(tmp_path: Path) -> None:
    with opened(tmp_path, capacity=CAPACITY) as a:
        fill(a, *[chunk(i, BIG) for i in range(16)])
        with opened(tmp_path, capacity=CAPACITY) as b:
            assert put(b, chunk(100, BIG)) == [WriteResult.FULL]
            a.refresh()
            while a.usage().nbytes > (a.usage().capacity or 0):
                a.delete(order(a)[:1])
            assert a.usage().chunks == 8
            fill(b, *[chunk(100 + i, BIG) for i in range(8)])
            assert put(b, chunk(200, BIG)) == [WriteResult.FULL]
            assert taken(tmp_path) == CAPACITY
            assert_holds(a, *[chunk(i, BIG) for i in range(8, 16)])


def test_empty_segments_are_given_back_but_for_one(tmp_path: Path) -> None:
    with opened(tmp_path, capacity=CAPACITY) as store:
        fill(store, *[chunk(i, BIG) for i in range(16)])
        store.delete([chunk(i).key for i in range(8)])
        assert taken(tmp_path) == 9 * BIG
        store.delete([chunk(i).key for i in range(8, 16)])
        assert taken(tmp_path) == 0
        assert store.count("segments_given_back") == 16


def test_what_nobody_holds_is_evicted_before_a_store_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path, capacity=CAPACITY) as a:
        with opened(tmp_path, capacity=CAPACITY) as b:
            fill(b, *[chunk(i, BIG) for i in range(8)])
        fill(a, *[chunk(100 + i, BIG) for i in range(8)])
        assert a.count("shards_evicted") == 0
        fill(a, *[chunk(200 + i, BIG) for i in range(8)])
        assert a.count("shards_evicted") == 1
        assert len(shards(tmp_path)) == 1
        assert put(a, chunk(300, BIG)) == [WriteResult.FULL]
        assert_holds(a, *[chunk(n + i, BIG) for i in range(8) for n in (100, 200)])


def test_empty_shards_do_not_pile_up(tmp_path: Path) -> None:
    with opened(tmp_path), opened(tmp_path), opened(tmp_path) as c:
        assert len(shards(tmp_path)) == 3
        fill(c, chunk(0))
    for _ in range(2):
        with opened(tmp_path) as store:
            assert len(shards(tmp_path)) == 1
            assert_holds(store, chunk(0))


def test_a_key_in_two_shards_is_the_value_used_last(tmp_path: Path) -> None:
    with opened(tmp_path) as a, opened(tmp_path) as b:
        fill(a, chunk(0), chunk(1), chunk(2))
        fill(b, chunk(0, version=1), chunk(1, version=1))
        a.touch([chunk(1).key])
    for _ in range(2):
        with opened(tmp_path) as store:
            assert store.usage().chunks == 3
            assert store.usage().nbytes == 3 * chunk(0).data.nbytes
            assert_holds(store, chunk(0, version=1), chunk(1), chunk(2))
            assert order(store) == [chunk(i).key for i in (2, 0, 1)]
            assert sum(shard.taken for shard in store._volumes[0].shards) == store.usage().nbytes


@pytest.mark.needs_root
def test_shards_of_other_users_are_left_alone(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        fill(store, chunk(0))
    (name,) = shards(tmp_path)
    os.chown(tmp_path / name, 12345, 12345)
    with opened(tmp_path) as store:
        assert store.usage().chunks == 0
        assert len(shards(tmp_path)) == 2


OWNER = """
import os
import sys
import time
from pathlib import Path
from tests.backends.disk.kit import *
path, first, capacity = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
store = OpenStore(options(path, capacity=capacity))
print("open", flush=True)
for line in sys.stdin:
    match line.split():
        case ["fill"]:
            number = 0
            while put(store, chunk(first + number, 65536)) == [WriteResult.STORED]:
                number += 1
            print(number, flush=True)
        case ["check", number]:
            assert_holds(store, *[chunk(first + i, 65536) for i in range(int(number))])
            print(store.usage().capacity, flush=True)
        case ["fork"]:
            if not os.fork():
                print(os.getpid(), flush=True)
                time.sleep(300)
"""


class Owner:
    """A process that has the path open."""

    def __init__(self, path: Path, first: int, capacity: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER, path, str(first), str(capacity)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def send(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Callable[[int], Owner]]:
    owners: list[Owner] = []

    def start(first: int) -> Owner:
        owners.append(Owner(tmp_path / "cache", first, CAPACITY))
        return owners[-1]

    yield start
    for started in owners:
        started.kill()


def test_processes_that_race_stay_within_the_capacity(tmp_path: Path, owner: Callable[[int], Owner]) -> None:
    path = tmp_path / "cache"
    owners = [owner(1000 * i) for i in range(4)]
    assert [started.answer() for started in owners] == ["open"] * 4
    assert len(shards(path)) == 4
    for started in owners:
        started.send("fill")
    counts = [int(started.answer()) for started in owners]
    assert taken(path) <= CAPACITY
    assert counts == [16] * 4, "a quarter each"
    for started, number in zip(owners, counts, strict=True):
        started.send(f"check {number}")
    assert [int(started.answer()) for started in owners] == [CAPACITY // 4] * 4
    for started in owners:
        started.kill()
    with opened(path, capacity=CAPACITY) as store:
        assert_holds(store, *[chunk(1000 * i + n, 64 * KIB) for i in range(4) for n in range(counts[i])])
        assert store.count("log_records_damaged") == store.count("log_tails_cut") == 0


def test_what_a_killed_process_stored_is_adopted(tmp_path: Path, owner: Callable[[int], Owner]) -> None:
    path = tmp_path / "cache"
    other = owner(0)
    assert other.answer() == "open"
    with opened(path, capacity=CAPACITY) as mine:
        assert mine.usage().capacity == CAPACITY // 2
        other.send("fill")
        assert other.answer() == "32"
        fill(mine, chunk(5000, 64 * KIB))
        other.process.send_signal(signal.SIGKILL)
        other.process.wait()
        mine.touch([])
        assert mine.usage().capacity == CAPACITY
        assert_lacks(mine, chunk(0, 64 * KIB))
    with opened(path, capacity=CAPACITY) as store:
        assert_holds(store, chunk(5000, 64 * KIB), *[chunk(i, 64 * KIB) for i in range(32)])
        assert store.usage().chunks == 33


def test_a_forked_child_does_not_keep_what_its_dead_parent_held(tmp_path: Path, owner: Callable[[int], Owner]) -> None:
    path = tmp_path / "cache"
    parent = owner(0)
    assert parent.answer() == "open"
    parent.send("fork")
    child = int(parent.answer())
    try:
        parent.process.send_signal(signal.SIGKILL)
        parent.process.wait()
        os.kill(child, 0)  # it lives
        with opened(path, capacity=CAPACITY) as store:
            assert store.usage().capacity == CAPACITY
            assert len(shards(path)) == 1
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_store_writes_while_another_is_made(tmp_path: Path) -> None:
    """Openings in one process exclude each other as processes do."""
    stores: list[OpenStore] = []
    try:
        for number in range(5):
            stores.append(OpenStore(options(tmp_path, capacity=CAPACITY)))
            fill(stores[-1], chunk(number, 64 * KIB))
        assert len(shards(tmp_path)) == 5
        for number, store in enumerate(stores):
            assert order(store) == [chunk(number).key]
    finally:
        for store in stores:
            store.close()

"""What sweeps remove and what they leave, step by step, with times of files set by hand."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache_backends.nfs import leases as leases_module
from lmcache_backends.nfs import sweep
from lmcache_backends.nfs.directory import open_root
from lmcache_backends.nfs.leases import Leases
from lmcache_backends.nfs.naming import Maker
from lmcache_backends.nfs.sweep import Rules, Sweeper, parts_of
from lmcache_backends.nfs.tally import Tally
from lmcache_core.protocols import ChunkKey
from lmcache_core.testing import make_key
from tests.backends.nfs.kit import HOUR, KIB, file_of, files

SIZE = 64 * KIB
OFTEN = 0.0
"""Seconds: a part is swept however short a while ago it was."""


class Host:
    """One that sweeps a directory, and what it has counted."""

    def __init__(self, path: Path, capacity: int | None = None, ttl: float | None = None) -> None:
        self.root = open_root(str(path), must_be_mounted=False)
        self.tally = Tally()
        self.leases = Leases(self.root, Maker().name, self.tally)
        self.sweeper = Sweeper(self.root, str(path), Rules(capacity, ttl, HOUR), self.leases, self.tally)

    def sweep(self, soonest: float = OFTEN) -> None:
        for _ in self.sweeper.round(soonest):
            pass

    def count(self, name: str) -> int:
        return self.tally.counts()[name]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    """Those that a test has made, let go of at its end."""
    made: list[Host] = []
    yield made
    for host in made:
        os.close(host.root)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def host(hosts: list[Host], path: Path, capacity: int | None = None, ttl: float | None = None) -> Host:
    hosts.append(Host(path, capacity, ttl))
    return hosts[-1]


def put(path: Path, number: int, age: float, nbytes: int = SIZE) -> Path:
    """A chunk that was used last so many seconds ago."""
    file = file_of(path, make_key(number))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(bytes(nbytes))
    made_old(file, age)
    return file


def made_old(file: Path, age: float) -> None:
    then = time.time() - age
    os.utime(file, (then, then))


def left(path: Path, numbers: range) -> list[int]:
    return [number for number in numbers if file_of(path, make_key(number)).exists()]


def test_what_was_used_longest_ago_goes_first_down_to_a_little_below_the_capacity(
    hosts: list[Host], path: Path
) -> None:
    for number in range(20):
        put(path, number, age=HOUR * (20 - number))
    one = host(hosts, path, capacity=10 * SIZE)
    one.sweep()
    assert left(path, range(20)) == list(range(11, 20))
    assert (one.count("swept_chunks"), one.count("swept_bytes"), one.count("sweeps")) == (11, 11 * SIZE, 1)


def test_what_fits_stays_however_old_it_is(hosts: list[Host], path: Path) -> None:
    for number in range(10):
        put(path, number, age=HOUR * 24 * 365)
    one = host(hosts, path, capacity=10 * SIZE)
    one.sweep()
    assert left(path, range(10)) == list(range(10))


def test_what_is_young_stays_even_if_there_is_too_much(hosts: list[Host], path: Path) -> None:
    for number in range(10):
        put(path, number, age=sweep.GRACE / 2 if number < 8 else HOUR)
    host(hosts, path, capacity=2 * SIZE).sweep()
    assert left(path, range(10)) == list(range(8))


def test_with_a_ttl_what_was_not_used_for_as_long_goes(hosts: list[Host], path: Path) -> None:
    ages = [100.0, HOUR - 100, HOUR + 100, 24 * HOUR]
    for number, age in enumerate(ages):
        put(path, number, age)
    one = host(hosts, path, ttl=HOUR)
    one.sweep()
    assert left(path, range(4)) == [0, 1]
    made_old(file_of(path, make_key(0)), 2 * HOUR)
    one.sweep()
    assert left(path, range(4)) == [1]


def test_without_capacity_and_ttl_chunks_stay(hosts: list[Host], path: Path) -> None:
    put(path, 1, age=HOUR * 24 * 365)
    one = host(hosts, path)
    one.sweep()
    assert (left(path, range(3)), one.count("sweeps")) == ([1], 1)


def test_what_crashes_left_goes_after_an_hour_and_what_others_write_stays(hosts: list[Host], path: Path) -> None:
    chunk = put(path, 1, age=0)
    maker = Maker()
    places = {name: path / maker.temporary(str(chunk.relative_to(path))) for name in ("old", "new")}
    manifest = path / maker.temporary(f"manifests/{'a' * 64}.json")
    manifest.parent.mkdir()
    strange = [chunk.parent / name for name in ("README", ".nfs00012", "f" * 64, f".{'a' * 64}", f".{'a' * 64}.A b")]
    for file in (*places.values(), manifest, *strange):
        file.write_bytes(b"half")
        made_old(file, 2 * HOUR)
    made_old(places["new"], HOUR / 2)
    one = host(hosts, path, capacity=1, ttl=HOUR)
    one.sweep()
    assert not places["old"].exists()
    assert not manifest.exists()
    assert places["new"].exists()
    assert [file.name for file in strange if not file.exists()] == []
    assert one.count("temporaries_removed") == 2


def test_directories_in_which_nothing_lies_for_an_hour_go(hosts: list[Host], path: Path) -> None:
    gone, kept = put(path, 1, age=2 * HOUR), put(path, 2, age=0)
    fresh = path / ("e" * 64) / "eee"
    fresh.mkdir(parents=True)
    one = host(hosts, path, ttl=HOUR)
    one.sweep()
    assert gone.parent.exists(), "it has only just become empty"
    made_old(gone.parent, 2 * HOUR)
    one.sweep()
    assert not gone.parent.exists()
    assert kept.exists()
    assert fresh.exists()


def test_two_at_the_same_time_remove_no_more_than_one(hosts: list[Host], path: Path) -> None:
    """Even if both are at the same part, as after a lease was taken over from a process that was only stopped."""
    for number in range(40):
        put(path, number, age=HOUR * (40 - number))
    two = [host(hosts, path, capacity=20 * SIZE) for _ in range(2)]
    steps = [each.sweeper._sweep("", _Held(), time.time()) for each in two]
    for _ in range(200):
        for each in steps:
            next(each, None)
    assert left(path, range(40)) == list(range(22, 40))
    assert sum(each.count("swept_chunks") for each in two) == 22


class _Held(leases_module.Lease):
    """A lease that two have."""

    def __init__(self) -> None:
        pass

    def hold(self) -> bool:
        return True


def test_a_part_that_another_one_is_at_is_left_to_it(hosts: list[Host], path: Path) -> None:
    for number in range(20):
        put(path, number, age=HOUR * (20 - number))
    one, two = (host(hosts, path, capacity=10 * SIZE) for _ in range(2))
    steps = one.sweeper.round(OFTEN)
    next(steps)
    two.sweep()
    assert (two.count("swept_chunks"), two.count("sweeps")) == (0, 0)
    list(steps)
    assert (one.count("swept_chunks"), one.count("sweeps")) == (11, 1)
    two.sweep(soonest=HOUR)
    assert two.count("sweeps") == 0, "it has just been swept"
    two.sweep()
    assert two.count("sweeps") == 1


def test_the_lease_of_one_that_died_is_taken_over_when_it_has_not_changed_for_long(
    hosts: list[Host], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(20):
        put(path, number, age=HOUR)
    dead, other = (host(hosts, path, capacity=10 * SIZE) for _ in range(2))
    steps = dead.sweeper.round(OFTEN)
    next(steps)
    dead.sweeper.abandoned = True
    steps.close()
    now = time.monotonic()
    for later, sweeps in ((0.0, 0), (leases_module.DEAD - 1, 0), (leases_module.DEAD + 1, 1)):
        monkeypatch.setattr(time, "monotonic", lambda later=later: now + later)
        other.sweep()
        assert other.count("sweeps") == sweeps, later
    assert (other.count("leases_taken_over"), len(left(path, range(20)))) == (1, 9)
    assert [name.name for name in (path / "sweeps").iterdir()] == ["all.done"]


def test_one_that_goes_on_after_its_lease_was_taken_over_stops(
    hosts: list[Host], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(20):
        put(path, number, age=HOUR)
    stopped, other = (host(hosts, path, capacity=10 * SIZE) for _ in range(2))
    steps = stopped.sweeper.round(OFTEN)
    next(steps)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    other.sweep()
    monkeypatch.setattr(time, "monotonic", lambda: now + leases_module.DEAD)
    taken = other.leases.take("all")
    assert taken is not None
    list(steps)
    assert (stopped.count("sweeps"), stopped.count("swept_chunks")) == (0, 0)
    assert (path / "sweeps" / "all.lease").exists(), "it is the other one's"
    taken.release()


def test_a_holder_that_renews_its_lease_keeps_it(
    hosts: list[Host], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.mkdir()
    one, other = (host(hosts, path, capacity=SIZE) for _ in range(2))
    lease = one.leases.take("all")
    assert lease is not None
    now = time.monotonic()
    for later in range(0, 1000, 50):
        monkeypatch.setattr(time, "monotonic", lambda later=later: now + later)
        assert other.leases.take("all") is None
        assert lease.hold()
    lease.release()
    assert other.leases.take("all") is not None


@pytest.mark.parametrize("off", [-30 * 24 * HOUR, -HOUR, HOUR, 30 * 24 * HOUR])
def test_the_clock_of_this_host_does_not_count(
    hosts: list[Host], path: Path, monkeypatch: pytest.MonkeyPatch, off: float
) -> None:
    """Ages are differences of times that the file system gave."""
    for number in range(10):
        put(path, number, age=600 * number + 100)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + off)
    one = host(hosts, path, ttl=HOUR)
    one.sweep()
    assert left(path, range(10)) == [0, 1, 2, 3, 4, 5]


def test_chunks_from_the_future_go_last_but_are_not_kept_for_ever(hosts: list[Host], path: Path) -> None:
    for number in range(10):
        put(path, number, age=-24 * HOUR if number < 5 else HOUR)
    host(hosts, path, capacity=6 * SIZE, ttl=7 * HOUR).sweep()
    assert len(left(path, range(10))) == 5
    assert left(path, range(5)) == [0, 1, 2, 3, 4]
    host(hosts, path, capacity=2 * SIZE).sweep()
    assert len(left(path, range(10))) == 1


def test_the_time_of_a_sweep_in_the_future_keeps_nobody_from_sweeping(hosts: list[Host], path: Path) -> None:
    one = host(hosts, path, capacity=SIZE)
    one.sweep()
    one.sweep(soonest=HOUR)
    assert one.count("sweeps") == 1
    made_old(path / "sweeps" / "all.done", -10 * HOUR)
    one.sweep(soonest=HOUR)
    assert one.count("sweeps") == 2


def test_what_is_used_between_listing_and_removing_stays(
    hosts: list[Host], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "BATCH", 1)
    for number in range(6):
        put(path, number, age=HOUR * (6 - number))
    one = host(hosts, path, capacity=3 * SIZE)
    steps = one.sweeper.round(OFTEN)
    while not one.count("swept_chunks"):
        next(steps)
    os.utime(file_of(path, make_key(1)))
    list(steps)
    assert left(path, range(6)) == [1, 5], "four of six had to go, and 1 was the second oldest"


def test_steps_are_short(hosts: list[Host], path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "BATCH", 5)
    looked: list[str] = []
    stat = os.stat
    for number in range(30):
        put(path, number, age=HOUR)
    crowded = file_of(path, make_key(0)).parent
    for number in range(50):
        (crowded / f"{crowded.name}{number:061x}").write_bytes(b"x")
    one = host(hosts, path, capacity=1)

    def noted(name: str, **named: Any) -> os.stat_result:
        looked.append(str(name))
        return stat(name, **named)

    monkeypatch.setattr(os, "stat", noted)
    most = 0
    for _ in one.sweeper.round(OFTEN):
        most, looked[:] = max(most, len([name for name in looked if len(name) > 100])), []
    assert 1 <= most <= 5


def test_a_sweep_that_fails_is_told_once_and_tried_again(
    hosts: list[Host], path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(20):
        put(path, number, age=HOUR)
    one = host(hosts, path, capacity=10 * SIZE)
    with monkeypatch.context() as broken, caplog.at_level(logging.WARNING):
        broken.setattr(Sweeper, "_remove", _raise_eio)
        one.sweep()
        one.sweep()
    assert one.count("sweeps_failed") == 2
    (said,) = [record.message for record in caplog.records if "Input/output error" in record.message]
    assert str(path) in said
    one.sweep()
    assert len(left(path, range(20))) == 9


def test_a_file_system_that_does_not_answer_at_all_ends_no_sweeper(
    hosts: list[Host], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(path, 1, age=2 * HOUR)
    one = host(hosts, path, ttl=HOUR)
    with monkeypatch.context() as broken:
        broken.setattr(os, "fstatvfs", _raise_eio)
        one.sweep()
    assert one.count("sweeps_failed") == 1
    one.sweep()
    assert left(path, range(2)) == []


def _raise_eio(*arguments: object, **named: object) -> None:
    raise OSError(5, "Input/output error")


def test_parts_grow_with_the_capacity() -> None:
    gib = 2**30
    assert [len(parts_of(size)) for size in (None, 1, 255 * gib, 256 * gib, 4096 * gib, 65536 * gib)] == [
        1,
        1,
        1,
        16,
        256,
        4096,
    ]
    assert parts_of(256 * gib) == list("0123456789abcdef")
    assert parts_of(2**60)[-1] == "fff"


def test_each_part_is_held_to_its_share(hosts: list[Host], path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "_LEAST_SHARE", SIZE)
    for number in range(200):
        put(path, number, age=HOUR * (200 - number))
    one = host(hosts, path, capacity=100 * SIZE)
    one.sweep()
    assert one.count("sweeps") == 16
    kept = left(path, range(200))
    by_digit = [sum(make_key(number).page.hex()[0] == digit for number in kept) for digit in "0123456789abcdef"]
    assert max(by_digit) <= 100 / 16
    assert 60 <= len(kept) <= 100
    for digit in "0123456789abcdef":
        of_part = [number for number in range(200) if make_key(number).page.hex()[0] == digit]
        gone = [number for number in of_part if number not in kept]
        assert not gone or max(gone) < min([n for n in of_part if n in kept], default=200), "the oldest go"


def test_chunks_of_all_spaces_count_together(hosts: list[Host], path: Path) -> None:
    keys = [ChunkKey(bytes([number % 4]) * 32, make_key(number).page) for number in range(16)]
    for number, key in enumerate(keys):
        file = file_of(path, key)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytes(SIZE))
        made_old(file, HOUR * (16 - number))
    host(hosts, path, capacity=10 * SIZE).sweep()
    assert len(files(path)) == 9
    assert [file_of(path, key).exists() for key in keys] == [False] * 7 + [True] * 9


@pytest.mark.parametrize("kind", ["gone", "file", "link"])
def test_what_is_odd_among_the_directories_is_passed_over(hosts: list[Host], path: Path, kind: str) -> None:
    put(path, 1, age=2 * HOUR)
    odd = path / ("c" * 64)
    if kind == "file":
        odd.write_text("of somebody")
    elif kind == "link":
        odd.symlink_to(path)
    one = host(hosts, path, ttl=HOUR)
    one.sweep()
    assert left(path, range(2)) == []
    assert (one.count("sweeps"), one.count("sweeps_failed")) == (1, 0)
    assert odd.is_symlink() == (kind == "link")

"""The host pool: memory that is checked, faulted in, counted, and never handed out twice."""

from __future__ import annotations

import itertools
import os
import threading
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from lmcache_core import hostpool
from lmcache_core.errors import PoolError, UsageError
from lmcache_core.frame import shape
from lmcache_core.hostpool import HostPool, available_memory

FORM = shape(4, 1, 5000)


def test_slots_are_aligned_and_apart() -> None:
    pool = HostPool(10 * FORM.nbytes, prefault=False)
    slots = [pool.allocate(FORM) for _ in range(10)]
    assert pool.allocate(FORM) is None
    places = sorted(slot.offset for slot in slots if slot is not None)
    assert len(places) == 10
    assert all(place % 4096 == 0 for place in places)
    assert all(b - a >= FORM.nbytes for a, b in itertools.pairwise(places))
    assert pool.used == 10 * FORM.nbytes
    for slot in slots:
        assert slot is not None
        slot.release()
    assert (pool.used, pool.slots) == (0, 0)
    pool.close()


def test_a_tail_costs_no_full_slot() -> None:
    full, one_page = shape(4, 1, 9000), shape(1, 1, 9000)
    pool = HostPool(full.nbytes, prefault=False)
    tails = [pool.allocate(one_page) for _ in range(2)]
    assert None not in tails
    assert pool.used == 2 * one_page.nbytes < full.nbytes
    pool.close()


def test_shards_and_pages_of_a_payload_are_where_the_frame_has_them() -> None:
    pool = HostPool(1 << 20, prefault=False)
    form = shape(3, 2, 1000)
    slot = pool.allocate(form)
    assert slot is not None
    slot.frame[:] = bytes(form.nbytes)
    slot.payload(1, 2)[:] = b"x" * 2000
    start = form.header_bytes + 3000
    assert bytes(slot.frame[start : start + 2000]) == b"x" * 2000
    assert not any(slot.frame[:start])
    assert not any(slot.frame[start + 2000 :])
    assert len(slot.payload(0)) == 3000
    pool.close()


def test_references_cannot_be_misused() -> None:
    pool = HostPool(1 << 20, prefault=False)
    slot = pool.allocate(FORM)
    assert slot is not None
    slot.acquire()
    slot.release()
    assert slot.references == 1
    slot.release()
    assert (slot.references, pool.slots) == (0, 0)
    with pytest.raises(UsageError):
        slot.release()
    with pytest.raises(UsageError):
        slot.acquire()
    assert len(slot.frame) == 0, "a freed slot shows nobody's bytes"
    pool.close()


@given(st.lists(st.one_of(st.integers(1, 6), st.none()), max_size=60))
@settings(max_examples=100)
def test_any_order_of_allocations_keeps_slots_apart(steps: list[int | None]) -> None:
    """A number allocates so many pages, None frees the oldest slot. Each slot is filled with its number."""
    pool = HostPool(40 * 4096, prefault=False)
    held: list[tuple[int, hostpool.Slot]] = []
    for number, step in enumerate(steps, 1):
        if step is None:
            if held:
                held.pop(0)[1].release()
        else:
            slot = pool.allocate(shape(step, 1, 3000))
            if slot is not None:
                slot.frame[:] = bytes([number]) * len(slot.frame)
                held.append((number, slot))
        for mark, slot in held:
            assert slot.frame[0] == mark
            assert slot.frame.tobytes().count(bytes([mark])) == slot.form.nbytes
    assert pool.used == sum(slot.form.nbytes for _, slot in held)
    for _, slot in held:
        slot.release()
    assert pool.used == 0
    pool.close()


def test_memory_becomes_usable_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostpool, "FAULT_STEP", 1 << 20)
    pool = HostPool(3 << 20)
    mutex = threading.Lock()
    grown = threading.Event()
    assert (pool.usable, pool.allocate(FORM)) == (0, None), "a slot is usable only when its pages are"
    pool.start_prefault(mutex, grown.set)
    assert pool.usable >= 1 << 20, "the first step is there at once"
    assert grown.wait(30)
    assert pool.usable == pool.capacity == 3 << 20
    assert _resident(pool) >= 3 << 20
    pool.close()


def _resident(pool: HostPool) -> int:
    return os.stat(f"/proc/self/fd/{pool.fd}").st_blocks * 512


@pytest.mark.parametrize("setting", ["always within_size advise [never] deny force", "always [advise] never", None])
def test_prefault_is_in_nobodys_way(setting: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody maps memory while pages are mapped: so a little at a time, and pages are made before that, unless they
    would be small where the system makes large ones."""
    (tmp_path / "setting").write_text(setting or "")
    monkeypatch.setattr(hostpool, "SHMEM_ENABLED", str(tmp_path / ("setting" if setting else "none")))
    monkeypatch.setattr(hostpool, "FAULT_STEP", 4 << 20)
    asked: list[tuple[str, int, int]] = []

    class Libc:
        def madvise(self, address: int, size: int, advice: int) -> int:
            asked.append(("map", address - pool.address, size))
            return 0

    def make(fd: int, start: int, size: int) -> None:
        assert fd == pool.fd
        asked.append(("make", start, size))
        raise OSError("no room")  # then they are made as they are mapped

    pool = HostPool((5 << 20) + 4096)
    monkeypatch.setattr(hostpool, "_libc", Libc())
    monkeypatch.setattr(os, "posix_fallocate", make)
    grown = threading.Event()
    pool.start_prefault(threading.Lock(), grown.set)
    assert grown.wait(30)
    maps = [("map", n << 20, 1 << 20) for n in range(5)] + [("map", 5 << 20, 4096)]
    if setting is None or "[never]" in setting:
        maps[4:4] = [("make", 4 << 20, (1 << 20) + 4096)]
        maps[0:0] = [("make", 0, 4 << 20)]
    assert asked == maps
    assert pool.usable == pool.capacity
    pool.close()


def test_prefault_works_where_the_kernel_cannot_populate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostpool, "_MADV_POPULATE_WRITE", 12345)
    pool = HostPool(2 << 20)
    pool.start_prefault(threading.Lock())
    assert pool.usable == 2 << 20
    assert _resident(pool) >= 2 << 20
    pool.close()


def test_closing_while_faulting_ends_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostpool, "FAULT_STEP", 1 << 16)
    pool = HostPool(64 << 20)
    pool.start_prefault(threading.Lock())
    pool.close()
    assert "lmcache-prefault" not in {thread.name for thread in threading.enumerate()}


def test_more_than_the_machine_has_is_refused_before_it_is_taken() -> None:
    free = available_memory()
    assert free is not None
    with pytest.raises(PoolError, match=r"cpu\.capacity is .* but only .* free.*write a smaller"):
        HostPool(free + (64 << 30))


def test_the_total_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    HostPool(3 << 20, prefault=False).close()
    assert "host pool: 3MiB of host memory" in caplog.text


def test_huge_pages_that_are_not_reserved_are_a_clear_error() -> None:
    reserved = int(Path("/proc/sys/vm/nr_hugepages").read_text())
    if reserved:
        pytest.skip("this machine has huge pages reserved")
    with pytest.raises(PoolError, match=r"vm\.nr_hugepages=2.*hugepages: false"):
        HostPool(4 << 20, hugepages=True)


@pytest.mark.needs_root
def test_huge_pages_that_are_reserved_are_used() -> None:
    setting = Path("/proc/sys/vm/nr_hugepages")
    before = setting.read_text()
    try:
        setting.write_text("2")
    except OSError as error:
        pytest.skip(f"huge pages cannot be reserved here: {error}")
    try:
        if int(setting.read_text()) < 2:
            pytest.skip("no memory for two huge pages")
        pool = HostPool(3 << 20, hugepages=True)
        assert pool.capacity == 4 << 20
        pool.start_prefault(threading.Lock())
        slot = pool.allocate(FORM)
        assert slot is not None
        slot.payload()[:5] = b"hello"
        assert bytes(slot.payload()[:5]) == b"hello"
        slot.release()
        pool.close()
    finally:
        setting.write_text(before)


def test_a_pool_of_nothing_is_refused() -> None:
    with pytest.raises(PoolError, match="at least"):
        HostPool(0)


def test_memory_lies_on_the_numa_nodes_that_were_named() -> None:
    pool = HostPool(4 << 20, numa_nodes=(0,), prefault=False)
    try:
        pool.memory[:4096] = bytes(4096)
        (mapping,) = [
            line
            for line in Path("/proc/self/numa_maps").read_text().splitlines()
            if int(line.split()[0], 16) == pool.address
        ]
        assert mapping.split()[1] == "interleave:0"
        assert "N0=" in mapping
    finally:
        pool.close()


def test_a_numa_node_that_is_not_there() -> None:
    with pytest.raises(PoolError, match=r"cpu.numa_nodes: .* on 0, 700 .there is no node 700.*/node/online"):
        HostPool(4 << 20, numa_nodes=(0, 700))

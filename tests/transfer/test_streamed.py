"""Copies by the stream thread against a copy one element at a time, on engines made up at random: every way to take,
all layers together or one by one, streams on threads or not, with gaps."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmcache_core.errors import ClosedError, LayoutError, TransferError, UsageError
from lmcache_core.plugins import load_transfer
from lmcache_core.protocols import KVView, RegisteredKV, Transfer
from lmcache_core.streaming import Copying, Layer, StreamingTransfer
from lmcache_cuda.errors import DriverError
from lmcache_transfer import pipeline
from lmcache_transfer.device import Piece
from lmcache_transfer.hostdevice import HostDevice, HostStream, ThreadStream
from lmcache_transfer.paged import Layout
from lmcache_transfer.pinned import PinnedMemory
from lmcache_transfer.streamed import StreamedKV, StreamedTransfer, StreamOptions
from tests.transfer.naive import Engine, block_tables, engines

WAYS: dict[str, Callable[[], HostDevice]] = {
    "mapped": HostDevice,
    "staged": lambda: HostDevice(mapped=False),
    "direct": lambda: HostDevice(mapped=False, direct=1),
    "staged, on threads": lambda: HostDevice(lambda: None, mapped=False),
    "direct, on threads": lambda: HostDevice(lambda: None, mapped=False, direct=1),
}


@contextmanager
def opened(way: str, staging: int = 1 << 20) -> Iterator[StreamedTransfer]:
    transfer = StreamedTransfer(WAYS[way](), StreamOptions(staging=staging))
    try:
        yield transfer
    finally:
        transfer.close()


class Drawn(NamedTuple):
    engine: Engine
    layout: Layout
    page_tokens: int
    block_ids: list[int]
    cuts: list[int]
    """Where pages are cut into parts."""
    staging: int
    """In pages of all layers, at least one of a layer."""


@st.composite
def drawn(draw: st.DrawFn) -> Drawn:
    engine = draw(engines())
    layout: Layout = draw(st.sampled_from(["native", "canonical"]))
    page_tokens = (engine.block_tokens if layout == "native" else 1) * draw(st.integers(1, 3))
    block_ids = draw(block_tables(engine))
    pages = len(block_ids) * engine.block_tokens // page_tokens
    cuts = sorted(draw(st.sets(st.integers(0, pages), max_size=3)) | {0, pages})
    return Drawn(engine, layout, page_tokens, block_ids, cuts, draw(st.integers(0, 2)))


def copies_of(kv: StreamedKV, this: Drawn, whole: memoryview) -> list[Copying]:
    view = kv.view(this.block_ids)
    size = kv.page_bytes
    parts = zip(this.cuts, this.cuts[1:], strict=False)
    return [Copying(0, view, first, end - first, whole[first * size : end * size]) for first, end in parts]


several = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def check_store_and_load(transfer: StreamedTransfer, tensors: list[Any], this: Drawn, *, layerwise: bool) -> None:
    """Both do what a copy one element at a time does, to the engine whose tensors these are."""
    engine = this.engine
    kv = transfer.register(tensors, dims=engine.dims, page_tokens=this.page_tokens, layout=this.layout)
    room = max(kv.page_layer_bytes, this.staging * kv.page_bytes)
    transfer.thread.out._room = transfer.thread.into._room = room
    numbers = engine.payload(this.layout, this.page_tokens, this.block_ids)
    expected = engine.memory()[numbers].tobytes()
    whole = memoryview(bytearray(b"\xaa" * len(expected)))
    if expected:
        transfer.pin(whole)
    order = [Layer(0, n) for n in range(kv.layers)]
    store = transfer.store(copies_of(kv, this, whole))
    for layer in order if layerwise else ():
        store.computed(layer)
    store.end().result(10)
    store.free()
    store.close()
    assert whole == expected
    source = np.random.default_rng(7).integers(0, 256, len(expected), np.uint8)
    after = engine.memory()
    after[numbers] = source.reshape(-1, engine.itemsize)
    load = transfer.load(copies_of(kv, this, memoryview(source.tobytes())), order if layerwise else ())
    assert all(load.wait(layer) for layer in order)
    load.done.result(10)
    load.close()
    np.testing.assert_array_equal(engine.memory(), after)


@pytest.mark.parametrize("way", WAYS)
@given(this=drawn(), layerwise=st.booleans())
@several
def test_store_and_load(way: str, this: Drawn, layerwise: bool) -> None:
    with opened(way) as transfer:
        check_store_and_load(transfer, this.engine.layers, this, layerwise=layerwise)


@pytest.mark.parametrize("way", WAYS)
@given(this=drawn(), data=st.data())
@several
def test_nothing_is_loaded_to_blocks_that_are_not_there(way: str, this: Drawn, data: st.DataObject) -> None:
    engine = this.engine
    missing = data.draw(st.sets(st.integers(0, len(this.block_ids) - 1)))
    numbers = engine.payload(this.layout, this.page_tokens, this.block_ids)
    lacking: set[int] = set()
    for place in missing:  # the elements of a block are those that a table of it alone has
        unit = 1 if this.layout == "canonical" else engine.block_tokens
        lacking.update(engine.payload(this.layout, unit, [this.block_ids[place]]).tolist())
    absent = np.isin(numbers, list(lacking))
    with opened(way) as transfer:
        kv = transfer.register(engine.layers, dims=engine.dims, page_tokens=this.page_tokens, layout=this.layout)
        table = [-1 if place in missing else block for place, block in enumerate(this.block_ids)]
        gapped = this._replace(block_ids=table)
        source = np.random.default_rng(7).integers(0, 256, numbers.size * engine.itemsize, np.uint8)
        after = engine.memory()
        after[numbers[~absent]] = source.reshape(-1, engine.itemsize)[~absent]
        load = transfer.load(copies_of(kv, gapped, memoryview(source.tobytes())))
        load.close()
        load.done.result(10)
        np.testing.assert_array_equal(engine.memory(), after)
        if absent.any():
            with pytest.raises(LayoutError, match="not there cannot be stored"):
                transfer.store(copies_of(kv, gapped, memoryview(bytearray(source.size))))


LAYERS, BLOCKS, TOKENS, HEADS, DIM = 3, 8, 4, 2, 8


@pytest.fixture
def layers() -> list[Any]:
    generator = np.random.default_rng(3)
    return [generator.integers(0, 256, (2, BLOCKS, TOKENS, HEADS, DIM), np.uint8) for _ in range(LAYERS)]


@pytest.fixture(params=["mapped", "staged, on threads"])
def transfer(request: pytest.FixtureRequest) -> Iterator[StreamedTransfer]:
    with opened(request.param) as found:
        yield found


@pytest.fixture
def kv(transfer: StreamedTransfer, layers: list[Any]) -> StreamedKV:
    return transfer.register(layers, dims="2bthd", page_tokens=TOKENS)


def test_is_a_transfer_with_views_that_wait(kv: StreamedKV, layers: list[Any]) -> None:
    transfer = load_transfer("cpu").create({"streams": True, "staging": "1MiB"})
    assert isinstance(transfer, Transfer)
    assert isinstance(transfer, StreamingTransfer)
    registered: RegisteredKV = kv
    view = registered.view([6, 1])
    assert isinstance(view, KVView)
    got = memoryview(bytearray(kv.page_bytes))
    view.gather(0, 1, 1, got)
    expected = np.concatenate([layer[:, 1].ravel() for layer in layers])
    assert got == expected.tobytes()
    view.scatter(0, 0, 1, got)
    for layer in layers:
        np.testing.assert_array_equal(layer[:, 6], layer[:, 1])
    transfer.close()


def test_what_does_not_fit_is_refused(transfer: StreamedTransfer, kv: StreamedKV) -> None:
    view = kv.view([1, 2])
    page = kv.page_bytes
    with pytest.raises(LayoutError, match="2 whole pages"):
        transfer.load([Copying(0, view, 1, 2, memoryview(bytes(2 * page)))])
    with pytest.raises(LayoutError, match=f"take {page} bytes"):
        transfer.load([Copying(0, view, 0, 1, memoryview(bytes(page - 1)))])
    with pytest.raises(LayoutError, match="read-only"):
        transfer.store([Copying(0, view, 0, 1, memoryview(bytes(page)))])
    with pytest.raises(LayoutError, match="there are 8 blocks"):
        kv.view([8])
    with pytest.raises(LayoutError, match="block ids -2"):
        kv.view([-2])
    other = StreamedTransfer(HostDevice(), StreamOptions())
    with pytest.raises(UsageError, match="another transfer"):
        other.load([Copying(0, view, 0, 1, memoryview(bytes(page)))])
    other.close()


def test_a_page_that_staging_cannot_hold_is_an_error_that_says_so(layers: list[Any]) -> None:
    with opened("staged", staging=100) as transfer, pytest.raises(LayoutError, match="make `staging` larger"):
        transfer.register(layers, dims="2bthd", page_tokens=TOKENS)


class Broken(HostStream):
    """Fails after some pieces of work."""

    def __init__(self, left: list[int]) -> None:
        self._left = left

    def do(self, work: Callable[[], object]) -> None:
        self._left[0] -= 1
        if self._left[0] < 0:
            raise DriverError("the device is gone", 719)
        work()


@pytest.mark.parametrize("there", range(1, 30, 2))
def test_a_device_that_fails_ends_everything(layers: list[Any], there: int) -> None:
    """Whatever it fails at: futures have its error, and nobody who waits for a layer waits for ever."""
    left = [10_000]

    class Device(HostDevice):
        def stream(self) -> HostStream:
            return Broken(left)

    transfer = StreamedTransfer(Device(mapped=False), StreamOptions(staging=1 << 16))
    kv = transfer.register(layers, dims="2bthd", page_tokens=TOKENS)
    order = [Layer(0, n) for n in range(LAYERS)]
    left[0] = there
    load = transfer.load([Copying(0, kv.view([1]), 0, 1, memoryview(bytes(kv.page_bytes)))], order)
    waited = [load.wait(layer) for layer in order]
    failure = load.done.exception(10)
    if failure is not None:
        assert isinstance(failure, TransferError)
        assert "the device is gone" in str(failure)
    else:
        assert all(waited)
    left[0] = 10_000
    load.close()
    transfer.close()


def test_no_more_is_submitted_than_a_driver_takes(layers: list[Any]) -> None:
    """With the device at a standstill, in either direction; then all of it is done."""
    gate = threading.Event()
    device = HostDevice(gate.wait, mapped=False)
    transfer = StreamedTransfer(device, StreamOptions())
    kv = transfer.register(layers, dims="2bthd", page_tokens=TOKENS)
    transfer.thread.out._room = transfer.thread.into._room = kv.page_layer_bytes
    whole = memoryview(bytearray(BLOCKS * kv.page_bytes))
    page = kv.page_bytes
    view = kv.view(range(BLOCKS))
    copies = [Copying(0, view, n, 1, whole[n * page : (n + 1) * page]) for n in range(BLOCKS)]
    order = [Layer(0, n) for n in range(LAYERS)]
    loads = [transfer.load(copies, order) for _ in range(20)]
    began = threading.Event()
    transfer.thread.put(began.set)
    assert not began.wait(0.2), "the thread has submitted everything"
    into = transfer.thread.into
    queued = [stream._work.qsize() for stream in (into.kernel, into.dma) if isinstance(stream, ThreadStream)]
    assert 2 * pipeline.MOST_UNDER_WAY < sum(queued) < 500
    gate.set()
    for load in loads:
        load.done.result(30)
        load.close()
    transfer.close()


def test_nothing_after_close(layers: list[Any]) -> None:
    with opened("mapped") as transfer:
        kv = transfer.register(layers, dims="2bthd", page_tokens=TOKENS)
    with pytest.raises(ClosedError, match="has been closed"):
        transfer.load([Copying(0, kv.view([1]), 0, 1, memoryview(bytes(kv.page_bytes)))])


def test_a_future_that_completes_after_its_loop_has_closed(transfer: StreamedTransfer, kv: StreamedKV) -> None:
    """An event loop that awaited a copy, and is gone before that ends, is not told and nothing breaks."""
    store = transfer.store([Copying(0, kv.view([3]), 0, 1, memoryview(bytearray(kv.page_bytes)))])

    async def await_it() -> None:
        waiting = asyncio.ensure_future(asyncio.wrap_future(store.done))
        await asyncio.sleep(0)
        waiting.cancel()

    asyncio.run(await_it())
    end = store.end()
    if not end.cancelled():
        end.result(10)
    store.close()


def test_buffers_and_tensors_live_as_long_as_copies_of_them(transfer: StreamedTransfer) -> None:
    """A tensor and a buffer that nobody else holds any more, in a job that waits its turn."""
    import weakref

    owner = np.random.default_rng(1).integers(0, 256, (2, BLOCKS, TOKENS, HEADS, DIM), np.uint8)
    gone = weakref.ref(owner)
    expected = owner[:, 5].tobytes()
    kv = transfer.register([owner], dims="2bthd", page_tokens=TOKENS)
    got = bytearray(kv.page_bytes)
    store = transfer.store([Copying(0, kv.view([5]), 0, 1, memoryview(got))])
    transfer._kernels.clear()
    del owner, kv
    assert gone() is not None
    store.end().result(10)
    assert got == expected
    store.close()


def joined(memory: PinnedMemory) -> None:
    for area in memory._areas.values():
        assert area.thread is not None
        area.thread.join()


class TestPinned:
    class Device(HostDevice):
        def __init__(self) -> None:
            super().__init__()
            self.pinned: list[tuple[int, int]] = []

        def pin(self, address: int, nbytes: int) -> None:
            self.pinned.append((address, nbytes))

        def unpin(self, address: int) -> None:
            self.pinned = [each for each in self.pinned if each[0] != address]

    @settings(deadline=None)
    @given(start=st.integers(0, 999), nbytes=st.integers(1, 1000), host_is_target=st.booleans())
    def test_no_copy_crosses_a_piece(self, start: int, nbytes: int, host_is_target: bool) -> None:
        device = self.Device()
        memory = PinnedMemory(device, piece=64)
        base, other = 1 << 20, 1 << 40
        memory.pin(base, memoryview(bytes(2000)))
        host, there = base + start, other
        piece = Piece(host, there, nbytes) if host_is_target else Piece(there, host, nbytes)
        cut = memory.split([piece])
        assert sum(each.nbytes for each in cut) == nbytes
        at = 0
        for each in cut:
            ours, theirs = (each.target, each.source) if host_is_target else (each.source, each.target)
            assert (ours, theirs) == (host + at, there + at)
            assert (ours - base) // 64 == (ours - base + each.nbytes - 1) // 64
            at += each.nbytes
        memory.close()
        assert device.pinned == []

    def test_all_of_it_once(self) -> None:
        device = self.Device()
        memory = PinnedMemory(device, piece=64)
        for _ in range(3):
            memory.pin(4096, memoryview(bytes(150)))
        joined(memory)
        assert device.pinned == [(4096, 64), (4160, 64), (4224, 22)]
        memory.close()
        assert device.pinned == []

    def test_what_cannot_be_pinned_is_said_once(self, caplog: pytest.LogCaptureFixture) -> None:
        class Refuses(HostDevice):
            def pin(self, address: int, nbytes: int) -> None:
                raise TransferError("pinning is limited by ulimit -l")

        memory = PinnedMemory(Refuses(), piece=64)
        memory.pin(4096, memoryview(bytes(640)))
        joined(memory)
        assert [record.getMessage() for record in caplog.records] == [
            "0 of 640 bytes of the host pool are pinned, copies to and from the others are slower: "
            "pinning is limited by ulimit -l"
        ]
        memory.close()

    def test_memory_that_others_take_the_place_of_is_let_go_of(self) -> None:
        """As when a node has been started again: not at once, since a copy of it may still be under way."""
        device = self.Device()
        transfer = StreamedTransfer(device, StreamOptions())
        old, new = memoryview(bytearray(8192)), memoryview(bytearray(8192))
        transfer.pin(old)
        joined(transfer._pinned)
        (kept,) = device.pinned
        for pinned in (2, 1):
            transfer.pin(new)
            joined(transfer._pinned)
            for under_way in (transfer.store([]), transfer.load([])):
                under_way.close()
                under_way.done.result(10)
            assert len(device.pinned) == pinned
        assert kept not in device.pinned
        transfer.close()
        assert device.pinned == []


def test_moments_come_in_their_order(transfer: StreamedTransfer, kv: StreamedKV) -> None:
    device = transfer._device
    assert isinstance(device, HostDevice)
    first = transfer.moment()
    gate = threading.Event()
    if isinstance(device.engine_stream(), ThreadStream):
        device.engine_stream().do(gate.wait)
    second = transfer.moment()
    began = first.result(10)
    if isinstance(device.engine_stream(), ThreadStream):
        assert not second.done()
    gate.set()
    assert second.result(10) >= began


def test_after_close_a_store_ends_with_an_error_and_nobody_waits(layers: list[Any]) -> None:
    with opened("mapped") as transfer:
        kv = transfer.register(layers, dims="2bthd", page_tokens=TOKENS)
        store = transfer.store([Copying(0, kv.view([1]), 0, 1, memoryview(bytearray(kv.page_bytes)))])
    store.computed(Layer(0, 0))
    with pytest.raises(ClosedError):
        store.end().result(10)
    store.free()
    store.close()

"""Every wait of the pipeline is needed, and with all of them no seed goes wrong.

An engine computes layer after layer on its stream, and stores them; a second request takes the same blocks as soon as
it may; then the first is loaded again while the engine still has something to do to those blocks. All on a device
whose streams run beside each other with pauses drawn by a seed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotInTime
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lmcache_core.streaming import Copying, Layer
from lmcache_cuda.errors import DriverError
from lmcache_transfer.device import Event
from lmcache_transfer.pipeline import Move
from lmcache_transfer.streamed import StreamedKV, StreamedTransfer, StreamOptions
from lmcache_transfer.streams import Load, Store, StreamThread
from tests.transfer.jitter import Site, Waits, jittered

LAYERS, BLOCKS, TOKENS, WIDTH = 4, 12, 4, 64
PAGES = 6
ENGINE_TAKES = 0.01
"""Seconds that what the engine computes takes, longer than copies mostly do."""
ORDER = [Layer(0, layer) for layer in range(LAYERS)]
WAYS: dict[str, dict[str, Any]] = {
    "staged": {"mapped": False},
    "mapped": {"mapped": True},
    "direct": {"mapped": False, "direct": 1},
}


class World:
    """An engine on a device, and what came of its KV."""

    def __init__(self, seed: int, way: str) -> None:
        self.device = jittered(seed, **WAYS[way])
        self.transfer = StreamedTransfer(self.device, StreamOptions())
        self.memory: list[NDArray[Any]] = [np.zeros((2, BLOCKS, TOKENS, WIDTH), np.uint8) for _ in ORDER]
        self.kv: StreamedKV = self.transfer.register(self.memory, dims="2btd", page_tokens=TOKENS)
        # Two pages of a layer fit, so each layer takes three turns with two buffers.
        self.transfer.thread.out._room = self.transfer.thread.into._room = 2 * self.kv.page_layer_bytes
        self.random = np.random.default_rng(seed)
        self.table = self.random.permutation(BLOCKS)[:PAGES]
        self.wrong: list[str] = []
        self.kept: list[memoryview] = []

    def compute(self, work: Callable[[], object]) -> None:
        """The engine submits this."""
        self.device.engine_stream().do(work)

    def write(self, layer: int, value: int) -> None:
        self.compute(lambda: self.memory[layer].__setitem__((slice(None), self.table), value))

    def copies(self, buffers: list[memoryview]) -> list[Copying]:
        view = self.kv.view(self.table)
        step = PAGES // len(buffers)
        return [Copying(0, view, step * number, step, buffer) for number, buffer in enumerate(buffers)]

    def buffers(self) -> list[memoryview]:
        return [memoryview(bytearray(PAGES // 2 * self.kv.page_bytes)) for _ in range(2)]

    def check(self, what: str, buffers: list[memoryview], first: int) -> None:
        """Each layer of all pages must have the value of its own."""
        for buffer in buffers:
            pages = np.frombuffer(buffer, np.uint8).reshape(-1, LAYERS, self.kv.page_layer_bytes)
            if not all((pages[:, layer] == first + layer).all() for layer in range(LAYERS)):
                self.wrong.append(what)

    def store(self, value: int) -> list[memoryview]:
        """Compute and store, then use the blocks for something else as soon as they may be."""
        buffers = self.buffers()
        self.kept += buffers  # what is written too late does not break the memory of others
        store = self.transfer.store(self.copies(buffers))
        for layer in ORDER:
            self.compute(lambda: time.sleep(ENGINE_TAKES / 4))
            self.write(layer.layer, value + layer.layer)
            store.computed(layer)
        done = store.end()
        store.free()
        self.compute(lambda: [memory.__setitem__((slice(None), self.table), 255) for memory in self.memory])
        done.result(10)
        kept = [memoryview(bytes(buffer)) for buffer in buffers]  # once it is done nothing is written any more
        store.close()
        self.check("store", kept, value)
        return kept

    def load(self, buffers: list[memoryview], value: int, *, layerwise: bool) -> None:
        """Load, while the engine still writes to the blocks, and read each layer as soon as it may be."""
        if layerwise:  # the engine is slower than copies then, and faster else
            self.compute(lambda: time.sleep(ENGINE_TAKES))
        for layer in ORDER:
            self.write(layer.layer, 254)
        mine = [memoryview(bytearray(buffer)) for buffer in buffers]
        self.kept += mine
        load = self.transfer.load(self.copies(mine), ORDER if layerwise else ())
        seen: dict[int, Any] = {}
        for layer in ORDER if layerwise else ():
            assert load.wait(layer)
            self.compute(lambda n=layer.layer: seen.__setitem__(n, self.memory[n][:, self.table].copy()))  # type: ignore[misc]
        load.done.result(10)
        for buffer in mine:  # the slots belong to others now
            buffer[:] = bytes([253]) * len(buffer)
        if not layerwise:
            for layer in ORDER:
                self.compute(lambda n=layer.layer: seen.__setitem__(n, self.memory[n][:, self.table].copy()))  # type: ignore[misc]
        ended = threading.Event()
        self.compute(ended.set)
        assert ended.wait(10)
        load.close()
        if not all((seen[layer] == value + layer).all() for layer in range(LAYERS)):
            self.wrong.append("load")

    def give_up(self, buffers: list[memoryview]) -> None:
        """Load, and use the blocks for something else before it has ended."""
        mine = [memoryview(bytearray(buffer)) for buffer in buffers]
        self.kept += mine
        load = self.transfer.load(self.copies(mine), ORDER)
        load.settle()
        for layer in ORDER:
            self.write(layer.layer, 222)
        load.done.result(10)
        ended = threading.Event()
        self.compute(ended.set)
        assert ended.wait(10)
        load.close()
        if not all((self.memory[layer.layer][:, self.table] == 222).all() for layer in ORDER):
            self.wrong.append("given up")

    def close(self) -> None:
        """End, while a store is under way that is never ended: nothing is written afterwards."""
        buffers = self.buffers()
        self.kept += buffers
        store = self.transfer.store(self.copies(buffers))
        self.compute(lambda: time.sleep(ENGINE_TAKES))
        store.computed(ORDER[0])
        self.transfer.close()
        for buffer in buffers:  # they are others' now
            buffer[:] = bytes([77]) * len(buffer)
        self.ended()
        if not all(buffer == bytes([77]) * len(buffer) for buffer in buffers):
            self.wrong.append("closed")

    def ended(self) -> None:
        """Wait until all streams, which have been closed, have done what they had to do."""
        for stream in self.device.streams:
            stream.ended()


@contextmanager
def world(seed: int, way: str) -> Iterator[World]:
    made = World(seed, way)
    try:
        yield made
    finally:
        made.transfer.close()
        made.ended()


def goes_wrong(seed: int, way: str) -> list[str]:
    """What went wrong with this seed."""
    with world(seed, way) as this:
        try:
            first, second = this.store(10), this.store(20)
            this.load(first, 10, layerwise=True)
            this.load(second, 20, layerwise=False)
            this.give_up(first)
            this.close()
        except (NotInTime, AssertionError) as failure:
            this.wrong.append(repr(failure))
        return this.wrong


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", WAYS)
def test_with_all_waits_no_seed_goes_wrong(way: str) -> None:
    with ThreadPoolExecutor(8) as several:  # mostly they pause
        found = several.map(lambda seed: (seed, goes_wrong(seed, way)), range(200))
        assert {seed: wrong for seed, wrong in found if wrong} == {}


def out_of_memory() -> Any:
    raise DriverError("cuEventCreate failed with CUDA_ERROR_OUT_OF_MEMORY (2)", 2)


@pytest.mark.parametrize("layers", [0, 2, LAYERS])
@pytest.mark.parametrize("way", WAYS)
def test_a_store_is_told_of_when_nothing_writes_any_more_also_if_the_driver_makes_no_events(
    way: str, layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(5):
        with world(seed, way) as this:
            buffers = this.buffers()
            store = this.transfer.store(this.copies(buffers))
            for layer in ORDER[:layers]:
                this.compute(lambda: time.sleep(ENGINE_TAKES))
                store.computed(layer)
            monkeypatch.setattr(this.device, "event", out_of_memory)
            store.close()
            failure = store.done.exception(10)
            assert failure is None or "OUT_OF_MEMORY" in str(failure)
            assert failure is not None or layers == LAYERS
            for buffer in buffers:  # they are others' now
                buffer[:] = bytes([77]) * len(buffer)
            this.transfer.close()
            this.ended()
            assert all(buffer == bytes([77]) * len(buffer) for buffer in buffers)


@pytest.mark.parametrize("way", WAYS)
def test_a_load_is_told_of_when_nothing_writes_any_more_also_if_the_driver_makes_no_events(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(5):
        with world(seed, way) as this:
            this.compute(lambda: time.sleep(ENGINE_TAKES))
            load = this.transfer.load(this.copies(this.buffers()), ORDER)
            monkeypatch.setattr(this.device, "event", out_of_memory)
            failure = load.done.exception(10)
            assert failure is None or "OUT_OF_MEMORY" in str(failure)
            for memory in this.memory:  # the blocks are others' now
                memory[:, this.table] = 77
            load.close()
            this.transfer.close()
            this.ended()
            assert all((memory[:, this.table] == 77).all() for memory in this.memory)


def a_layer_is_told_before_its_event_is_recorded(patch: pytest.MonkeyPatch) -> None:
    def submitted(self: Load, layer: Layer, record: Callable[[Event], None]) -> None:
        event, latch = self._events[layer]
        latch.open(good=True)
        record(event)

    patch.setattr(Load, "submitted", submitted)


def the_end_of_a_load_is_told_before_its_event_is_recorded(patch: pytest.MonkeyPatch) -> None:
    def ended(self: Load, record: Callable[[Event], None]) -> None:
        self._latch.open(good=True)
        record(self._all)

    patch.setattr(Load, "ended", ended)


def that_blocks_are_read_is_told_before_its_event_is_recorded(patch: pytest.MonkeyPatch) -> None:
    end_store = StreamThread.end_store

    def told(self: StreamThread, store: Store) -> None:
        store.submitted(good=True)
        end_store(self, store)

    patch.setattr(StreamThread, "end_store", told)


def a_layer_is_handed_over_before_its_event_is_recorded(patch: pytest.MonkeyPatch) -> None:
    def submit(self: Store, jobs: Any) -> None:
        event = self._device.event()
        self._events.append(event)
        self._thread.put(lambda: self._thread.outward(self, jobs, event))
        self._device.engine_stream().record(event)

    patch.setattr(Store, "_submit", submit)


def the_numbers_of_blocks_are_sent_on_a_stream_that_does_not_use_them(patch: pytest.MonkeyPatch) -> None:
    send = Move.send
    patch.setattr(Move, "send", lambda self, device, stream: send(self, device, device.engine_stream()))


ORDERS = [
    a_layer_is_told_before_its_event_is_recorded,
    the_end_of_a_load_is_told_before_its_event_is_recorded,
    that_blocks_are_read_is_told_before_its_event_is_recorded,
    a_layer_is_handed_over_before_its_event_is_recorded,
    the_numbers_of_blocks_are_sent_on_a_stream_that_does_not_use_them,
]


@pytest.mark.parametrize("plant", ORDERS, ids=lambda plant: plant.__name__)
def test_in_the_wrong_order_something_goes_wrong(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert any(goes_wrong(seed, way) for seed in range(20) for way in WAYS)


def sites() -> dict[Site, list[str]]:
    """Every place that waits, and the ways that pass it."""
    found: dict[Site, list[str]] = {}
    for way in WAYS:
        waits = Waits()
        with waits.watched():
            assert goes_wrong(0, way) == []
        for site in waits.seen:
            found.setdefault(site, []).append(way)
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_without_any_single_wait_something_goes_wrong() -> None:
    """Within 20 seeds, on one of the ways that pass it."""
    places = sites()
    needless = []
    for site, ways in sorted(places.items()):
        waits = Waits()
        waits.left_out = site
        with waits.watched():
            if not any(goes_wrong(seed, way) for seed in range(20) for way in ways):
                needless.append(site)
    assert needless == []
    assert len(places) == 19

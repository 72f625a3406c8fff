"""Kernels and copies on a device, all that they touch in its memory: on a GPU where there is one, and always on the
driver whose device is the host, which shows that these tests would pass there."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from lmcache_cuda.compiling import compile_kernels
from lmcache_cuda.device import Device, Event, Memory, Piece, Stream
from lmcache_cuda.driver import Driver
from lmcache_cuda.errors import DriverError, UnavailableError
from lmcache_cuda.geometry import Payload, Planes, Units, arrange
from lmcache_cuda.kernels import Kernels
from tests.cuda.engines import address, case


class Gpu(NamedTuple):
    device: Device
    kernels: Kernels


@pytest.fixture(params=["as if", "real"])
def gpu(request: pytest.FixtureRequest) -> Iterator[Gpu]:
    if request.param == "as if":
        device, image = Device(Driver(request.getfixturevalue("fake").path)), b"\x7fELF as if"
    else:
        try:
            device = Device(Driver())
            image = compile_kernels(device.capability, driver=device.driver.version)
        except (UnavailableError, DriverError) as missing:
            pytest.skip(f"a GPU, its driver or a compiler is missing: {missing}")
    with device.current():
        kernels = Kernels(device, image)
        yield Gpu(device, kernels)
        kernels.close()
    device.close()


class Mirror:
    """Arrays in the memory of a device."""

    def __init__(self, device: Device, stream: Stream, *arrays: NDArray[Any]) -> None:
        self._stream = stream
        self._there = {address(array): (array, Memory(device, array.nbytes)) for array in arrays}

    def send(self) -> None:
        whole = [Piece(memory.handle, where, memory.nbytes) for where, (_, memory) in self._there.items()]
        self._stream.copy_all(whole)

    def at(self, array: NDArray[Any]) -> int:
        return self._there[address(array)][1].handle

    def fetch(self, array: NDArray[Any]) -> NDArray[Any]:
        got = np.empty_like(array)
        self._stream.copy(address(got), self.at(array), got.nbytes)
        self._stream.synchronize()
        return got

    def close(self) -> None:
        for _, memory in self._there.values():
            memory.close()


@pytest.mark.parametrize("max_blocks", [1, 8])
def test_every_byte_goes_where_it_belongs(gpu: Gpu, max_blocks: int) -> None:
    stream = Stream(gpu.device)
    widths = set()
    for seed in range(1000, 1060):
        this = case(seed)
        table = np.zeros(len(this.planes), np.uint64)
        mirror = Mirror(gpu.device, stream, this.chunk, this.numbers, table, *this.memory)
        call = this.call(table, mirror.at)
        widths.add(call.width)
        for verb in (gpu.kernels.gather, gpu.kernels.scatter):
            mirror.send()
            verb(call, stream, max_blocks=max_blocks)
            chunk, memory = this.expected(gather=verb == gpu.kernels.gather)
            np.testing.assert_array_equal(mirror.fetch(this.chunk), chunk, err_msg=this.name)
            for before, expected in zip(this.memory, memory, strict=True):
                np.testing.assert_array_equal(mirror.fetch(before), expected, err_msg=this.name)
        mirror.close()
    assert widths == {16, 8, 4, 2, 1}
    stream.close()


LAYERS, BLOCKS, TOKENS, ROW = 4, 128, 16, 2048
BLOCK = TOKENS * ROW
UNITS = Units(blocks=BLOCKS, block_stride=BLOCK, block_units=1, unit_stride=0, axes=(), run=BLOCK)
PAGES, PAGE_UNITS = 8, 4
PAYLOAD = Payload(PAGE_UNITS, 2 * LAYERS * PAGE_UNITS * BLOCK, PAGE_UNITS * BLOCK, BLOCK)


def engine(generator: np.random.Generator) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.uint8]]:
    """K and V of an engine by layer and block, some of its blocks, and the chunk that they make."""
    memory = generator.integers(0, 256, (LAYERS * 2, BLOCKS, BLOCK), np.uint8)
    numbers = generator.permutation(BLOCKS)[: PAGES * PAGE_UNITS].astype(np.int64)
    chunk = memory[:, numbers.reshape(PAGES, PAGE_UNITS)].swapaxes(0, 1)
    return memory, numbers, np.ascontiguousarray(chunk)


def test_streams_wait_for_events(gpu: Gpu) -> None:
    """In, gather and out on a stream each. Where one did not wait for another, old bytes would come out."""
    with ExitStack() as stack:
        streams = [Stream(gpu.device, urgent=urgent) for urgent in (False, True, False)]
        events = [Event(gpu.device) for _ in range(3)]
        generator = np.random.default_rng(5)
        memory, numbers, chunk = engine(generator)
        table = np.zeros(len(memory), np.uint64)
        mirror = Mirror(gpu.device, streams[0], memory, numbers, chunk, table)
        stack.callback(mirror.close)
        for each in (*streams, *events):
            stack.callback(each.close)
        table[:] = mirror.at(memory) + np.arange(len(memory), dtype=np.uint64) * memory[0].nbytes
        planes = Planes(mirror.at(table), len(memory), 16)
        call = arrange(
            UNITS,
            PAYLOAD,
            planes=planes,
            chunk=mirror.at(chunk),
            numbers=mirror.at(numbers),
            count=len(numbers),
        )
        out = np.zeros_like(chunk)
        pinned = [(address(array), array.nbytes) for array in (memory, out)]
        for where in pinned:
            gpu.device.register(*where)
            stack.callback(gpu.device.unregister, where[0])
        for _ in range(5):
            memory[:], numbers[:], expected = engine(generator)
            mirror.send()
            streams[0].record(events[0])
            streams[1].wait(events[0])
            gpu.kernels.gather(call, streams[1], max_blocks=2)
            streams[1].record(events[1])
            streams[2].wait(events[1])
            streams[2].copy(address(out), mirror.at(chunk), out.nbytes)
            streams[2].record(events[2])
            events[2].synchronize()
            assert events[2].query()
            np.testing.assert_array_equal(out, expected)


def test_kernels_reach_registered_memory_of_the_host(gpu: Gpu) -> None:
    """A chunk in shared memory of the host, which the device maps: no copy in between."""
    memory, numbers, expected = engine(np.random.default_rng(6))
    shared = np.frombuffer(mmap.mmap(-1, expected.nbytes), np.uint8)
    table = np.zeros(len(memory), np.uint64)
    with ExitStack() as stack:
        stream = Stream(gpu.device)
        mirror = Mirror(gpu.device, stream, memory, numbers, table)
        stack.callback(mirror.close)
        stack.callback(stream.close)
        gpu.device.register(address(shared), shared.nbytes)
        stack.callback(gpu.device.unregister, address(shared))
        table[:] = mirror.at(memory) + np.arange(len(memory), dtype=np.uint64) * memory[0].nbytes
        call = arrange(
            UNITS,
            PAYLOAD,
            planes=Planes(mirror.at(table), len(memory), 16),
            chunk=gpu.device.mapped(address(shared)),
            numbers=mirror.at(numbers),
            count=len(numbers),
        )
        mirror.send()
        gpu.kernels.gather(call, stream, max_blocks=4)
        stream.synchronize()
        np.testing.assert_array_equal(shared, expected.ravel())
        memory[:] = 0
        mirror.send()
        gpu.kernels.scatter(call, stream, max_blocks=4)
        back = mirror.fetch(memory)
        np.testing.assert_array_equal(back[:, numbers.reshape(PAGES, PAGE_UNITS)].swapaxes(0, 1), expected)
        assert not np.delete(back, numbers, axis=1).any()


def test_one_layer_at_a_time(gpu: Gpu) -> None:
    memory, numbers, expected = engine(np.random.default_rng(7))
    table, out = np.zeros(len(memory), np.uint64), np.zeros_like(expected)
    stream = Stream(gpu.device)
    mirror = Mirror(gpu.device, stream, memory, numbers, table, out)
    table[:] = mirror.at(memory) + np.arange(len(memory), dtype=np.uint64) * memory[0].nbytes
    planes = Planes(mirror.at(table), len(memory), 16)
    mirror.send()
    for layer in range(LAYERS):
        call = arrange(
            UNITS,
            PAYLOAD,
            planes=planes.layers(layer, 1, planes_a_layer=2),
            chunk=mirror.at(out) + layer * 2 * PAYLOAD.plane_stride,
            numbers=mirror.at(numbers),
            count=len(numbers),
        )
        gpu.kernels.gather(call, stream, max_blocks=4)
        got, done = mirror.fetch(out), 2 * (layer + 1)
        np.testing.assert_array_equal(got[:, :done], expected[:, :done])
        assert not got[:, done:].any()
    mirror.close()
    stream.close()

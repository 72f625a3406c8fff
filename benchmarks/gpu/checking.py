"""What must hold on a GPU: kernels against numpy on random layouts, and copies beside an engine in any order."""

from __future__ import annotations

import mmap
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu.gpu import Gpu, Tensor, address
from lmcache_core.streaming import Copying, Layer
from lmcache_cuda.device import Piece
from lmcache_transfer.streamed import StreamedKV, StreamedTransfer, StreamOptions
from tests.cuda.engines import Case, case

__all__ = ["check_kernels", "check_pipeline"]


def check_kernels(gpu: Gpu, cases: int) -> int:
    """Gather and scatter of every width against numpy's own indexing. Returns how many launches were compared.

    Raises:
        AssertionError: A byte is not where it belongs; the message says of which layout.
    """
    widths = set()
    for seed in range(cases):
        this = case(seed)
        for gather in (True, False):
            widths.add(_check(gpu, this, gather=gather))
    assert widths == {1, 2, 4, 8, 16} or cases < 100, f"only {sorted(widths)} of the kernels were checked"
    return 2 * cases


def _check(gpu: Gpu, this: Case, *, gather: bool) -> int:
    table = np.zeros(len(this.planes), np.uint64)
    arrays: list[NDArray[Any]] = [this.chunk, this.numbers, table, *this.memory]
    with gpu.memory(*(each.nbytes for each in arrays)) as places:
        there = {address(each): place for each, place in zip(arrays, places, strict=True)}
        call = this.call(table, lambda array: there[address(array)])
        for array, place in zip(arrays, places, strict=True):
            gpu.send(place, array)
        with gpu.stream() as stream:
            (gpu.kernels.gather if gather else gpu.kernels.scatter)(call, stream, max_blocks=8)
        chunk, memory = this.expected(gather=gather)
        for array, expected in zip([this.chunk, *this.memory], [chunk, *memory], strict=True):
            got = gpu.fetch(there[address(array)], array.nbytes)
            assert np.array_equal(got, expected.reshape(-1)), f"{'gather' if gather else 'scatter'}: {this.name}"
    return call.width


LAYERS, BLOCKS, TOKENS, ROW = 4, 64, 16, 4096
BLOCK = TOKENS * ROW
PAGES = 24
ORDER = [Layer(0, layer) for layer in range(LAYERS)]


def pattern(value: int) -> NDArray[np.uint8]:
    """What a layer holds that was computed with a value, `[half, block, byte]`: no two blocks hold the same."""
    made = np.full((2, BLOCKS, BLOCK), value, np.uint8)
    made[..., ::2] = np.arange(2 * BLOCKS).reshape(2, BLOCKS, 1)
    return made


class Engine:
    """KV of four layers in the GPU's memory. It "computes" a layer by copying a pattern over it, on its own stream."""

    def __init__(self, gpu: Gpu, memory: int, patterns: int, transfer: StreamedTransfer) -> None:
        self.gpu = gpu
        self.size = 2 * BLOCKS * BLOCK
        self._memory, self._patterns = memory, patterns
        tensors = [
            Tensor(memory + n * self.size, (2, BLOCKS, TOKENS, ROW), (BLOCKS * BLOCK, BLOCK, ROW, 1), 1, gpu.number)
            for n in range(LAYERS)
        ]
        self.kv: StreamedKV = transfer.register(tensors, dims="2btd", page_tokens=TOKENS)

    def compute(self, layer: int, value: int) -> None:
        """Have a layer hold what a value makes of it."""
        target = self._memory + layer * self.size
        for each in (*range(8), value):  # it takes its time, and is right at the end only
            self.gpu.engine.copy_all([Piece(target, self._patterns + (each % 16) * self.size, self.size)])

    def layer(self, number: int) -> NDArray[np.uint8]:
        """What a layer holds."""
        return self.gpu.fetch(self._memory + number * self.size, self.size)


@contextmanager
def engine(gpu: Gpu, *, direct: int, staging: int) -> Iterator[tuple[Engine, StreamedTransfer]]:
    """One, and what copies its KV."""
    size = 2 * BLOCKS * BLOCK
    with ExitStack() as stack:
        memory, patterns = stack.enter_context(gpu.memory(LAYERS * size, 16 * size))
        for value in range(16):
            gpu.send(patterns + value * size, pattern(value))
        transfer = StreamedTransfer(gpu.wrapped(direct=direct), StreamOptions(staging=staging))
        stack.callback(transfer.close)
        yield Engine(gpu, memory, patterns, transfer), transfer


def check_pipeline(gpu: Gpu, seeds: int) -> int:
    """An engine that computes on while its KV is stored and loaded. Returns how many stores and loads were compared.

    Raises:
        AssertionError: Bytes are not those that the engine had, or something has ended that had not.
    """
    compared = 0
    for direct in (0, 1):
        with engine(gpu, direct=direct, staging=1 << 20) as (this, transfer):
            nbytes = PAGES * this.kv.page_bytes
            memory = memoryview(mmap.mmap(-1, 2 * nbytes))
            transfer.pin(memory)
            for seed in range(seeds):
                _store_and_load(this, transfer, memory[:nbytes], memory[nbytes:], seed)
                compared += 2
    return compared


def _store_and_load(this: Engine, transfer: StreamedTransfer, out: memoryview, into: memoryview, seed: int) -> None:
    draw = random.Random(seed)
    table = np.array(draw.sample(range(BLOCKS), PAGES))
    cut = draw.randrange(1, PAGES)
    value = draw.randrange(8)
    page = this.kv.page_bytes

    def copies(memory: memoryview) -> list[Copying]:
        view = this.kv.view(table)
        return [
            Copying(0, view, 0, cut, memory[: cut * page]),
            Copying(0, view, cut, PAGES - cut, memory[cut * page :]),
        ]

    store = transfer.store(copies(out))
    for layer in ORDER:
        this.compute(layer.layer, value + layer.layer)
        if draw.random() < 0.8:
            store.computed(layer)
    done = store.end()
    store.free()
    for layer in ORDER:
        this.compute(layer.layer, 15)  # the blocks are somebody else's now
    done.result(30)
    store.close()
    pages = np.frombuffer(out, np.uint8).reshape(PAGES, LAYERS, 2, BLOCK)
    for number in range(LAYERS):
        expected = pattern(value + number)[:, table].swapaxes(0, 1)
        assert (pages[:, number] == expected).all(), f"stored wrong: seed {seed}, layer {number}"
    into[:] = out
    load = transfer.load(copies(into), ORDER if draw.random() < 0.7 else ())
    for layer in ORDER:
        assert load.wait(layer), f"not there: seed {seed}, {layer}"
    load.settle()
    this.gpu.engine.synchronize()
    load.done.result(30)
    load.close()
    for number in range(LAYERS):
        got: NDArray[Any] = this.layer(number).reshape(2, BLOCKS, -1)
        assert (got[:, table] == pattern(value + number)[:, table]).all(), f"loaded wrong: seed {seed}, layer {number}"
        others = np.setdiff1d(np.arange(BLOCKS), table)
        assert (got[:, others] == pattern(15)[:, others]).all(), f"loaded too much: seed {seed}, layer {number}"

"""What a GPU does: copies, kernels, and KV of a prompt on its way, layer by layer and whole."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import numpy as np

from benchmarks.gpu.gpu import Gpu, Tensor
from benchmarks.harness import GB, Row, plain
from lmcache_core.planning.measured import fit
from lmcache_core.streaming import Copying, Layer
from lmcache_cuda.device import Event, Piece, Stream
from lmcache_cuda.geometry import Call, Payload, Planes, Units, arrange
from lmcache_transfer.streamed import StreamedTransfer, StreamOptions

__all__ = ["Scale", "copies", "kernels", "prompt", "runs"]

Work = Callable[[Stream], object]


class Scale:
    """How much is moved.

    Args:
        large: Bytes of the largest copies.
        tokens: Of the prompt.
    """

    def __init__(self, large: int = 256 << 20, tokens: int = 8192) -> None:
        self.large = large
        self.tokens = tokens


def copies(gpu: Gpu, scale: Scale, line: float | None) -> Iterator[Row]:
    """Latency and bandwidth of single copies both ways, by the line through many sizes, and what a batch costs."""
    with gpu.memory(scale.large) as (there,), gpu.host(scale.large) as host:
        for name, pair in (("out", (host.address, there)), ("in", (there, host.address))):
            points = []
            size = 4096
            while size <= scale.large:
                took = gpu.seconds(_copied([Piece(*pair, size)]), times=9)
                points.append((float(size), took))
                size *= 4
            link = fit(points)
            limit = line or link.bandwidth
            yield Row(f"gpu.copy_{name}.rate", link.bandwidth / GB, "GB/s", limit / GB, link.bandwidth / limit)
            yield plain(f"gpu.copy_{name}.latency", link.latency * 1e6, "us")
            yield plain(f"gpu.copy_{name}.n90", 9 * link.latency * link.bandwidth / 2**20, "MiB")
        count, piece = 512, min(4096, scale.large // 512)
        pieces = [Piece(host.address + n * piece, there + n * piece, piece) for n in range(count)]
        yield plain("gpu.batch.piece", gpu.seconds(_copied(pieces)) / count * 1e6, "us")
        with gpu.stream() as stream:
            event = Event(gpu.device)
            started = time.perf_counter()
            for _ in range(1000):
                stream.record(event)
            yield plain("gpu.record", (time.perf_counter() - started) * 1e3, "us")
            event.close()


def kernels(gpu: Gpu, scale: Scale) -> Iterator[Row]:
    """How fast kernels gather and scatter within the GPU's memory, by the multiprocessors that they may take; and what
    a launch costs."""
    block = 16 * 4096
    blocks = max(8, scale.large // block)
    numbers = np.random.default_rng(1).permutation(blocks).astype(np.int64)
    table = np.zeros(1, np.uint64)
    with gpu.memory(blocks * block, blocks * block, numbers.nbytes, 8) as (paged, chunk, places, planes):
        table[0] = paged
        gpu.send(places, numbers)
        gpu.send(planes, table)
        units = Units(blocks=blocks, block_stride=block, block_units=1, unit_stride=0, axes=(), run=block)
        call = arrange(
            units,
            Payload(4, 4 * block, 4 * block, block),
            planes=Planes(planes, 1, 16),
            chunk=chunk,
            numbers=places,
            count=blocks,
        )
        small = arrange(
            units, Payload(1, block, block, block), planes=Planes(planes, 1, 16), chunk=chunk, numbers=places, count=1
        )
        most = gpu.device.multiprocessors
        cap = 1
        while cap <= most:
            for name, kernel in (("gather", gpu.kernels.gather), ("scatter", gpu.kernels.scatter)):
                took = gpu.seconds(_launched(kernel, call, cap))
                yield plain(f"gpu.{name}.{cap}_of_{most}", blocks * block / took / GB, "GB/s")
            cap *= 2
        with gpu.stream() as stream:
            started = time.perf_counter()
            for _ in range(500):
                gpu.kernels.gather(small, stream, max_blocks=1)
            yield plain("gpu.launch", (time.perf_counter() - started) / 500 * 1e6, "us")


def runs(gpu: Gpu, scale: Scale) -> Iterator[Row]:
    """Ways to bring scattered pages to the host, by the length of the runs in which they lie: a kernel and a staging
    buffer and one copy; a kernel that writes to the host's memory; copies of the runs as they are."""
    total = min(64 << 20, scale.large)
    for run in (512, 2048, 8192, 32768, 131072, 524288):
        count = total // run
        if count < 2:
            continue
        numbers = np.random.default_rng(run).permutation(count).astype(np.int64)
        with gpu.memory(total, total, numbers.nbytes, 8) as (paged, staging, places, planes), gpu.host(total) as host:
            gpu.send(places, numbers)
            gpu.send(planes, np.array([paged], np.uint64))
            units = Units(blocks=count, block_stride=run, block_units=1, unit_stride=0, axes=(), run=run)
            payload = Payload(count, total, total, run)
            where = Planes(planes, 1, 16)
            calls = {
                name: arrange(units, payload, planes=where, chunk=chunk, numbers=places, count=count)
                for name, chunk in (("staged", staging), ("mapped", gpu.device.mapped(host.address)))
            }
            pieces = [Piece(host.address + n * run, paged + at * run, run) for n, at in enumerate(numbers.tolist())]

            ways = {
                "staged": _gathered(gpu, calls["staged"], [Piece(host.address, staging, total)]),
                "mapped": _gathered(gpu, calls["mapped"], []),
                "direct": _copied(pieces),
            }
            for way, work in ways.items():
                yield plain(f"gpu.run_{run}.{way}", total / gpu.seconds(work, times=3) / GB, "GB/s")


def _gathered(gpu: Gpu, call: Call, then: Sequence[Piece]) -> Work:
    def work(stream: Stream) -> None:
        gpu.kernels.gather(call, stream, max_blocks=8)
        stream.copy_all(then)

    return work


def _copied(pieces: Sequence[Piece]) -> Work:
    return lambda stream: stream.copy_all(pieces)


def _launched(kernel: Callable[..., None], call: Call, cap: int) -> Work:
    return lambda stream: kernel(call, stream, max_blocks=cap)


def prompt(gpu: Gpu, scale: Scale) -> Iterator[Row]:
    """KV of a prompt in the shape of Llama-3-8B, stored and loaded by the transfer: whole, and layer by layer with
    nothing computed meanwhile. The first layer is what an engine waits for before it can begin."""
    layers, heads, dim, block = 32, 8, 128, 16
    blocks = scale.tokens // block
    page_tokens = min(256, scale.tokens)
    layer_bytes = 2 * blocks * block * heads * dim * 2
    order = [Layer(0, layer) for layer in range(layers)]
    with ExitStack() as stack:
        (memory,) = stack.enter_context(gpu.memory(layers * layer_bytes))
        host = stack.enter_context(gpu.host(layers * layer_bytes))
        strides = (blocks * block * heads * dim, block * heads * dim, heads * dim, dim, 1)
        tensors = [
            Tensor(memory + n * layer_bytes, (2, blocks, block, heads, dim), strides, 2, gpu.number)
            for n in range(layers)
        ]
        transfer = StreamedTransfer(gpu.wrapped(), StreamOptions())
        stack.callback(transfer.close)
        kv = transfer.register(tensors, dims="2bthd", page_tokens=page_tokens)
        table = np.random.default_rng(2).permutation(blocks)
        view = kv.view(table)
        pages = scale.tokens // page_tokens
        whole = [Copying(0, view, n, 1, host.memory[n * kv.page_bytes : (n + 1) * kv.page_bytes]) for n in range(pages)]
        nbytes = pages * kv.page_bytes
        with gpu.stream() as stream:
            stream.copy(host.address, memory, nbytes)
            stream.synchronize()
            started = time.perf_counter()
            stream.copy(host.address, memory, nbytes)
            stream.synchronize()
            limit = nbytes / (time.perf_counter() - started) / GB

        def store(by_layer: bool) -> float:
            started = time.perf_counter()
            under_way = transfer.store(whole)
            for layer in order if by_layer else ():
                under_way.computed(layer)
            under_way.end().result(60)
            took = time.perf_counter() - started
            under_way.close()
            return took

        def load(by_layer: bool) -> tuple[float, float]:
            started = time.perf_counter()
            under_way = transfer.load(whole, order if by_layer else ())
            first = 0.0
            if by_layer:
                under_way.wait(order[0])
                gpu.engine.synchronize()
                first = time.perf_counter() - started
            under_way.done.result(60)
            took = time.perf_counter() - started
            under_way.close()
            return took, first

        for by_layer, name in ((False, "whole"), (True, "layers")):
            stored = min(store(by_layer) for _ in range(4))
            loaded = [load(by_layer) for _ in range(4)]
            took = min(each for each, _ in loaded)
            for row, seconds in (("store", stored), ("load", took)):
                rate = nbytes / seconds / GB
                yield Row(f"gpu.prompt.{row}_{name}", rate, "GB/s", limit, rate / limit)
            if by_layer:
                yield plain("gpu.prompt.first_layer", min(first for _, first in loaded) * 1e3, "ms")

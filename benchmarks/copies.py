"""How fast KV is copied between an engine's blocks and the host pool, as a ratio to memcpy of the same bytes.

    python -m benchmarks.copies [--rounds 7] [--chunks 16]

Llama-3-8B: 32 layers, K and V apart, 8 heads of 128, two bytes an element; a chunk of 256 tokens is 32 MiB. Blocks lie
in random order. Each figure is the median over rounds of the ratio to a memcpy measured just before, both sides touched
beforehand; making the view is part of the time. "busy" is beside a thread that runs Python without pause, and its
ratio is to a memcpy that is alone.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmcache_transfer.cpu import Layout, PagedKV, PagedView

LAYERS, HEADS, DIM = 32, 8, 128
CHUNK_TOKENS, PAGE_TOKENS = 256, 64
PAGES = CHUNK_TOKENS // PAGE_TOKENS
CHUNK_BYTES = LAYERS * 2 * CHUNK_TOKENS * HEADS * DIM * 2
SHIFT = {"separate": 0, "separate in the heap": 64}
PLACES = ["one allocation", *SHIFT, "around the pool"]


class Pool:
    """Slots in a memfd, as the host pool has them."""

    def __init__(self, chunks: int) -> None:
        descriptor = os.memfd_create("copies")
        os.ftruncate(descriptor, chunks * CHUNK_BYTES)
        self.memory = memoryview(mmap.mmap(descriptor, chunks * CHUNK_BYTES))
        os.close(descriptor)
        self.slots = self.touched(self.memory)

    @staticmethod
    def touched(memory: memoryview) -> list[memoryview]:
        np.frombuffer(memory, np.uint8)[:] = 1
        return [memory[i : i + CHUNK_BYTES] for i in range(0, len(memory), CHUNK_BYTES)]


def apart(shape: tuple[int, ...], i: int, shift: int) -> NDArray[np.uint16]:
    """An allocation of its own, `64 + i * shift` bytes behind the start of a memory page: large allocations start like
    that with a shift of 0, small ones (they come from the heap) with one of 64."""
    size = int(np.prod(shape)) * 2
    whole = np.ones(size + 3 * 4096, np.uint8)
    start = -whole.ctypes.data % 4096 + 64 + i * shift
    return whole[start : start + size].view(np.uint16).reshape(shape)


def tensors(place: str, shape: tuple[int, ...], chunks: int) -> tuple[list[Any], list[memoryview]]:
    """Layers of an engine, and the slots to copy to."""
    if place in SHIFT:
        return [apart(shape, i, SHIFT[place]) for i in range(LAYERS)], Pool(chunks).slots
    if place == "one allocation":
        return list(np.ones((LAYERS, *shape), np.uint16)), Pool(chunks).slots
    size = int(np.prod(shape)) * 2
    whole = np.ones(LAYERS * size + chunks * CHUNK_BYTES, np.uint8)
    middle = LAYERS // 2 * size
    before, slots, after = np.split(whole, [middle, middle + chunks * CHUNK_BYTES])
    halves = [part.view(np.uint16).reshape(-1, *shape) for part in (before, after)]
    return [*halves[0], *halves[1]], Pool.touched(memoryview(slots))  # type: ignore[arg-type]


@contextmanager
def busy(wanted: bool) -> Iterator[None]:
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            sum(range(1000))

    thread = threading.Thread(target=spin, daemon=True)
    if wanted:
        thread.start()
        time.sleep(0.05)
    yield
    stop.set()
    if wanted:
        thread.join()


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def memcpy(source: NDArray[np.uint8], slots: list[memoryview], into_slots: bool) -> None:
    for i, slot in enumerate(slots):
        ends = [np.frombuffer(slot, np.uint8).ctypes.data, source.ctypes.data + i * CHUNK_BYTES]
        target, origin = ends if into_slots else ends[::-1]
        ctypes.memmove(target, origin, CHUNK_BYTES)


def each_chunk(make: Callable[[], PagedView], slots: list[memoryview], verb: str) -> None:
    view = make()
    for i, slot in enumerate(slots):
        getattr(view, verb)(0, i * PAGES, PAGES, slot)


def measure(title: str, kv: PagedKV, ids: list[int], slots: list[memoryview], rounds: int) -> None:
    flat = np.ones(len(slots) * CHUNK_BYTES, np.uint8)
    ratios: dict[str, list[float]] = {}
    each_chunk(lambda: kv.view(ids), slots, "gather")
    for _ in range(rounds):
        for verb in ("gather", "scatter"):
            for spinning in (False, True):
                reference = seconds(lambda verb=verb: memcpy(flat, slots, verb == "gather"))  # type: ignore[misc]
                with busy(spinning):
                    took = seconds(lambda verb=verb: each_chunk(lambda: kv.view(ids), slots, verb))  # type: ignore[misc]
                name = verb + " busy" * spinning
                ratios.setdefault(name, []).append(reference / took)
                ratios.setdefault("GB/s", []).append(len(flat) / reference / 1e9)
    figures = "  ".join(f"{name} {statistics.median(ratios[name]):5.2f}" for name in sorted(ratios))
    print(f"{title:52s} {figures}", flush=True)


def paged(block_tokens: int, place: str, dims: str, layout: Layout, chunks: int, rounds: int) -> None:
    used = chunks * CHUNK_TOKENS // block_tokens
    size = {"2": 2, "b": used * 3 // 2, "t": block_tokens, "h": HEADS, "d": DIM}
    layers, slots = tensors(place, tuple(size[axis] for axis in dims), chunks)
    kv = PagedKV(layers, dims=dims, page_tokens=PAGE_TOKENS, layout=layout)
    ids = np.random.default_rng(0).permutation(size["b"])[:used].tolist()
    measure(f"{dims}, blocks of {block_tokens}, {place}, {layout}", kv, ids, slots, rounds)


def contiguous(chunks: int, rounds: int) -> None:
    """transformers: K and V of a layer are tensors `[1, head, token, dim]`."""
    shape = (1, HEADS, chunks * CHUNK_TOKENS + 100, DIM)
    layers = [(apart(shape, 2 * i, 64), apart(shape, 2 * i + 1, 64)) for i in range(LAYERS)]
    kv = PagedKV(layers, dims="1htd", page_tokens=PAGE_TOKENS, block_tokens=PAGE_TOKENS)
    measure("1htd, contiguous, separate, native", kv, list(range(kv.blocks)), Pool(chunks).slots, rounds)


def small(rounds: int) -> None:
    """What a call costs by itself: SmolLM-135M, 16-token pages, a chunk of 4 pages is 1.4 MB."""
    layers = [apart((2, 64, 16, 3, 64), i, 64) for i in range(30)]
    kv = PagedKV(layers, dims="2bthd", page_tokens=16)
    slot = memoryview(bytearray(4 * kv.page_bytes))
    one = PagedKV(layers[:1], dims="2bthd", page_tokens=16)
    tiny = memoryview(bytearray(one.page_bytes))
    source, target = np.ones(len(slot), np.uint8), np.ones(len(slot), np.uint8)
    view = kv.view(range(64))
    rows = {
        "memcpy of a chunk": lambda: np.copyto(target, source),
        "view of 64 blocks": lambda: kv.view(range(64)),
        "gather of 4 pages": lambda: view.gather(0, 0, 4, slot),
        "view and gather of 4 pages": lambda: kv.view([3, 1, 2, 0]).gather(0, 0, 4, slot),
        "view and scatter of 4 pages": lambda: kv.view([3, 1, 2, 0]).scatter(0, 0, 4, slot),
        "view and gather of one page, one layer (12 KiB)": lambda: one.view([3]).gather(0, 0, 1, tiny),
        "register 30 layers": lambda: PagedKV(layers, dims="2bthd", page_tokens=16),
    }
    for title, work in rows.items():
        times = [seconds(lambda work=work: [work() for _ in range(50)]) / 50 for _ in range(rounds)]  # type: ignore[misc]
        print(f"{title:52s} {statistics.median(times) * 1e6:8.1f} us", flush=True)


def main() -> None:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--chunks", type=int, default=16)
    given = arguments.parse_args()
    print(f"numpy {np.__version__}, Python {sys.version.split()[0]}, {os.cpu_count()} CPUs; GB/s is of memcpy")
    small(given.rounds)
    for block_tokens in (16, 64):
        for place in PLACES:
            paged(block_tokens, place, "2bthd", "native", given.chunks, given.rounds)
    paged(16, "separate", "2bhtd", "canonical", given.chunks, given.rounds)
    paged(16, "separate", "2bhdt", "canonical", given.chunks, given.rounds)
    contiguous(given.chunks, given.rounds)


if __name__ == "__main__":
    main()

"""Compressing and encrypting frames, beside memcpy of as much and beside plain sealing; and what a thread that wakes
meanwhile waits for."""

from __future__ import annotations

import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from benchmarks.harness import Buffer, Row, Scale, at_most, memcpy, rate, seconds
from lmcache_core import frame
from lmcache_core.coding.cipher import Keyring
from lmcache_core.coding.frames import Subject, decode, encode
from lmcache_core.frame import Codec

__all__ = ["ROWS", "coding"]

SIZES = (8, 32)
"""MiB of a chunk, in four pages."""
PAGES = 4
WORKS = ("encrypt", "decrypt", "lz4.pack", "lz4.unpack", "zstd.pack", "zstd.unpack")
WAKES = 60
"""Of each kind in a round."""
ROWS = [
    *(f"coding.{work}.{size}" for size in SIZES for work in ("seal", *WORKS)),
    *(f"coding.beside_p95_us.{work}" for work in ("seal", *WORKS)),
]

_KEYS = Keyring(bytes(range(32)))
_CODECS = {"lz4": Codec.LZ4, "zstd": Codec.ZSTD}


def coding(scale: Scale) -> Iterator[Row]:
    """Rows `coding.*`. What is compressed shrinks to half: 2 KiB of noise and 2 KiB of zeros in turns."""
    for size in SIZES:
        bench = _Bench(size << 20)
        took: dict[str, list[float]] = defaultdict(list)
        limits: dict[str, list[float]] = defaultdict(list)
        for number in range(scale.rounds + 1):
            for name in ("seal", *WORKS):
                work = bench.work(name)
                limit = seconds(bench.memcpy)
                needed = seconds(work)
                if number:  # the first round warms up
                    limits[name].append(limit)
                    took[name].append(needed)
        for name in took:
            yield rate(f"coding.{name}.{size}", size << 20, took[name], limits[name])
    for name in ("seal", *WORKS):
        late: list[float] = []
        beside_memcpy: list[float] = []
        for _ in range(scale.rounds):
            beside_memcpy += _lateness(bench, "memcpy")
            late += _lateness(bench, name)
        yield at_most(f"coding.beside_p95_us.{name}", _p95(late), "us", _p95(beside_memcpy))


class _Bench:
    def __init__(self, nbytes: int) -> None:
        form = frame.shape(PAGES, 1, nbytes // PAGES)
        self.subject = Subject(form, bytes(32), b"", [bytes([number]) * 32 for number in range(PAGES)])
        self._slot, self._stage = Buffer(form.nbytes, shared=True), Buffer(form.nbytes, shared=False)
        self.noise = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
        self.half = self.noise.copy()
        self.half.reshape(-1, 4096)[:, 2048:] = 0
        self.nbytes = nbytes

    def memcpy(self) -> None:
        """Copy a frame."""
        memcpy(self._stage, self._slot, self.nbytes // PAGES)

    def work(self, name: str) -> Callable[[], object]:
        """What is to be timed, with what it needs in place."""
        slot, stage = self._slot.memory, self._stage.memory
        kind, _, way = name.partition(".")
        codec = _CODECS.get(kind, Codec.NONE)
        key = None if codec else _KEYS.writing()
        payload = self.half if codec else self.noise
        header = self.subject.form.header_bytes
        self._slot.array[header : header + self.nbytes] = payload
        if name == "memcpy":
            return self.memcpy
        if name == "seal":
            return lambda: frame.seal(slot, *self.subject)
        if kind != "decrypt" and way != "unpack":
            return lambda: encode(slot, stage, self.subject, codec, key)
        stored = encode(slot, stage, self.subject, codec, key).nbytes
        self._slot.array[:stored] = self._stage.array[:stored]
        return lambda: decode(slot, stored, self.subject, None if codec else _KEYS)


def _lateness(bench: _Bench, name: str) -> list[float]:
    """Microseconds that a thread is late which wakes from sleeps of 1 ms, beside a thread that does that work."""
    late = []
    with _without_pause(bench, name):
        for _ in range(WAKES):
            until = time.perf_counter() + 0.001
            time.sleep(0.001)
            late.append((time.perf_counter() - until) * 1e6)
    return late


def _p95(late: list[float]) -> float:
    return statistics.quantiles(late, n=20)[-1]


@contextmanager
def _without_pause(bench: _Bench, name: str) -> Iterator[None]:
    stop: list[bool] = []

    def run() -> None:
        while not stop:
            bench.work(name)()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.append(True)
        thread.join()

"""What all measurements share: rows, how large they are, timing, the memcpy to compare with, and a busy thread."""

from __future__ import annotations

import ctypes
import mmap
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

__all__ = [
    "FULL",
    "QUICK",
    "Buffer",
    "Row",
    "Scale",
    "against",
    "at_most",
    "memcpy",
    "plain",
    "rate",
    "seconds",
    "spinning",
]

GB = 1e9


class Row(NamedTuple):
    """One measurement, as it goes to the file."""

    name: str
    value: float
    unit: str
    limit: float | None
    """What the machine does without us, or the most that `value` may be, in the same unit."""
    ratio: float | None
    """How close `value` comes to `limit`; higher is better."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured. A round measures a limit and what is compared with it, one right after the other."""

    directory: Path | None = None
    """Where files may be written; None for a place that is found."""
    lmcache_python: Path | None = None
    """The interpreter of an environment that has LMCache; None leaves its rows out."""
    rounds: int = 9
    layers: int = 32
    chunks: int = 16
    hashed_tokens: int = 128 * 1024
    calls: int = 500
    """Calls of which the median is taken."""
    lookups: int = 1500
    """Calls of which the 99th percentile is taken."""
    stored: int = 10_000
    """Chunks on disk that a restart finds."""
    restart_pool: int = 4 << 30
    starts: int = 5
    """Processes started of each kind."""


FULL = Scale()
QUICK = Scale(rounds=3, calls=200, lookups=300, starts=3)


def seconds(work: Callable[[], object]) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def rate(name: str, nbytes: int, took: Sequence[float], limits: Sequence[float]) -> Row:
    """A row in GB/s: medians of both, and the median of the ratio in each round."""
    return against(name, "GB/s", nbytes / GB, took, limits)


def against(name: str, unit: str, work: float, took: Sequence[float], limits: Sequence[float]) -> Row:
    """As `rate`, for `work` in other units."""
    ratio = statistics.median(limit / each for each, limit in zip(took, limits, strict=True))
    return Row(name, work / statistics.median(took), unit, work / statistics.median(limits), ratio)


def at_most(name: str, value: float, unit: str, limit: float) -> Row:
    """A row whose value may be `limit` at most."""
    return Row(name, value, unit, limit, limit / value)


def plain(name: str, value: float, unit: str) -> Row:
    """A row that is there to be read."""
    return Row(name, value, unit, None, None)


class Buffer:
    """Memory that has been touched, page-aligned; shared memory like the host pool's, or private like an engine's."""

    def __init__(self, nbytes: int, *, shared: bool) -> None:
        if shared:
            descriptor = os.memfd_create("bench")
            os.ftruncate(descriptor, nbytes)
            self._map = mmap.mmap(descriptor, nbytes)
            os.close(descriptor)
        else:
            self._map = mmap.mmap(-1, nbytes)
        self.memory = memoryview(self._map)
        self.array = np.frombuffer(self.memory, np.uint8)
        self.array[:] = 1
        self.address: int = self.array.ctypes.data


def memcpy(target: Buffer, source: Buffer, piece: int) -> None:
    """Copy all of `source`, `piece` bytes a call."""
    for at in range(0, len(source.memory), piece):
        ctypes.memmove(target.address + at, source.address + at, min(piece, len(source.memory) - at))


@contextmanager
def spinning(wanted: bool = True) -> Iterator[None]:
    """Beside a thread that runs Python bytecode without pause and never lets go of the GIL unasked."""
    stop: list[bool] = []

    def spin() -> None:
        count = 0
        while not stop:
            count += 1

    thread = threading.Thread(target=spin, daemon=True)
    if wanted:
        thread.start()
        time.sleep(0.05)
    try:
        yield
    finally:
        stop.append(True)
        if wanted:
            thread.join()

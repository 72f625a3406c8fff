"""What a call costs by itself: copies do nothing, chunks are of 16 pages of 4 KiB, 16 chunks a call."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from benchmarks.harness import Row, Scale, at_most, plain, seconds, spinning
from benchmarks.workload import CHUNK_TOKENS, PAGE_TOKENS, VOCABULARY, Nothing, namespace, opened
from lmcache_core.cache import Cache, Prompt
from lmcache_core.frame import shape

__all__ = ["lookups_beside_a_busy_thread", "overhead"]

CHUNKS = 16
TOKENS = CHUNKS * CHUNK_TOKENS
PAGE_BYTES = 4096
FRAME = shape(CHUNK_TOKENS // PAGE_TOKENS, 1, PAGE_BYTES).nbytes
MOST_US = 20.0
"""Of a chunk, for each verb."""
MOST_P99_US = 1000.0


def overhead(scale: Scale) -> Iterator[Row]:
    """Rows `overhead.*`, of a chunk in a call with 16. The pool is full: each store makes room first. Prompts are
    hashed already; rows ending in `hashed` say what lists of tokens cost."""
    view = Nothing()
    random = np.random.default_rng(0)
    times: dict[str, list[float]] = {}

    def note(name: str, work: Callable[[], object]) -> None:
        times.setdefault(name, []).append(seconds(work) / CHUNKS * 1e6)

    with opened(namespace(PAGE_BYTES), 4 * CHUNKS * FRAME) as cache:
        for _ in range(scale.calls):
            for hashed in ("", ".hashed"):
                tokens = random.integers(0, VOCABULARY, TOKENS).tolist()
                prompt = tokens if hashed else cache.prompt(tokens)
                note(f"overhead.store{hashed}", partial(cache.store, prompt, view))
                note(f"overhead.lookup{hashed}", partial(cache.lookup, prompt))
                note(f"overhead.retrieve{hashed}", partial(cache.retrieve, prompt, view))
                assert cache.lookup(prompt).tokens == TOKENS
    for verb in ("lookup", "store", "retrieve"):
        name = f"overhead.{verb}"
        yield at_most(name, statistics.median(times[name]), "us", MOST_US)
    for verb in ("lookup", "store", "retrieve"):
        name = f"overhead.{verb}.hashed"
        yield plain(name, statistics.median(times[name]), "us")


def lookups_beside_a_busy_thread(scale: Scale) -> Iterator[Row]:
    """Rows `lookup.busy_*`: a list of 4096 tokens, looked up by a thread that has just woken, and, to be read, by one
    that looks up without pause."""
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, TOKENS).tolist()
    with opened(namespace(PAGE_BYTES), 4 * CHUNKS * FRAME) as cache:
        cache.store(tokens, Nothing())
        assert cache.lookup(tokens).tokens == TOKENS
        with spinning():
            woken = _lookups(cache, tokens, scale.lookups, 0.001)
            running = _lookups(cache, tokens, scale.lookups, None)
    yield at_most("lookup.busy_p99_us", _percentile(woken, 99), "us", MOST_P99_US)
    yield plain("lookup.busy_median_us", _percentile(woken, 50), "us")
    yield plain("lookup.busy_without_pause_p99_us", _percentile(running, 99), "us")


def _lookups(cache: Cache, prompt: Prompt | list[int], calls: int, pause: float | None) -> list[float]:
    times = []
    for _ in range(calls):
        if pause is not None:
            time.sleep(pause)
        times.append(seconds(lambda: cache.lookup(prompt)) * 1e6)
    return times


def _percentile(times: list[float], percent: float) -> float:
    return float(np.percentile(times, percent))

"""A node in a process of its own: what the socket costs, and how fast a worker copies from and to its pool."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Buffer, Row, Scale, at_most, memcpy, plain, rate, seconds
from benchmarks.workload import CHUNK_TOKENS, PAGE_TOKENS, VOCABULARY, Engine, Nothing, namespace, opened
from lmcache_core.cache import Cache
from lmcache_core.frame import shape

__all__ = ["ROWS", "node"]

LOOKUPS = {16: 150.0, 512: 1000.0}
"""Chunks, and the most microseconds that a lookup of so many may take."""
BLOCKS = (16, 64)
"""Tokens of an engine's blocks."""
ROWS = [
    *(f"node.lookup.{chunks}{how}" for chunks in LOOKUPS for how in ("", ".direct")),
    *(f"node.{verb}.{block}" for block in BLOCKS for verb in ("store", "retrieve")),
]
PAGE_BYTES = 4096
COPIES = 12
"""Chunks that are copied in a round, one a call."""
ENGINES = 5
"""Engines and nodes, one after another: how pages happen to lie in the machine's memory makes a fifth of the speed."""


def node(scale: Scale) -> Iterator[Row]:
    """Rows `node.*`. A lookup finds all of the prompt in the host pool and is hashed beforehand; a store and a retrieve
    are of one chunk of 32 MiB and end when the call does."""
    yield from _lookups(scale)
    for block_tokens in BLOCKS:
        yield from _copies(scale, block_tokens)


def _lookups(scale: Scale) -> Iterator[Row]:
    random = np.random.default_rng(0)
    frame = shape(CHUNK_TOKENS // PAGE_TOKENS, 1, PAGE_BYTES).nbytes
    capacity = 2 * sum(LOOKUPS) * frame
    space = namespace(PAGE_BYTES)
    took: dict[str, list[float]] = {}
    with opened(space, capacity) as direct, served(capacity) as settings, Cache.open(settings, space) as remote:
        for chunks in LOOKUPS:
            prompt = direct.prompt(random.integers(0, VOCABULARY, chunks * CHUNK_TOKENS).tolist())
            for cache in (direct, remote):
                cache.store(prompt, Nothing())
                assert cache.lookup(prompt).tokens == chunks * CHUNK_TOKENS
            for _ in range(scale.calls):
                for cache, how in ((remote, ""), (direct, ".direct")):
                    name = f"node.lookup.{chunks}{how}"
                    took.setdefault(name, []).append(seconds(partial(cache.lookup, prompt)) * 1e6)
    for chunks, most in LOOKUPS.items():
        name = f"node.lookup.{chunks}"
        yield at_most(name, statistics.median(took[name]), "us", most)
        yield plain(f"{name}.direct", statistics.median(took[f"{name}.direct"]), "us")


def _copies(scale: Scale, block_tokens: int) -> Iterator[Row]:
    took: dict[str, list[float]] = {"store": [], "retrieve": []}
    limits: dict[str, list[float]] = {"store": [], "retrieve": []}
    for _ in range(ENGINES):
        _copy(scale, block_tokens, took, limits)
    nbytes = Engine(scale.layers, 1, block_tokens).nbytes
    for verb in took:
        yield rate(f"node.{verb}.{block_tokens}", nbytes, took[verb], limits[verb])


def _copy(scale: Scale, block_tokens: int, took: dict[str, list[float]], limits: dict[str, list[float]]) -> None:
    """Some rounds with an engine and a node of their own."""
    engine = Engine(scale.layers, 1, block_tokens)
    mine = Buffer(engine.nbytes, shared=False)
    # As many places as the pool has, one after another: what was copied last would still be in the CPU's caches.
    pools = [Buffer(engine.nbytes, shared=True) for _ in range(2 * COPIES)]
    with served(2 * COPIES * engine.frame_bytes) as settings, Cache.open(settings, engine.namespace) as cache:
        for number in range(max(1, scale.rounds // 3) + 1):
            for _ in range(COPIES):
                tokens = engine.prompt()
                view = engine.view()
                pools.append(pool := pools.pop(0))
                for verb, target, source in (("store", pool, mine), ("retrieve", mine, pool)):
                    limit = seconds(partial(memcpy, target, source, engine.chunk_bytes))
                    needed = seconds(partial(getattr(cache, verb), tokens, view))
                    if number:
                        limits[verb].append(limit)
                        took[verb].append(needed)
                assert cache.lookup(tokens).tokens == engine.tokens


@contextmanager
def served(capacity: int) -> Iterator[dict[str, Any]]:
    """A node as a process whose pool is faulted in; yields what connects to it."""
    with tempfile.TemporaryDirectory(prefix="lmcache-bench-") as directory:
        path = Path(directory) / "node.sock"
        config = Path(directory) / "node.yaml"
        config.write_text(
            json.dumps({"chunk_tokens": CHUNK_TOKENS, "page_tokens": PAGE_TOKENS, "cpu": {"capacity": capacity}})
        )
        words = [sys.executable, "-m", "lmcache_core", "serve", "--config", str(config), "--socket", str(path)]
        env = {name: value for name, value in os.environ.items() if not name.startswith("LMCACHE_CORE_")}
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline().startswith(b"serving")
                settings = {"connect": str(path), "call_timeout": 10.0}
                with Cache.open(settings, namespace(PAGE_BYTES)) as cache:
                    while (stats := cache.stats()).pool_usable < stats.pool_capacity:
                        time.sleep(0.01)
                yield settings
            finally:
                process.send_signal(signal.SIGTERM)

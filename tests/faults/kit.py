"""Caches for the tests here: small pools, any backends as tiers, and an engine that notices what it must never see."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.faults.campaign import Report, Run, until
from benchmarks.faults.engine import CHUNK_TOKENS, PAGE_TOKENS, Engine, frame_shape, namespace
from benchmarks.faults.stress import leftovers
from lmcache_core import Cache, ClosedError
from lmcache_core.config import BreakerConfig, Config, CpuConfig, TierConfig
from lmcache_core.direct import DirectClient
from lmcache_core.node import Node
from lmcache_core.protocols import StorageBackend

FRAME = frame_shape().nbytes
QUICK = BreakerConfig(failures=2, cooldown=0.01, max_cooldown=0.05)


@contextmanager
def an_engine(
    *backends: StorageBackend, slots: int = 8, tiers: Sequence[dict[str, Any]] = (), **settings: Any
) -> Iterator[Engine]:
    """An engine with a pool of `slots` full chunks. It fails the test for an exception, a late answer, other bytes and
    for what is left over at the end."""
    rules = []
    for number in range(len(backends)):
        rule: dict[str, Any] = {"name": f"t{number}", "breaker": QUICK}
        rules.append(TierConfig("test", **rule | (tiers[number] if number < len(tiers) else {})))
    config = Config(CHUNK_TOKENS, PAGE_TOKENS, CpuConfig(capacity=slots * FRAME), tuple(rules), **settings)
    report = Report("a test")
    run = Run(report, 0, 0, Path())
    with Cache(DirectClient(Node(config, backends), owns=True), namespace()) as cache:
        yield Engine(cache, run, deadline=5.0)
        with suppress(ClosedError):
            assert cache.flush(20), "writes do not end"
            assert until(lambda: not leftovers(cache.stats()), 10), leftovers(cache.stats())
    assert not report.notes

"""Everything at once: threads that store, load, abort, pin, clear and give up, over tiers that are late, fail and lie.

At the end nothing may be left over: no lease, no reservation, no slot that no chunk lies in, no pin, no deadlock.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.faults.campaign import Campaign, Fault, Run, until
from benchmarks.faults.engine import (
    CHUNK_PAGES,
    CHUNK_TOKENS,
    PAGE_TOKENS,
    Engine,
    Prompt,
    View,
    frame_shape,
    namespace,
)
from lmcache_backends.cpu import CpuBackend, CpuOptions
from lmcache_backends.disk import DiskBackend, DiskOptions
from lmcache_core import AsyncCache, BackendError, Cache
from lmcache_core.client import Stats
from lmcache_core.config import BreakerConfig, Config, CpuConfig, TierConfig
from lmcache_core.direct import DirectClient
from lmcache_core.node import Node
from lmcache_core.protocols import StorageBackend
from lmcache_core.wrappers import Corrupting, Faulty, Slow, randomly

__all__ = ["FAULTS", "Tiers", "leftovers"]

THREADS = 6
SLOTS = 24
CONVERSATIONS = 30
LEASE = 0.5
READ_TIMEOUT, WRITE_TIMEOUT = 0.1, 0.2
QUIET = 20.0
"""Seconds within which everything must have ended."""
KIB = 1 << 10
VERBS = ["contains", "read", "write", "delete", "touch"]


class Aborted(Exception):
    """What a view raises when its request is aborted."""


class AbortingView(View):
    """Raises when it comes to a page."""

    abort_at = 0

    def gather(self, group: int, first_page: int, pages: int, into: memoryview) -> None:
        if first_page + pages > self.abort_at:
            raise Aborted
        super().gather(group, first_page, pages, into)

    def scatter(self, group: int, first_page: int, pages: int, source: memoryview) -> None:
        if first_page + pages > self.abort_at:
            raise Aborted
        super().scatter(group, first_page, pages, source)


class Tiers:
    """A disk that is listed and cannot be aborted, and a dictionary that is asked and can; both with all faults."""

    def __init__(self, path: Path, rng: random.Random) -> None:
        disk = DiskBackend(
            DiskOptions(path=str(path), capacity=40 * frame_shape().nbytes, min_free=0, segment=64 * KIB)
        )
        far = CpuBackend(CpuOptions())  # unbounded: nobody makes room on a tier that cannot be listed
        self._rng = rng
        self.slow: list[Slow] = []
        self._faulty: list[Faulty] = []
        self._corrupting: list[Corrupting] = []
        self.backends = [self._wrapped(disk), self._wrapped(far)]

    def _wrapped(self, backend: StorageBackend) -> StorageBackend:
        seed = self._rng.random()
        slow = Slow(backend, delay=0.001, jitter=1.0, seed=seed)
        faulty = Faulty(slow, randomly(0.1, seed), error=self._rng.choice([BackendError, ValueError, KeyError]))
        corrupting = Corrupting(faulty, probability=0.1, seed=seed)
        self.slow.append(slow)
        self._faulty.append(faulty)
        self._corrupting.append(corrupting)
        return corrupting

    def config(self) -> Config:
        common: dict[str, Any] = {
            "read_timeout": READ_TIMEOUT,
            "write_timeout": WRITE_TIMEOUT,
            "breaker": BreakerConfig(failures=5, cooldown=0.02, max_cooldown=0.1),
            "quarantine": 8 * frame_shape().nbytes,
        }
        tiers = (TierConfig("disk", **common), TierConfig("cpu", name="far", **common))
        cpu = CpuConfig(capacity=SLOTS * frame_shape().nbytes)
        return Config(CHUNK_TOKENS, PAGE_TOKENS, cpu, tiers, lease_timeout=LEASE)

    def torment(self) -> None:
        """Let something begin or end."""
        rng = self._rng
        slow = rng.choice(self.slow)
        if rng.random() < 0.5:
            slow.release()
        else:
            slow.hang(*rng.sample(VERBS, rng.randint(1, 3)))
        for faulty, corrupting in zip(self._faulty, self._corrupting, strict=True):
            faulty.active = rng.random() < 0.5
            corrupting.active = rng.random() < 0.5

    def calm(self) -> None:
        """End all of it."""
        for slow, faulty, corrupting in zip(self.slow, self._faulty, self._corrupting, strict=True):
            slow.release()
            slow.active = faulty.active = corrupting.active = False

    def injected(self) -> dict[str, int]:
        return {
            "faults raised": sum(sum(each.raised.values()) for each in self._faulty),
            "values corrupted": sum(len(each.corrupted) for each in self._corrupting),
        }


class Worker:
    """One thread of an engine."""

    def __init__(self, engine: Engine, run: Run, number: int, mishaps: list[str]) -> None:
        self.engine = engine
        self.cache = engine.cache
        self.rng = random.Random(run.rng.random())
        self.pinned: list[Prompt] = []
        self._run = run
        self._calls: list[tuple[int, Callable[[Prompt], object]]] = [
            (10, engine.store),
            (3, self.store_and_abort),
            (10, self.retrieve),
            (3, self.retrieve_and_abort),
            (6, engine.lookup),
            (3, self.prefetch),
            (2, self.pin),
            (2, self.unpin),
            (3, self.evict),
            (1, self.clear),
            (1, lambda prompt: self.cache.contains(prompt.tokens)),
            (1, self.hold_and_forget),
            (1, lambda prompt: self.cache.stats()),
        ]
        self.done = 0

    def work(self, stop: threading.Event) -> None:
        weights = [weight for weight, _ in self._calls]
        while not stop.is_set():
            prompt = Prompt(self.rng.randrange(CONVERSATIONS), self.rng.randint(1, 4 * CHUNK_PAGES))
            ((_, call),) = self.rng.choices(self._calls, weights)
            try:
                call(prompt)
            except Exception as error:  # noqa: BLE001  nothing may come out, whatever it is
                self._run.lost(f"{getattr(call, '__name__', call)} raised {type(error).__name__}: {error}")
            self.done += 1
        while self.pinned:
            self.unpin(Prompt(0, 1))

    def tiers(self) -> list[str] | None:
        return self.rng.choice([None, ["cpu"], ["disk"], ["far"], ["cpu", "disk"]])

    def timeout(self) -> float | None:
        return self.rng.choice([None, 0.0, 0.001, 0.03])

    def retrieve(self, prompt: Prompt) -> None:
        first = self.rng.choice([0, 0, 0, self.rng.randrange(prompt.pages)])
        self.engine.retrieve(prompt, self.timeout(), first_page=first, source=self.tiers())

    def aborting(self, prompt: Prompt) -> AbortingView:
        view = AbortingView(self.cache.prompt(prompt.tokens).keys, self.engine.space)
        view.abort_at = self.rng.randrange(prompt.pages)
        return view

    def store_and_abort(self, prompt: Prompt) -> None:
        with suppress(Aborted):
            self.cache.store(prompt.tokens, self.aborting(prompt))

    def retrieve_and_abort(self, prompt: Prompt) -> None:
        with suppress(Aborted):
            self.cache.retrieve(prompt.tokens, self.aborting(prompt), timeout=self.timeout())

    def prefetch(self, prompt: Prompt) -> None:
        where = self.rng.choice(["cpu", "cpu", "disk", "far"])
        self.cache.prefetch(prompt.tokens, source=self.tiers(), destination=where, timeout=self.timeout() or 0.05)

    def pin(self, prompt: Prompt) -> None:
        self.cache.pin(prompt.tokens)
        self.pinned.append(prompt)

    def unpin(self, prompt: Prompt) -> None:
        if self.pinned:
            self.cache.unpin(self.pinned.pop().tokens)

    def evict(self, prompt: Prompt) -> None:
        self.cache.evict(prompt.tokens, self.tiers())

    def clear(self, prompt: Prompt) -> None:
        if self.rng.random() < 0.2:
            self.cache.clear(self.tiers())

    def hold_and_forget(self, prompt: Prompt) -> None:
        self.cache.client.hold(self.cache._model, self.cache.prompt(prompt.tokens).keys)


class Canceller:
    """A thread with an event loop of its own, whose calls are cancelled half-way."""

    def __init__(self, cache: AsyncCache, run: Run) -> None:
        self._cache = cache
        self._space = cache.namespace.space(0)
        self._rng = random.Random(run.rng.random())
        self._run = run
        self.done = 0

    def work(self, stop: threading.Event) -> None:
        asyncio.run(self._work(stop))

    async def _work(self, stop: threading.Event) -> None:
        while not stop.is_set():
            calls = [asyncio.create_task(self._call()) for _ in range(4)]
            await asyncio.sleep(self._rng.choice([0.0, 0.001, 0.01]))
            for call in calls:
                call.cancel()
            for outcome in await asyncio.gather(*calls, return_exceptions=True):
                if isinstance(outcome, Exception):
                    self._run.lost(f"a cancelled call raised {type(outcome).__name__}: {outcome}")
            self.done += len(calls)

    async def _call(self) -> None:
        prompt = Prompt(self._rng.randrange(CONVERSATIONS), self._rng.randint(1, 4 * CHUNK_PAGES))
        view = View(self._cache.prompt(prompt.tokens).keys, self._space)
        kind = self._rng.randrange(4)
        if kind == 0:
            await (await self._cache.store(prompt.tokens, view)).written()
        elif kind == 1:
            found = await self._cache.retrieve(prompt.tokens, view, wait=self._rng.choice([None, 0.01]))
            if (page := view.first_difference(0, found.tokens // PAGE_TOKENS)) is not None:
                self._run.wrong(f"page {page} of {prompt} has other bytes")
        elif kind == 2:
            await self._cache.prefetch(prompt.tokens, destination=self._rng.choice(["cpu", "disk"]))
        else:
            await self._cache.lookup(prompt.tokens, wait=0.02)


def leftovers(stats: Stats) -> dict[str, int]:
    """What is not 0 though nothing is being done."""
    found = {
        "leases": stats.leases,
        "staged chunks": stats.staged,
        "pins": stats.pinned,
        "slots without a chunk": stats.slots - stats.chunks,
        "operations in queues": sum(tier.queued for tier in stats.tiers),
        "bytes in quarantine": sum(tier.quarantined for tier in stats.tiers),
    }
    return {name: number for name, number in found.items() if number}


def stress(seconds: float, campaign: Campaign) -> None:
    for run in campaign:
        with run:
            _stress_once(run, seconds)


def _stress_once(run: Run, seconds: float) -> None:
    tiers = Tiers(run.path / "kv", run.rng)
    node = Node(tiers.config(), tiers.backends)
    client = DirectClient(node, owns=True)
    with Cache(client, namespace()) as cache:
        workers: Sequence[Worker | Canceller] = [
            *(Worker(Engine(cache, run), run, number, []) for number in range(THREADS)),
            Canceller(AsyncCache(client, namespace()), run),
        ]
        stop = threading.Event()
        threads = [threading.Thread(target=worker.work, args=(stop,), daemon=True) for worker in workers]
        for thread in threads:
            thread.start()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            tiers.torment()
            time.sleep(run.rng.random() * 0.1)
        stop.set()
        tiers.calm()
        for thread in threads:
            thread.join(QUIET)
        stuck = sum(thread.is_alive() for thread in threads)
        if stuck:
            run.lost(f"{stuck} threads are stuck")
            return
        run.seen("calls", sum(worker.done for worker in workers))
        for what, number in tiers.injected().items():
            run.seen(what, number)
        for name in ("late_reads", "corrupt_chunks", "opened_breakers", "expired_leases", "evicted_chunks"):
            run.seen(name.replace("_", " "), Engine(cache, run).count(name))
        if not cache.flush(QUIET):
            run.lost("writes do not end")
        if not until(lambda: not leftovers(cache.stats()), QUIET):
            run.lost(f"left over: {leftovers(cache.stats())}")
        if not until(lambda: all(tier.up for tier in cache.stats().tiers), QUIET):
            run.note(f"a tier does not come back: {cache.stats().tiers}")
        elif Engine(cache, run).serves(Prompt(CONVERSATIONS, 3 * CHUNK_PAGES), tries=3):  # a write may take too long
            run.recovered()


FAULTS = [Fault("everything at once", 12, partial(stress, 5.0), few=2, seconds=6)]

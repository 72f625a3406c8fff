"""The node: owner of pool, index, leases and tiers of a host.

Engine threads run the index under one mutex on their own thread; the event loop carries out what it decides. A node is
what several `Client`s share; embedded it lives in the engine's process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from lmcache_core.config import Config, TierConfig
from lmcache_core.counts import Counts
from lmcache_core.errors import ClosedError, LayoutError
from lmcache_core.framing import Framer
from lmcache_core.hostpool import HostPool
from lmcache_core.index import Geometry, Index, Space, TierRules
from lmcache_core.index.decisions import Decision, Load, Read, Write
from lmcache_core.loop import LoopThread
from lmcache_core.namespace import Group, GroupKind, Namespace
from lmcache_core.probe import Prober
from lmcache_core.protocols import ReadResult, RemembersUse, Scannable, StorageBackend, Stored, WriteResult
from lmcache_core.ratelog import LogWriter, RateLog
from lmcache_core.tier import TierRunner

log = logging.getLogger(__name__)

TICK = 0.25
START_TIMEOUT = 60.0
CLOSE_TIMEOUT = 30.0


class Server(Protocol):
    """What is closed with the node."""

    def close(self) -> None:
        """Stop serving."""
        ...


class Node:
    """Pool, index and tiers at work. Use as a context manager, or call `close`.

    Args:
        config: The settings.
        backends: One for each tier of `config`, in order, not opened yet.

    Raises:
        PoolError: The host pool cannot be had.
        ConfigError: A backend's options can never work.
    """

    def __init__(self, config: Config, backends: Sequence[StorageBackend] = ()) -> None:
        self.config = config
        self.mutex = threading.Lock()
        self.counts = Counts()
        self.pool = HostPool(config.cpu.capacity, hugepages=config.cpu.hugepages)
        rules = [self._rules(tier, backend) for tier, backend in zip(config.tiers, backends, strict=True)]
        self.index = Index(
            self.pool, rules, policy=config.cpu.policy, lease_timeout=config.lease_timeout, counts=self.counts
        )
        self.lag = 0.0
        """Seconds by which the event loop was late at its last tick."""
        self._loop = LoopThread()
        self._framer = Framer()
        self._log_writer = LogWriter()
        self.runners = [
            TierRunner(
                number, tier, backend, self._framer, self, RateLog(log, config.log_interval, writer=self._log_writer)
            )
            for number, (tier, backend) in enumerate(zip(config.tiers, backends, strict=True))
        ]
        self._prober = Prober(self)
        self.closed = False
        _nodes.add(self)
        self._locked = _Locked(self)
        self._ticking: Future[None] | None = None
        self.metrics: Server | None = None
        """Serves the metrics until the node is closed."""
        try:
            self.pool.start_prefault(self.mutex)
            self._loop.run(self._start(), START_TIMEOUT)
        except BaseException:  # whatever went wrong, threads and memory must not stay behind
            self.close()
            raise
        self._ticking = self._loop.start(self._tick())

    def _rules(self, tier: TierConfig, backend: StorageBackend) -> TierRules:
        listed = isinstance(backend, Scannable)
        return TierRules(
            tier.name,
            tier.write,
            tier.admit,
            tier.policy,
            tier.capacity,
            shared=not listed,
            remembers_use=isinstance(backend, RemembersUse),
            evictable=listed,
            pending_limit=max(self.pool.capacity // 2, 1),
        )

    async def _start(self) -> None:
        await asyncio.gather(*(runner.open() for runner in self.runners))

    def close(self, grace: float = CLOSE_TIMEOUT) -> None:
        """Write what is queued, for at most `grace` seconds, close the tiers and let go of the pool. Idempotent."""
        with self.mutex:
            if self.closed:
                return
            self.closed = True
            self.index.tick()
        if self.metrics is not None:
            self.metrics.close()
        self.settle()
        if self._ticking is not None:
            self._ticking.cancel()
        self._loop.run(self._stop(grace), 3 * grace + CLOSE_TIMEOUT)
        self._loop.stop()
        self._framer.close()
        self._log_writer.close()
        self.pool.close()

    async def _stop(self, grace: float) -> None:
        await asyncio.gather(*(runner.close(grace) for runner in self.runners))

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # For clients

    def locked(self) -> AbstractContextManager[Index]:
        """The index, under the mutex; afterwards its decisions are carried out.

        Raises:
            ClosedError: The node has been closed.
        """
        return self._locked

    def settle(self) -> None:
        """Carry out decisions that were taken under `mutex` without `locked`."""
        with self.mutex:
            out = self.take()
        if out:
            self.hand_over(out)

    def take(self) -> list[Decision]:
        """Decisions that have not been carried out; the caller does. Called under the mutex."""
        out = self.index.out
        if not out:
            return []  # never the list itself: others add to it as soon as the mutex is free
        self.index.out = []
        return out

    def register(self, namespace: Namespace) -> list[Space]:
        """Make a namespace known; returns a space for each of its groups.

        Raises:
            LayoutError: It doesn't fit the node's `chunk_tokens`, or is in use with other sizes.
        """
        if not isinstance(namespace, Namespace):
            raise LayoutError(f"a Namespace says what the KV is of; this is a {type(namespace).__name__}")
        geometries = [self._geometry(namespace, group) for group in namespace.groups]
        with self.locked() as index:
            return [index.add_space(namespace.space(n), geometry) for n, geometry in enumerate(geometries)]

    def _geometry(self, namespace: Namespace, group: Group) -> Geometry:
        state = group.kind is GroupKind.STATE
        window = group.window_tokens or 0
        return Geometry(
            group.kind,
            group.page_bytes,
            namespace.shards,
            1 if state else -(-self.config.chunk_tokens // namespace.page_tokens),
            -(-window // namespace.page_tokens),
            not namespace.local_only,
            namespace.manifest(),
        )

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until nothing is queued or under way on any tier. Returns whether that came in time."""
        self.settle()

        async def drained() -> None:
            for runner in self.runners:
                await runner.drained()

        try:
            self._loop.run(drained(), timeout)
        except TimeoutError:
            return False
        return True

    def ask(self, spaces: Sequence[Space], keys: Sequence[bytes], first_page: int, places: int) -> Future[Any] | None:
        """Ask tiers that cannot be listed for the rest of a prompt, unless that was done just now. Called under the
        mutex. Returns what is done when the answer is there, None if there is nothing to wait for."""
        return self._prober.ask(spaces, keys, first_page, places)

    def start(self, work: Any) -> Future[Any]:
        """Run a coroutine on the node's event loop."""
        return self._loop.start(work)

    # Decisions

    def hand_over(self, decisions: list[Decision]) -> None:
        """Carry decisions out, on the event loop."""
        if threading.current_thread() is self._loop.thread:
            self._carry_out(decisions)
        else:
            self._loop.loop.call_soon_threadsafe(self._carry_out, decisions)

    def _carry_out(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, Read):
                self.runners[decision.load.tier].read(decision.load)
            else:
                self.runners[decision.tier].mutate(decision)

    @contextmanager
    def _event(self) -> Iterator[Index]:
        """An event from a tier, on the event loop."""
        with self.mutex:
            yield self.index
            out = self.take()
        if out:
            # Not at once: an event may come from inside the queue that the decision goes to.
            self._loop.loop.call_soon(self._carry_out, out)

    # Events of tiers (`TierEvents`)

    def loaded(self, load: Load, result: ReadResult | None, seconds: float) -> None:
        """See `TierEvents`."""
        tier = self.config.tiers[load.tier].name
        with self._event() as index:
            told = index.loaded(load, result)
            if result is ReadResult.HIT:
                self.counts.add("read_seconds", tier, seconds)
            hit = load.entry.slot is load.slot
        if told:
            _tell(load.waiters, hit)

    def dropped(self, load: Load) -> None:
        """See `TierEvents`."""
        with self._event() as index:
            index.dropped(load)
        _tell(load.waiters, False)

    def gave_up(self, load: Load) -> None:
        """See `TierEvents`."""
        with self._event() as index:
            told = index.gave_up(load)
        if told:
            _tell(load.waiters, False)

    def wrote(self, write: Write, result: WriteResult | None, seconds: float) -> None:
        """See `TierEvents`."""
        tier = self.config.tiers[write.tier].name
        with self._event() as index:
            told = index.wrote(write, result)
            if result is WriteResult.STORED:
                self.counts.add("write_seconds", tier, seconds)
            elif result is None:
                self.counts.add("failed_writes", tier)
        if told:
            _tell(write.waiters, result is WriteResult.STORED)

    def late_write(self, write: Write) -> None:
        """See `TierEvents`."""
        with self._event():
            self.counts.add("late_writes", self.config.tiers[write.tier].name)
        _tell(write.waiters, False)

    def opened(self, number: int) -> None:
        """See `TierEvents`."""
        with self._event() as index:
            index.tier_opened(index.tiers[number])
            self._measure(index, number)

    def lost(self, number: int) -> None:
        """See `TierEvents`."""
        with self._event() as index:
            index.set_up(index.tiers[number], False)
            self.counts.add("opened_breakers", self.config.tiers[number].name)

    def reset(self, number: int) -> None:
        """See `TierEvents`."""
        with self._event() as index:
            index.reset_tier(index.tiers[number])

    def learned(self, number: int, space: Space, found: Sequence[tuple[tuple[bytes, ...], bytes]]) -> None:
        """A tier that cannot be listed holds chunks of those pages and parents."""
        with self._event() as index:
            for pages, parent in found:
                index.learned(index.tiers[number], space, pages, parent)

    def scanned(self, number: int, batch: Sequence[Stored]) -> None:
        """See `TierEvents`."""
        with self._event() as index:
            index.scanned(index.tiers[number], batch)

    # Time

    async def _tick(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(TICK)
            self.lag = max(0.0, time.monotonic() - before - TICK)
            with self._event() as index:
                for runner in self.runners:
                    self._measure(index, runner.number)
                index.tick()

    def _measure(self, index: Index, number: int) -> None:
        """A backend's own word on its capacity goes before the configured one if it is smaller."""
        tier, usage = index.tiers[number], self.runners[number].usage()
        if usage is not None and usage.capacity is not None:
            configured = tier.rules.capacity
            tier.capacity = usage.capacity if configured is None else min(configured, usage.capacity)


class _Locked:
    """What `Node.locked` returns. Several times as fast as a generator, and stores call it for each chunk."""

    __slots__ = ("_node",)

    def __init__(self, node: Node) -> None:
        self._node = node

    def __enter__(self) -> Index:
        node = self._node
        node.mutex.acquire()
        if node.closed:
            node.mutex.release()
            raise ClosedError("the node has been closed")
        return node.index

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        node = self._node
        out = node.take() if error is None else None
        node.mutex.release()
        if out:
            node.hand_over(out)


_nodes: weakref.WeakSet[Node] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """In a forked child: its copies of nodes have no threads, so they are closed, and their parent's go on."""
    for node in list(_nodes):
        node.mutex = threading.Lock()  # another thread may have held it
        node.closed = True


os.register_at_fork(after_in_child=_leave_to_parent)


def _tell(waiters: list[Callable[[bool], None]], outcome: bool) -> None:
    for waiter in waiters:
        waiter(outcome)
    waiters.clear()

"""The node: owner of pool, index, leases and tiers of a host.

Engine threads run the index under one mutex on their own thread; the event loop carries out what it decides. A node is
what several `Client`s share; embedded it lives in the engine's process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from lmcache_core.coding.recipe import recipe_of
from lmcache_core.config import Config, TierConfig
from lmcache_core.counts import Counts
from lmcache_core.directreads import DirectReads
from lmcache_core.errors import BackendError, ConfigError, LayoutError
from lmcache_core.framing import Framer
from lmcache_core.guard import IndexGuard
from lmcache_core.hostpool import HostPool
from lmcache_core.index import Geometry, Index, Space, TierRules
from lmcache_core.index.decisions import Read
from lmcache_core.index.residency import CPU
from lmcache_core.index.shares import OwnerKind, ShareRules
from lmcache_core.namespace import Group, GroupKind, Namespace
from lmcache_core.pins import KeptPins
from lmcache_core.probe import Prober
from lmcache_core.protocols import RemembersUse, Scannable, StorageBackend
from lmcache_core.ratelog import RateLog
from lmcache_core.reports import Reports
from lmcache_core.runtime import Runtime
from lmcache_core.tier import TierRunner
from lmcache_core.units import format_size

log = logging.getLogger(__name__)

TICK = 0.25
FRAMERS = 2
"""Threads that seal and check frames."""
START_TIMEOUT = 60.0
CLOSE_TIMEOUT = 30.0
STILL = 5.0
"""Seconds without a tick after which the event loop counts as stuck."""
CLOSED = "the node has been closed"
FORKED = "this process was forked, and the cache is its parent's; open a Cache of its own here"


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
        runtime: Time, event loop and threads; the machine's by default.

    Raises:
        PoolError: The host pool cannot be had.
        ConfigError: A backend's options can never work, or there is a quota for a tier that has none.
        BackendError: A backend keeps the event loop from running.
    """

    def __init__(
        self, config: Config, backends: Sequence[StorageBackend] = (), *, runtime: Runtime | None = None
    ) -> None:
        self.config = config
        self.runtime = runtime = Runtime() if runtime is None else runtime
        self.counts = Counts()
        rules = [_rules(config, tier, backend) for tier, backend in zip(config.tiers, backends, strict=True)]
        shares = _shares(config, rules)
        recipes = [
            recipe_of(f"tiers[{number}]", tier, backend)
            for number, (tier, backend) in enumerate(zip(config.tiers, backends, strict=True))
        ]
        self.pool = HostPool(
            config.cpu.capacity,
            hugepages=config.cpu.hugepages,
            prefault=runtime.prefault,
            numa_nodes=config.cpu.numa_nodes,
        )
        index = Index(
            self.pool,
            rules,
            policy=config.cpu.policy,
            lease_timeout=config.lease_timeout,
            clock=runtime.clock,
            counts=self.counts,
            shares=shares,
            share_timeout=config.share_timeout,
        )
        self.guard = IndexGuard(index, self._wake, self._abandon)
        self.lag = 0.0
        """Seconds by which the event loop was late at its last tick."""
        self._ticked = runtime.clock()
        self._loop = runtime.loop()
        self._framer = Framer(workers=runtime.workers("lmcache-frame", FRAMERS))
        self._log_writer = runtime.log_writer()
        self._reports = Reports(self.guard, self.counts, lambda number: self.runners[number].health.usage())
        self.runners = [
            TierRunner(
                number,
                tier,
                backend,
                recipes[number],
                self._framer,
                self._reports,
                RateLog(log, config.log_interval, writer=self._log_writer, clock=runtime.clock),
            )
            for number, (tier, backend) in enumerate(zip(config.tiers, backends, strict=True))
        ]
        self._prober = Prober(self.guard, self.runners, self.start, self._reports.learned, runtime.clock)
        self._closed = False
        self._ticking: Future[None] | None = None
        self.shared: weakref.WeakValueDictionary[int, object] = weakref.WeakValueDictionary()
        """Leases and stores of clients that others can join, by number, while their clients keep them. Guarded by the
        mutex."""
        self._numbers = 0
        self.kept = KeptPins()
        """Pins that outlive the client that asked for them. Guarded by the mutex."""
        self.drained = threading.Event()
        """Set when a client has asked the node to end and what was queued is written."""
        self.standalone = False
        """Its process has nothing else to do, and ends when it is drained."""
        self.servers: list[Server] = []
        """Serve others until the node is closed; the last one is closed first."""
        _nodes.add(self)
        try:
            self.pool.start_prefault(self.guard.mutex)
            self._open()
        except BaseException:  # whatever went wrong, threads and memory must not stay behind
            self.close(grace=1.0)
            raise
        self._ticked = runtime.clock()  # opening may have taken long
        self._ticking = self._loop.start(self._tick())

    def _open(self) -> None:
        async def open_all() -> None:
            await asyncio.gather(*(runner.health.open() for runner in self.runners))

        try:
            self._loop.run(open_all(), START_TIMEOUT)
        except TimeoutError as error:
            names = ", ".join(tier.backend for tier in self.config.tiers)
            raise BackendError(
                f"the tiers could not be opened within {START_TIMEOUT:g} s, since the event loop does not run: one of "
                f"the backends ({names}) makes blocking calls on it; they belong on threads"
            ) from error

    def close(self, grace: float = CLOSE_TIMEOUT) -> None:
        """Write what is queued, for at most `grace` seconds, close the tiers and let go of the pool. Idempotent."""
        with self.guard.mutex:
            if self._closed:
                return
            self._closed = True
            self.guard.refusal = self.guard.refusal or CLOSED
            if not self.guard.broken:
                self.guard.index.tick()
        with contextlib.ExitStack() as last:  # in reverse order, and all of it whatever one of them raises
            last.callback(self.pool.close)
            last.callback(self._let_go)
            last.callback(self._log_writer.close)
            last.callback(self._framer.close)
            last.callback(self._loop.stop)
            last.callback(self._end_work, grace)
            for server in self.servers:
                last.callback(server.close)

    def _let_go(self) -> None:
        """Of the memory of all chunks: who still has this node, or is in a cycle with it, shall not keep that."""
        with self.guard.mutex:
            for space in self.guard.index.spaces.values():
                for entry in (*space.chunks.values(), *space.staged.values()):
                    entry.slot = None

    def _end_work(self, grace: float) -> None:
        try:
            self._loop.run(self._stop(grace), 2 * grace + CLOSE_TIMEOUT)
        except TimeoutError:
            log.error("the node's event loop does not answer; a backend may have blocked it; leaving it behind")

    async def _stop(self, grace: float) -> None:
        self._work()
        if self._ticking is not None:
            self._ticking.cancel()
        ends = await asyncio.gather(*(runner.close(grace) for runner in self.runners), return_exceptions=True)
        for runner, end in zip(self.runners, ends, strict=True):
            if isinstance(end, BaseException):
                line = (runner.config.name, end)
                self._log_writer.write(log, logging.ERROR, "tier %s could not be closed: %r", line)

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # For clients

    def register(self, namespace: Namespace) -> list[Space]:
        """Make a namespace known; returns a space for each of its groups.

        Raises:
            LayoutError: It doesn't fit the node's `chunk_tokens`, or is in use with other sizes.
        """
        if not isinstance(namespace, Namespace):
            raise LayoutError(f"a Namespace says what the KV is of; this is a {type(namespace).__name__}")
        geometries = [self._geometry(namespace, group) for group in namespace.groups]
        with self.guard.turn, self.guard.mutex:
            index = self.guard.use()
            spaces = {namespace.space(number): geometry for number, geometry in enumerate(geometries)}
            found = index.add_spaces(spaces, namespace.model_name or namespace.content.hex()[:16])
        largest = max(space.form(space.known.chunk_pages).nbytes for space in found)
        if largest > self.pool.capacity:
            log.warning(
                "cpu.capacity is %s, and a chunk of this model has %s: nothing of it can be kept; set at least %s, or "
                "a smaller chunk_tokens",
                format_size(self.pool.capacity),
                format_size(largest),
                format_size(8 * largest),
            )
        return found

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
        """Wait until nothing is queued or under way on any tier but what is past its deadline. Returns whether that
        came in time."""
        try:
            return self._loop.run(self._drained(timeout), None if timeout is None else timeout + TICK)
        except TimeoutError:
            return False

    def flushed(self, timeout: float | None = None) -> Future[bool]:
        """What `flush` returns, later.

        Raises:
            ClosedError: The node has been closed.
        """
        return self._loop.start(self._drained(timeout))

    def ask(self, spaces: Sequence[Space], keys: Sequence[bytes], first_page: int, places: int) -> Future[Any] | None:
        """Ask tiers that cannot be listed for the rest of a prompt, unless that was done just now. Called under the
        mutex. Returns what is done when the answer is there, None if there is nothing to wait for."""
        return self._prober.ask(spaces, keys, first_page, places)

    def past_host(self, number: int) -> DirectReads | None:
        """Reads of a tier into a device's memory, if it has such now."""
        direct = self.runners[number].direct
        return direct if direct is not None and direct.possible else None

    @property
    def beside(self) -> list[tuple[int, TierConfig]]:
        """Number and settings of the tiers that other processes can read to devices of their own."""
        return [(runner.number, runner.config) for runner in self.runners if runner.read_beside]

    def is_beside(self, number: int) -> bool:
        """Whether a tier is one of those, and in use."""
        runner = self.runners[number]
        return runner.read_beside and runner.up

    def start(self, work: Any) -> Future[Any]:
        """Run a coroutine on the node's event loop.

        Raises:
            ClosedError: The node has been closed.
        """
        return self._loop.start(work)

    def check(self) -> None:
        """Take a turn, as every call does.

        Raises:
            ClosedError: The node has been closed, or its index cannot be trusted any more.
            BackendError: Its event loop stands still, so nothing comes from or goes to any tier.
        """
        with self.guard.mutex:
            self.guard.use()
        self.check_loop()

    def check_loop(self) -> None:
        """The second half of `check`, without the mutex.

        Raises:
            BackendError: Its event loop stands still.
        """
        still = self.runtime.clock() - self._ticked
        if still > STILL:
            raise BackendError(
                f"the event loop has stood still for {still:.0f} s; a backend makes blocking calls on it"
            )

    def number(self) -> int:
        """A number that nothing else of this node has. Called under the mutex."""
        self._numbers += 1
        return self._numbers

    def later(self, work: Callable[[], None]) -> None:
        """Have `work` called on the event loop soon. May be called from anywhere, finalizers too."""
        self._loop.call(work)

    def manifest_of(self, space: Space) -> bytes:
        """What is known of a namespace by one of its spaces: from an engine, or from a tier; empty if nothing. Called
        under the mutex."""
        if space.geometry is not None:
            return space.geometry.manifest
        return self._reports.manifests.get(space.digest, b"")

    # On the event loop

    async def _drained(self, seconds: float | None) -> bool:
        try:
            async with asyncio.timeout(seconds):
                while True:
                    self._work()
                    for runner in self.runners:
                        await runner.drained()
                    if not self.guard.waiting and all(runner.idle for runner in self.runners):
                        break
                    await asyncio.sleep(0)  # what has ended led to something more
        except TimeoutError:
            return False
        return True

    def _wake(self) -> None:
        self._loop.call(self._work)

    def _work(self) -> None:
        for decision in self.guard.take():
            if isinstance(decision, Read):
                self.runners[decision.load.tier].read(decision.load)
            else:
                self.runners[decision.tier].mutate(decision)

    def _abandon(self) -> None:
        def stop() -> None:
            for runner in self.runners:
                runner.health.stop()

        self._loop.call(stop)

    async def _tick(self) -> None:
        while True:
            before = self.runtime.clock()
            await asyncio.sleep(TICK)
            self._ticked = self.runtime.clock()
            self.lag = max(0.0, self._ticked - before - TICK)
            self._reports.tick()
            self._work()  # also what was left by a thread that was interrupted before it could wake us


def _rules(config: Config, tier: TierConfig, backend: StorageBackend) -> TierRules:
    listed = isinstance(backend, Scannable)
    return TierRules(
        tier.name,
        tier.write,
        tier.admit,
        tier.policy,
        tier.capacity if listed else None,  # what others store there too is the backend's to bound
        shared=not listed,
        remembers_use=isinstance(backend, RemembersUse),
        evictable=listed,
        pending_limit=max(config.cpu.capacity // 2, 1),
        promote=tier.promote,
    )


def _shares(config: Config, tiers: Sequence[TierRules]) -> list[ShareRules]:
    kept = {CPU, *(tier.name for tier in tiers if tier.evictable)}
    shares = []
    for number, share in enumerate(config.shares):
        quotas = share.tiers if share.cpu is None else {CPU: share.cpu, **share.tiers}
        for name in quotas:
            if name not in kept:
                raise ConfigError(
                    f"shares[{number}].tiers.{name}: this tier's backend cannot list what it holds, so a node doesn't "
                    "know what an owner has there; delete the quota"
                )
        kind: OwnerKind = "tenant" if share.tenant else "model"
        shares.append(ShareRules(kind, share.tenant or share.model, share.weight, quotas))
    return shares


_nodes: weakref.WeakSet[Node] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """In a forked child: its copies of nodes have no threads, so they are closed, and their parent's go on."""
    for node in list(_nodes):
        node.guard.mutex = threading.Lock()  # another thread may have held it
        node.guard.refusal = FORKED
        node._closed = True


os.register_at_fork(after_in_child=_leave_to_parent)

"""A simulated process: a node, its tiers and the engines in it. It can be closed, and it can be killed."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

from lmcache_core.config import Config
from lmcache_core.namespace import Namespace
from lmcache_core.node import Node
from lmcache_core.testing.simulation.backend import SimulatedBackend
from lmcache_core.testing.simulation.checks import Lent, Watcher
from lmcache_core.testing.simulation.engine import Engine
from lmcache_core.testing.simulation.loop import Scope, VirtualLoop
from lmcache_core.testing.simulation.process import SimulatedRuntime
from lmcache_core.testing.simulation.trace import Trace

__all__ = ["Host"]


class Host:
    """One process.

    Args:
        name: In the trace.
        loop: The virtual loop.
        rng: Draws what its engines do.
        trace: What happens.
        config: The node's settings.
        namespace: What its engines compute.
        backends: One for each tier.
        engines: How many there are.
    """

    def __init__(
        self,
        name: str,
        loop: VirtualLoop,
        rng: random.Random,
        trace: Trace,
        config: Config,
        namespace: Namespace,
        backends: Sequence[SimulatedBackend],
        engines: int,
    ) -> None:
        self.name = name
        self.loop = loop
        self.rng = rng
        self.trace = trace
        self.config = config
        self.namespace = namespace
        self.backends = list(backends)
        self.resting = False
        """Engines end what they are at, and begin nothing."""
        self.closing = False
        self.pace = 1.0
        """By what engines' pauses are longer, while somebody waits for another host."""
        self.dead = False
        self.operations = 0
        self.recent: deque[list[bytes]] = deque(maxlen=4)
        """Prompts that its engines have stored."""
        self.lent = Lent()
        self.node_scope = Scope(f"{name}.node")
        self.engines_scope = Scope(f"{name}.engines")
        runtime = SimulatedRuntime(self.node_scope, loop, rng, trace)
        trace.add(f"{name} opens")
        self.node = Node(config, backends, runtime=runtime)
        self.watcher = Watcher(name, self.node, self.backends, self.lent, trace)
        self.engines = [Engine(self, number, random.Random(rng.random())) for number in range(engines)]
        self.tasks = [loop.spawn(self.engines_scope, engine.run()) for engine in self.engines]

    # How long an answer may take

    @property
    def ask_seconds(self) -> float:
        """Asking all tiers what they hold."""
        return max((tier.read_timeout for tier in self.config.tiers), default=0.0)

    @property
    def read_seconds(self) -> float:
        """A load: each tier that has the chunk may be tried."""
        return sum(tier.read_timeout for tier in self.config.tiers)

    @property
    def write_seconds(self) -> float:
        """A write: as many as the queue holds may be in front of it, and each may be tried twice."""
        queued = 2 * self.config.cpu.capacity // 8192 + 4
        return 2 * queued * max((tier.write_timeout for tier in self.config.tiers), default=0.0)

    @property
    def prefetch_seconds(self) -> float:
        """A prompt from one tier to another."""
        return 12 * (self.read_seconds + self.write_seconds)

    # What happens to it

    def check(self) -> None:
        """Check what must hold now."""
        self.watcher.quick()
        if not self.closing:
            self.watcher.full()

    def failed(self) -> BaseException | None:
        """What an engine has raised."""
        for task in self.tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                return error
        return None

    def come_to_rest(self, seconds: float) -> None:
        """Let the engines end."""
        self.resting = True
        if not self.loop.run_until(lambda: all(task.done() for task in self.tasks), seconds):
            self.trace.fail(f"{self.name}: engines have not come to rest in {seconds:g} s")

    def close(self, grace: float) -> None:
        """As at an orderly end of the process, in the middle of what its engines do."""
        self.trace.add(f"{self.name} is closed in {grace:g} s")
        self.closing = True
        self.node.close(grace)
        self.come_to_rest(self.prefetch_seconds + 60)
        self.end()

    def kill(self) -> None:
        """As by a signal that cannot be caught."""
        self.trace.add(f"{self.name} is killed")
        self.closing = True
        self.node_scope.alive = self.engines_scope.alive = False
        for backend in self.backends:
            backend.crash()
        if not self.node._closed:
            self.node._closed = True
            self.node.pool.close()
        self.end()

    def end(self) -> None:
        """It is no more."""
        self.node_scope.alive = self.engines_scope.alive = False
        self.dead = True

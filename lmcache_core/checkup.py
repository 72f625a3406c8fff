"""What health probes ask of a node. An answer comes within a second, whatever else hangs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from lmcache_core.errors import LMCacheError
from lmcache_core.index import Index
from lmcache_core.node import Node

__all__ = ["Checkup", "Health"]

PATIENCE = 0.5
"""Seconds to wait for the node's mutex, which is held for microseconds."""


class Health(NamedTuple):
    """Whether it is well, and in what way not."""

    well: bool
    text: str


class Checkup:
    """Checks one node. Called on threads of its own: an interrupt, which hits the main thread, must not find the mutex
    taken by hand."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def alive(self) -> Health:
        """Whether the process does its work: nobody sits on the index, and the event loop runs."""
        return self._ask(lambda index: Health(True, "alive"))

    def ready(self) -> Health:
        """Whether it takes new chunks. Tiers were opened when it was made; one that is left alone now is named and no
        reason not to be ready, since all others serve without it."""
        return self._ask(self._ready)

    def _ask(self, answer: Callable[[Index], Health]) -> Health:
        guard = self._node.guard
        if not guard.mutex.acquire(timeout=PATIENCE):
            return Health(False, f"the index has been in use for {PATIENCE:g} s; a thread of this process hangs")
        try:
            health = answer(guard.use())
        except LMCacheError as error:  # closed, or not to be trusted any more
            return Health(False, str(error))
        finally:
            guard.mutex.release()
        try:
            self._node.check_loop()
        except LMCacheError as error:
            return Health(False, str(error))
        return health

    def _ready(self, index: Index) -> Health:
        node = self._node
        if index.frozen:
            what = "drained" if node.drained.is_set() else "frozen, or being drained"
            return Health(False, f"{what}: it serves what it has and stores nothing new")
        if not node.pool.usable:
            return Health(False, "no memory of the pool can be used yet")
        down = [runner.config.name for runner in node.runners if not runner.up]
        return Health(True, "ready" + (f"; left alone: {', '.join(down)}" if down else ""))

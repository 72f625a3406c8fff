"""What a node needs of the machine besides memory: time, an event loop and threads.

All of it is asked for here, so that tests can put a simulation in its place (`lmcache_core.testing.simulation`).
"""

from __future__ import annotations

import time

from lmcache_core.iothreads import IoThreads, Workers
from lmcache_core.loop import LoopThread, NodeLoop
from lmcache_core.ratelog import LineWriter, LogWriter

__all__ = ["Runtime"]


class Runtime:
    """The real one. Each node asks for its own loop, workers and writer once, and closes them."""

    prefault = True
    """Whether the pool's memory is faulted in by a thread."""

    def clock(self) -> float:
        """Monotonic seconds. May be called from any thread."""
        return time.monotonic()

    def pause(self, seconds: float) -> None:
        """Let other threads have their turns. Blocks; never called on the event loop."""
        time.sleep(seconds)

    def loop(self) -> NodeLoop:
        """The event loop that owns all I/O of the node, already running."""
        return LoopThread()

    def workers(self, name: str, threads: int) -> Workers:
        """What runs calls that would hold the event loop up."""
        return IoThreads(name, threads)

    def log_writer(self) -> LineWriter:
        """What writes log lines for the event loop."""
        return LogWriter()

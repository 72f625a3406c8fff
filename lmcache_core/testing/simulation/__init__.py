"""Deterministic simulation: whole nodes in virtual time on one thread, with faults, crashes and races drawn by a seed.

A seed decides everything: settings, tiers, latencies, faults, what engines do, what runs first, when a process is
closed or killed. While it runs, invariants are checked; at its end the weather is fine, and all must be well again. A
seed that fails does so again, in the same way, in any process:

    python -m lmcache_core.testing.simulation --seeds 1000
    python -m lmcache_core.testing.simulation --trace SEED
"""

from __future__ import annotations

from lmcache_core.testing.simulation.trace import SimulationError
from lmcache_core.testing.simulation.world import STEPS, Outcome, run

__all__ = ["STEPS", "Outcome", "SimulationError", "run"]

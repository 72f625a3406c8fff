"""The index: which chunk is where, and what to do next. Events in, decisions out; no I/O and no threads."""

from lmcache_core.index.entries import POOL, Entry, Geometry, Space, tier_bit
from lmcache_core.index.index import Index
from lmcache_core.index.tiers import TierRules
from lmcache_core.index.watching import Change, Watch

__all__ = ["POOL", "Change", "Entry", "Geometry", "Index", "Space", "TierRules", "Watch", "tier_bit"]

"""The index: which chunk is where, and what to do next. Events in, decisions out; no I/O and no threads."""

from lmcache_core.index.entries import POOL, Entry, Geometry, Space, tier_bit
from lmcache_core.index.index import Index
from lmcache_core.index.tiers import TierRules

__all__ = ["POOL", "Entry", "Geometry", "Index", "Space", "TierRules", "tier_bit"]

"""Wrappers around any storage backend: behaviour that is no backend's own.

The ones here make a backend fail, wait or lie on purpose, to see what the layers above make of it. All are seeded, and
controlled while they run. They nest: `Slow(Faulty(Corrupting(disk)))`.
"""

from lmcache_core.wrappers.base import DATA_VERBS, Wrapper
from lmcache_core.wrappers.corrupting import Corrupted, Corrupting, Kind
from lmcache_core.wrappers.faulty import Faulty, Schedule, always, every, first, nth, randomly
from lmcache_core.wrappers.slow import Slow

__all__ = [
    "DATA_VERBS",
    "Corrupted",
    "Corrupting",
    "Faulty",
    "Kind",
    "Schedule",
    "Slow",
    "Wrapper",
    "always",
    "every",
    "first",
    "nth",
    "randomly",
]

"""Chunks of the pool that still have to be written before they may go, in the order in which they will."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from lmcache_core.index.entries import Entry

AHEAD = 4
"""One part in so many of the pool is kept ready to be taken at once: free, or held by a tier too."""


class Unwritten:
    """Chunks of the pool that are not on all the tiers that take what it evicts, least recently used first."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._entries: OrderedDict[Entry, None] = OrderedDict()

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def __contains__(self, entry: Entry) -> bool:
        return entry in self._entries

    def add(self, entry: Entry) -> None:
        """It is in the pool, and has just been used."""
        if entry not in self._entries:
            self._entries[entry] = None
            self.nbytes += entry.nbytes

    def discard(self, entry: Entry) -> None:
        """It has left the pool, or is written, or will be."""
        if entry in self._entries:
            del self._entries[entry]
            self.nbytes -= entry.nbytes

    def touch(self, entry: Entry) -> None:
        """It was used."""
        if entry in self._entries:
            self._entries.move_to_end(entry)

    def first(self) -> Entry | None:
        """What should be written next."""
        return next(iter(self._entries), None)

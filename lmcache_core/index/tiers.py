"""Capacity, admission and order of eviction of one tier, as the index sees it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from lmcache_core.index.entries import Entry, tier_bit
from lmcache_core.index.policy import PolicyName
from lmcache_core.index.shares import Owner, Shares
from lmcache_core.pace import LONG_RUN, Pace
from lmcache_core.protocols import ChunkKey

WriteMode = Literal["through", "evict", "never"]
Admission = Literal["always", "second-touch"]
_REMEMBERED = 1 << 16


@dataclass(frozen=True, slots=True)
class TierRules:
    """How a tier is used.

    Args:
        name: Its name in the configuration and in metrics.
        write: When chunks are written to it: as they are stored, as the host pool evicts them, or never.
        admit: Which are: all, or those seen a second time.
        policy: Order of eviction.
        capacity: Bytes it may hold; None leaves that to the backend.
        shared: Whether others on other hosts read it.
        remembers_use: Whether it wants to know what was used.
        evictable: Whether chunks may be deleted from it to make room.
        pending_limit: Bytes of chunks that may wait to be written, or are; one chunk may always.
        promote: Whether chunks that were read from tiers further down are written here too.
    """

    name: str
    write: WriteMode = "through"
    admit: Admission = "always"
    policy: PolicyName = "lru"
    capacity: int | None = None
    shared: bool = False
    remembers_use: bool = False
    evictable: bool = True
    pending_limit: int = 1 << 62
    promote: bool = True


class TierState:
    """State of one tier. Guarded by the index's mutex."""

    def __init__(self, number: int, rules: TierRules) -> None:
        self.number = number
        self.bit = tier_bit(number)
        self.rules = rules
        self.up = False
        self.capacity = rules.capacity
        self.used = 0
        """Bytes held or being written."""
        self.pending = 0
        """Bytes of slots that wait to be written or are."""
        self.owed: OrderedDict[Entry, None] = OrderedDict()
        """Chunks of the pool that shall be written once less is pending, in order."""
        self.policy = Shares(number + 1, rules.policy)
        self.pace = Pace()
        """How fast it is read now."""
        self.usual = Pace(LONG_RUN)
        """How fast it is read usually."""
        self.touched: OrderedDict[ChunkKey, None] = OrderedDict()
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def admits(self, entry: Entry) -> bool:
        """Whether a chunk shall be written now; a use of it that counts as its first touch is remembered."""
        if self.rules.admit == "always":
            return True
        if self._seen.pop(entry.key, 0) is None:
            return True
        self._seen[entry.key] = None
        if len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)
        return False

    def takes(self, entry: Entry) -> bool:
        """Whether its queue has room for a chunk."""
        return not self.pending or self.pending + entry.nbytes <= self.rules.pending_limit

    def used_now(self, entry: Entry) -> None:
        """Note a use of a chunk that is on this tier."""
        self.policy.touch(entry)
        if self.rules.remembers_use:
            key = entry.chunk_key
            self.touched[key] = None
            self.touched.move_to_end(key)
            if len(self.touched) > _REMEMBERED:
                self.touched.popitem(last=False)

    def gained(self, entry: Entry) -> None:
        """Note that a chunk can be read from here now. Its bytes have been counted as used before."""
        entry.where |= self.bit
        entry.space.tell(entry, self.bit, True)
        self.policy.add(entry)

    def lost(self, entry: Entry) -> None:
        """Note that a chunk can be read from here no longer."""
        if entry.where & self.bit:
            entry.where &= ~self.bit
            entry.space.tell(entry, self.bit, False)
            self.refund(entry)
            self.policy.discard(entry)

    def charge(self, entry: Entry) -> None:
        """Count the bytes of a chunk that is here or is being written."""
        self.used += entry.nbytes
        self.policy.charge(entry)

    def refund(self, entry: Entry) -> None:
        """Undo `charge`."""
        self.used -= entry.nbytes
        self.policy.refund(entry)

    def over(self, more: int) -> int:
        """Bytes that must go before `more` fit; 0 or less when they do."""
        return 0 if self.capacity is None else self.used + more - self.capacity

    def candidates(self, asking: Owner | None = None, more: int = 0) -> Iterator[Entry]:
        """Chunks in the order in which they should make room for `more` bytes of `asking`."""
        return self.policy.candidates(asking, more) if self.rules.evictable else iter(())

    def candidates_of(self, owner: Owner) -> Iterator[Entry]:
        """Chunks of one owner in the order in which they should make room."""
        return owner.shares[self.number + 1].order.candidates() if self.rules.evictable else iter(())
